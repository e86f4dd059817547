"""The linear recurrence against its double sum."""

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn.scan import linear_scan

pytestmark = pytest.mark.usefixtures("float64")


@given(seed=st.integers(0, 2**32), size=st.integers(0, 40))
def test_against_the_double_sum(seed, size):
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(-1, 1, (3, size)) * (rng.random((3, size)) > 0.1), rng.normal(size=(3, size))
    want = np.array([ref.linear_scan(*row) for row in zip(a, b)]).reshape(3, size)
    got = linear_scan(torch.from_numpy(a), torch.from_numpy(b))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-10, atol=1e-10)
    back = linear_scan(
        torch.from_numpy(a[:, ::-1].copy()), torch.from_numpy(b[:, ::-1].copy()), reverse=False
    )
    np.testing.assert_allclose(back.numpy()[:, ::-1], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9])
def test_gradient(size):
    a, b = torch.rand(2, size).requires_grad_(), torch.randn(2, size).requires_grad_()
    assert torch.autograd.gradcheck(linear_scan, (a, b))
    assert torch.autograd.gradcheck(lambda a, b: linear_scan(a, b, reverse=False), (a, b))


def test_by_hand():
    a, b = torch.tensor([0.5, 0.5, 0.0, 2.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert linear_scan(a, b).tolist() == [2.75, 3.5, 3.0, 4.0]  # nothing crosses the 0
    assert linear_scan(a, b, reverse=False).tolist() == [1.0, 2.5, 3.0, 10.0]


def test_ones_are_a_cumulative_sum_over_a_long_row():
    b = torch.randn(2, 5000)
    want = b.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(linear_scan(torch.ones_like(b), b), want, rtol=1e-10, atol=1e-10)


@given(seed=st.integers(0, 2**32), size=st.integers(1, 70), more=st.integers(1, 70))
def test_padding_changes_no_bit(seed, size, more):
    """A row is the same in a batch of any width, so that a resumed or differently cut run is."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.rand(2, size, generator=g), torch.randn(2, size, generator=g)
    wide = (torch.nn.functional.pad(x, (0, more)) for x in (a, b))
    assert torch.equal(linear_scan(*wide)[:, :size], linear_scan(a, b))


def test_vmap_equals_a_loop():
    a, b = torch.rand(4, 9), torch.randn(4, 9)
    torch.testing.assert_close(torch.func.vmap(linear_scan)(a, b), linear_scan(a, b), rtol=0, atol=1e-15)


BAD = [float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize("bad", BAD)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 40))
def test_nothing_crosses_a_zero_whatever_lies_beyond(bad, seed, size):
    """Value and gradient before the 0 are those of the sequence that ends there."""
    g = torch.Generator().manual_seed(seed)
    end = int(torch.randint(0, size - 1, (), generator=g))
    a, b = torch.rand(size, generator=g) * 2 - 1, torch.randn(size, generator=g)
    a[end], b[end + 1 + int(torch.randint(0, size - end - 1, (), generator=g))] = 0, bad
    a, b = a.requires_grad_(), b.requires_grad_()
    y = linear_scan(a, b)
    assert y[end] == b[end]
    short = linear_scan(a[: end + 1], b[: end + 1])
    torch.testing.assert_close(y[: end + 1], short, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(y[: end + 1].sum(), (a, b))
    want = torch.autograd.grad(short.sum(), (a, b), materialize_grads=True)
    torch.testing.assert_close(got[1], want[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[0][:end], want[0][:end], rtol=1e-12, atol=1e-12)
    assert got[0].isfinite().all() and got[0][end] == 0  # what lies beyond has no finite derivative


def test_forwards_too():
    a, b = torch.tensor([0.5, 0.5, 0.0, 0.5]), torch.tensor([torch.nan, 1.0, 3.0, 4.0])
    assert linear_scan(a, b, reverse=False)[2:].tolist() == [3.0, 5.5]


@pytest.mark.parametrize("at", range(6))
def test_the_derivative_in_a_where_it_is_0(at):
    """y[t] = b[t] there, but moving a off 0 lets y[t + 1] in: a gate may open again."""
    a, b = torch.rand(6), torch.randn(6).requires_grad_()
    a[at] = 0
    assert torch.autograd.gradcheck(linear_scan, (a.requires_grad_(), b))
