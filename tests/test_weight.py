"""The normaliser as data: each w against its definition, and what a cut of the batch does to it (nothing)."""

from functools import partial

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import weight

pytestmark = pytest.mark.usefixtures("float64")
WEIGHTS = {
    "token_mean": (weight.token_mean, ref.token_mean),
    "seq_mean": (weight.seq_mean, ref.seq_mean),
    "seq_sum": (weight.seq_sum, ref.seq_sum),
    "constant": (partial(weight.constant, length=7), partial(ref.constant, length=7)),
}
each = pytest.mark.parametrize("name", WEIGHTS)
masks = (
    st.integers(0, 2**32).map(lambda s: np.random.default_rng(s)).map(lambda g: g.random((5, 6)) < g.random())
)


@each
@given(mask=masks)
def test_against_the_definition(name, mask):
    ours, definition = WEIGHTS[name]
    np.testing.assert_allclose(ours(torch.from_numpy(mask)), definition(mask), rtol=1e-10, atol=0)


@given(mask=masks)
def test_what_each_sums_to(mask):
    """token_mean and seq_mean are means: they sum to 1, and a row gets its share.
    An empty batch sums to 0."""
    m = torch.from_numpy(mask)
    some, rows = m.any(), m.any(-1).sum().clamp(min=1)
    torch.testing.assert_close(weight.token_mean(m).sum(), some.double())
    torch.testing.assert_close(weight.seq_mean(m).sum(-1), m.any(-1).double() / rows)
    torch.testing.assert_close(weight.seq_sum(m).sum(), m.sum() / rows)
    torch.testing.assert_close(weight.constant(m, 6).sum(), m.sum() / (rows * 6))


@each
@given(mask=masks)
def test_masked_rows_and_padding_change_nothing(name, mask):
    """B counts the rows that have a token in mask: what a filter has masked
    away does not dilute the others."""
    m = torch.from_numpy(mask)
    wide = torch.zeros(8, 9, dtype=torch.bool)
    wide[1:6, :6] = m
    out = WEIGHTS[name][0](wide)
    assert torch.equal(out[1:6, :6], WEIGHTS[name][0](m))
    out[1:6, :6] = 0
    assert (out == 0).all()


@each
def test_a_batch_without_a_token_gives_zeros_and_not_nan(name):
    """What goes wrong elsewhere: a masked mean of nothing is 0 / 0, and one such
    row makes the whole step NaN."""
    out = WEIGHTS[name][0](torch.zeros(3, 4, dtype=torch.bool))
    assert (out == 0).all()


def test_the_four_differ_on_ragged_rows():
    """An option that silently changes nothing would pass every test that looks at one of them."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert weight.token_mean(mask)[:, 0].tolist() == [0.25, 0.25]
    assert weight.seq_mean(mask)[:, 0].tolist() == [1 / 6, 1 / 2]
    assert weight.seq_sum(mask)[:, 0].tolist() == [0.5, 0.5]
    assert weight.constant(mask, 10)[:, 0].tolist() == [0.05, 0.05]


def test_the_batch_is_divided_by_also_with_a_fixed_length():
    """What goes wrong elsewhere: sum / length without the number of rows, so that
    the gradient grows with the micro-batch."""
    one, four = torch.ones(1, 3, dtype=torch.bool), torch.ones(4, 3, dtype=torch.bool)
    assert weight.constant(four, 5).sum() == weight.constant(one, 5).sum()


# ---------- importance weights

pairs = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=8
).map(lambda rows: np.array(rows).T)


@pytest.mark.parametrize("name", ["truncated_is", "masked_is"])
@given(data=pairs, cap=st.sampled_from([1.0, 2.0, 5.0]))
def test_importance_weights_against_the_definition(name, data, cap):
    got = getattr(weight, name)(*torch.from_numpy(data), cap=cap)
    np.testing.assert_allclose(got, getattr(ref, name)(*data, cap), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("correct", [weight.truncated_is, weight.masked_is])
def test_importance_weights_at_extremes_and_outside_the_mask(correct):
    w = torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0])
    old = torch.tensor([-1.0, -1.0, -300.0, torch.nan, torch.inf])
    sampler = torch.tensor([-1.0, -300.0, -1.0, 0.0, torch.nan])
    out = correct(w, old, sampler)
    assert out[0] == 0.5 and out[1] == (1.0 if correct is weight.truncated_is else 0.0)
    assert 0 <= out[2] < 1e-8 and out[3:].tolist() == [0.0, 0.0]


def test_without_a_cap_the_correction_is_unbiased_and_with_one_it_is_not():
    """By enumeration: E under the sampler of ratio f is E under the policy of f; the cap takes
    from where the ratio is large."""
    old, sampler = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    f, p = torch.tensor([1.0, 2.0, 3.0]), sampler.exp()
    want = (old.exp() * f).sum()
    torch.testing.assert_close((weight.truncated_is(p, old, sampler, cap=1e9) * f).sum(), want)
    torch.testing.assert_close((weight.truncated_is(p, old, sampler, cap=2.0) * f).sum(), want - 0.2 * 1.5)
    torch.testing.assert_close((weight.masked_is(p, old, sampler, cap=2.0) * f).sum(), want - 0.7)
