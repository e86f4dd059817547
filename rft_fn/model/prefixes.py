"""Tokens of a pack that begin alike: the hidden states of all of them are computed once.

In a causal model the hidden state of a token depends on the tokens up to it, and on nothing else. The
responses to one prompt share all of its tokens, so a pack that holds several of them computes it once.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

__all__ = ["Prefixes", "find_prefixes", "take_rows"]

LEAST = 0.1  # share of a pack's tokens that has to be saved: attention gathers what the others save


class Prefixes(NamedTuple):
    """Which tokens of a pack are computed, and where the others find their hidden state."""

    kept: Tensor  # [U] i64, the tokens that are computed, in order
    of: Tensor  # [T] i64, the place among `kept` of a token with the same beginning
    own: list[int]  # how many of `kept` are of each sequence: its last ones


def find_prefixes(tokens: Tensor, pos: Tensor, sizes: Sequence[int]) -> Prefixes | None:
    """The tokens [T] of a pack that have to be computed, given its positions [T] and sizes of sequences.

    Two tokens share a hidden state if they stand at the same place of their sequences, behind equal tokens.
    None where that saves less than a tenth of the tokens. Reads the tokens: they should be on the host.
    """
    starts = [0, *accumulate(sizes)]
    ids = np.array(tokens.tolist())  # inside a transform of functions a tensor has no array
    at = np.array(pos.tolist())

    # Padding behind a sequence stands at position 0: it is no continuation.
    rows = []
    for start, size in zip(starts, sizes):
        counted = at[start : start + size] == np.arange(size)
        rows.append(ids[start : start + _leading(counted)])

    # In the order of their bytes, a row has its longest common beginning with the row before it.
    owner = np.arange(len(ids))
    order = sorted(range(len(rows)), key=lambda k: rows[k].tobytes())
    for before, k in pairwise(order):
        size = min(len(rows[before]), len(rows[k]))
        size = _leading(rows[before][:size] == rows[k][:size])
        owner[starts[k] : starts[k] + size] = owner[starts[before] : starts[before] + size]

    kept = np.flatnonzero(owner == np.arange(len(ids)))
    if len(kept) > (1 - LEAST) * len(ids):
        return None
    place = np.zeros(len(ids), dtype=np.int64)
    place[kept] = np.arange(len(kept))
    own = [int(np.sum((kept >= start) & (kept < start + size))) for start, size in zip(starts, sizes)]
    return Prefixes(torch.from_numpy(kept), torch.from_numpy(place[owner]), own)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] of rows x [U, ...], whose gradient adds rows up in one order.

    The gradient of plain indexing adds them as threads come along, and is not the same bits twice.
    """
    return embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:])


def _leading(true: np.ndarray) -> int:
    """How many values are true before the first that is not."""
    if true.all():
        return len(true)
    return int(true.argmin())
