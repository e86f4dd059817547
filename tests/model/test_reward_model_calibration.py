"""Calibration of a reward model's heads."""

import math

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as some

from rft_fn import model
from rft_fn.model import Head

HEADS = (Head("a"), Head("b"))


def drawn(n=200, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, generator=g) * torch.tensor([3.0, 0.1]) + torch.tensor([5.0, -2.0])


@given(shift=some.floats(-9, 9), scale=some.floats(0.01, 9))
def test_calibrated_scores(shift, scale):
    score = drawn(9).double()
    got = model.calibrated(score, (Head("a", shift, scale), Head("b")))
    np.testing.assert_allclose(got[:, 0], (score[:, 0].numpy() - shift) / scale)
    assert torch.equal(got[:, 1], score[:, 1])


def test_standardized_heads_make_held_out_scores_comparable():
    score = drawn()
    got = model.calibrated(score.double(), model.standardized(score, HEADS))
    np.testing.assert_allclose(got.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(got.std(0), 1, atol=1e-9)
    assert [h.name for h in model.standardized(score, HEADS)] == ["a", "b"]


def cross_entropy(margin, scale, label):
    """Of margins [N] at each of the scales [M]."""
    logit = margin / np.atleast_1d(scale)[:, None]
    return (label * np.logaddexp(0, -logit) + (1 - label) * np.logaddexp(0, logit)).mean(1)


@given(seed=some.integers(0, 50), factor=some.sampled_from([0.01, 1.0, 40.0]))
def test_the_temperature_has_the_least_cross_entropy(seed, factor):
    """By a search over a fine grid; the scale goes with that of the scores."""
    g = torch.Generator().manual_seed(seed)
    margin = factor * (torch.randn(60, generator=g, dtype=torch.float64) + 0.8)
    rejected = torch.randn(60, 1, generator=g, dtype=torch.float64)
    (head,) = model.tempered(rejected + margin[:, None], rejected, (Head("a"),))
    label = 61 / 62
    grid = factor * np.exp(np.linspace(-3, 4, 1401))
    losses = cross_entropy(margin.numpy(), grid, label)
    assert cross_entropy(margin.numpy(), head.scale, label) <= losses.min() + 1e-12
    assert head.scale == pytest.approx(grid[losses.argmin()], rel=0.01)
    assert head.shift == pytest.approx(float((2 * rejected[:, 0] + margin).mean() / 2))


def test_a_temperature_recovers_the_noise_of_preferences():
    """Labels drawn from sigmoid(difference / 5): differences over 5 are their logits again."""
    g = torch.Generator().manual_seed(0)
    a, b = 8 * torch.randn(2, 40_000, generator=g, dtype=torch.float64)
    first = torch.rand(40_000, generator=g, dtype=torch.float64) < torch.sigmoid((a - b) / 5)
    chosen, rejected = torch.where(first, a, b)[:, None], torch.where(first, b, a)[:, None]
    (head,) = model.tempered(chosen, rejected, (Head("a"),))
    assert head.scale == pytest.approx(5, rel=0.03)


def test_pairs_that_are_all_in_order_have_a_temperature_too():
    (head,) = model.tempered(torch.ones(30, 1), torch.zeros(30, 1), (Head("a"),))
    assert 1 / (1 + math.exp(-1 / head.scale)) == pytest.approx(31 / 32)


def test_a_calibration_goes_into_the_model_by_names():
    rm = model.load_reward(tiny.llama(), new=True, heads=("a", "b"))
    fitted = model.standardized(drawn(), HEADS)
    assert rm.with_calibration(fitted).heads == fitted
    with pytest.raises(ValueError, match=r"heads: expected .* \['a', 'b'\], got one of \['b', 'a'\]"):
        rm.with_calibration(fitted[::-1])


def test_bad_input():
    for options, said in (
        ({"scale": 0.0}, "head: a: expected a positive scale, got 0.0"),
        ({"scale": -1.0}, "a: expected a positive scale"),
        ({"scale": math.inf}, "a: expected a positive scale"),
        ({"shift": math.nan}, "a: expected a finite shift"),
    ):
        with pytest.raises(ValueError, match=said):
            Head("a", **options)
    with pytest.raises(ValueError, match=r"score: expected \[\.\.\., 2\] .* \['a', 'b'\], got \[4, 3\]"):
        model.calibrated(torch.zeros(4, 3), HEADS)
    with pytest.raises(ValueError, match="expected two rows or more to calibrate heads, got 1"):
        model.standardized(torch.zeros(1, 2), HEADS)
    with pytest.raises(ValueError, match="score: a: expected scores that differ, got 1"):
        model.standardized(torch.ones(3, 2), HEADS)
    spoilt = drawn()
    spoilt[3, 1] = math.nan
    with pytest.raises(ValueError, match="score: b: expected finite scores"):
        model.standardized(spoilt, HEADS)
    with pytest.raises(ValueError, match="score: b: expected finite scores"):
        model.tempered(spoilt, drawn(), HEADS)
    with pytest.raises(ValueError, match=r"a: expected pairs with a higher score .* difference of -1"):
        model.tempered(torch.zeros(9, 1), torch.ones(9, 1), (Head("a"),))
