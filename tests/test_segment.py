"""Reductions over the sequences of a flat stream."""

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import segment

FUNCTIONS = {"sum": ref.segment_sum, "mean": ref.segment_mean, "max": ref.segment_max}


@st.composite
def streams(draw):
    """(x, mask, seq, num_seqs): contiguous sequences, some of them empty or without a token in mask."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    total = sum(sizes)
    x = draw(st.lists(st.floats(-1e3, 1e3), min_size=total, max_size=total))
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    seq = np.repeat(np.arange(len(sizes)), sizes)
    return np.array(x, np.float64), np.array(mask, bool), seq, len(sizes)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(stream=streams())
def test_against_the_definition(name, stream):
    x, mask, seq, k = stream
    got = getattr(segment, name)(*(torch.from_numpy(v) for v in (x, mask, seq)), k)
    np.testing.assert_allclose(got.numpy(), FUNCTIONS[name](x, mask, seq, k), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sequence_without_a_token_in_mask_gives_zero_and_no_gradient(name):
    """A fault of other systems: 0 / 0 for a row that was masked, and a NaN that a later
    `where` hides but the gradient keeps."""
    x = torch.tensor([1.0, torch.nan, torch.inf, -3.0], requires_grad=True)
    mask, seq = torch.tensor([True, False, False, True]), torch.tensor([0, 1, 1, 3])
    out = getattr(segment, name)(x, mask, seq, 4)
    out.sum().backward()
    assert out.tolist() == [1.0, 0.0, 0.0, -3.0]
    assert x.grad.tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_counts_beyond_what_half_precision_can_count(dtype):
    """bf16 cannot add 1 to 256: a count or a sum held in it stops there."""
    x, mask, seq = torch.ones(5000, dtype=dtype), torch.ones(5000, dtype=torch.bool), torch.zeros(5000).long()
    assert segment.sum(x, mask, seq, 1).item() == 5000
    assert segment.mean(x, mask, seq, 1).item() == 1


def test_gradient_of_the_mean_is_one_over_the_tokens_in_mask():
    x = torch.arange(5.0, requires_grad=True)
    mask, seq = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 0])
    segment.mean(x, mask, seq, 2).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([1 / 3, 1 / 3, 0, 1, 1 / 3]))


@given(stream=streams())
def test_spread_against_the_definition(stream):
    _, _, seq, k = stream
    x = np.arange(k) / 7 - 1
    got = segment.spread(torch.from_numpy(x), torch.from_numpy(seq))
    np.testing.assert_array_equal(got, ref.segment_spread(x, seq))


@given(stream=streams())
def test_the_gradient_of_spread_is_the_sum_over_a_sequence(stream):
    """So a mean over the tokens of a loss that was spread is the mean over its sequences."""
    up, mask, seq, k = stream
    x = torch.zeros(k, dtype=torch.float64, requires_grad=True)
    up, mask, seq = (torch.from_numpy(v) for v in (up, mask, seq))
    (grad,) = torch.autograd.grad((segment.spread(x, seq) * torch.where(mask, up, 0)).sum(), x)
    torch.testing.assert_close(grad, segment.sum(up, mask, seq, k), rtol=1e-12, atol=1e-9)


def test_spread_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"x: expected \[K\] = \[K\], got \[2, 1\]"):
        segment.spread(torch.zeros(2, 1), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"seq: expected \[T\] = \[T\], got \[1, 1\]"):
        segment.spread(torch.zeros(2), torch.tensor([[0]]))
