"""Columns of random numbers, and ours against the definition on them."""

import numpy as np
import torch
from hypothesis import strategies as st


def table(*columns):
    """Arrays of 1 to 6 rows, one for each column."""
    return st.lists(st.tuples(*columns), min_size=1, max_size=6).map(lambda rows: np.array(rows).T)


def agree(ours, definition, data, **options):
    """Equal to 1e-10, on the columns of `data`."""
    got = ours(*torch.from_numpy(data), **options).numpy()
    np.testing.assert_allclose(got, definition(*data, **options), rtol=1e-10, atol=1e-10)
