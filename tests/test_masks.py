"""Masks of tokens and responses by how far the sampler is, chained and normalised; observed tokens."""

import math
from functools import partial

import numpy as np
import pytest
import ref_pieces as ref
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import loss, packing, rollout, testing, tree, weight
from rft_fn.types import Rollout

pytestmark = pytest.mark.usefixtures("float64")


@st.composite
def batches(draw):
    """(w, old_logp, logp, mask), [B, S]; log-ratios of scale 0.02 to 2."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    mask = generator.random(shape) < draw(st.sampled_from([0.5, 0.9, 1.0]))
    logp = -generator.random(shape) * 3
    old = logp + draw(st.sampled_from([0.02, 0.2, 2.0])) * generator.normal(size=shape)
    return np.where(mask, 0.5 + generator.random(shape), 0), old, logp, mask


MASKS = {
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "trust_region_mask": {"limit": 0.02},
    "second_moment_mask": {},
}


@each("name", MASKS)
@given(x=batches())
def test_a_mask_is_its_definition(name, x):
    got = getattr(weight, name)(*map(torch.from_numpy, x), **MASKS[name])
    np.testing.assert_allclose(got, getattr(ref, name)(*x, **MASKS[name]), rtol=1e-12, atol=0)


@given(x=batches())
def test_reductions_over_rows_are_their_definitions(x):
    _, old, logp, mask = x
    d, m = torch.from_numpy(old - logp), torch.from_numpy(mask)
    for ours, reduce in ((weight.row_sum, sum), (weight.row_mean, np.mean), (weight.row_max, max)):
        np.testing.assert_allclose(ours(d, m), ref.each_row(reduce, old - logp, mask), rtol=1e-10, atol=1e-12)


@given(x=batches())
def test_self_normalised_weights_keep_their_sum(x):
    w, old, logp, _ = map(torch.from_numpy, x)
    corrected = weight.truncated_is(w, old, logp)
    got = weight.self_normalized(corrected, w)
    np.testing.assert_allclose(got, ref.self_normalized(corrected.numpy(), x[0]), rtol=1e-12)
    torch.testing.assert_close(got.sum(), w.sum())
    assert (weight.self_normalized(torch.zeros_like(w), w) == 0).all()


def test_masks_chain_and_each_narrows():
    """k3 of a response and k2 of a token, in either order; k1 is a band of ratios."""
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(6, 9, generator=generator) * 3
    old, mask = logp + 0.3 * torch.randn(6, 9, generator=generator), torch.ones(6, 9, dtype=torch.bool)
    w = weight.token_mean(mask)
    k2, k3 = loss.kl_k2(logp, old), weight.row_mean(loss.kl_k3(logp, old), mask)
    rows = partial(weight.within, x=k3, high=float(k3.median()))
    single = partial(weight.within, x=k2, high=0.05)
    both = rows(single(w))
    assert torch.equal(both, single(rows(w)))
    assert ((both == 0) == ((rows(w) == 0) | (single(w) == 0))).all()
    assert 0 < (both > 0).sum() < min((rows(w) > 0).sum(), (single(w) > 0).sum())
    band = weight.within(w, loss.kl_k1(logp, old), low=-math.log(1.2), high=-math.log(0.8))
    ratio = (old - logp).exp()
    assert torch.equal(band > 0, (ratio >= 0.8) & (ratio <= 1.2))
    geometric = weight.geometric_mask(w, old, logp, mask, low=0.9, high=1.1)
    k1 = weight.row_mean(loss.kl_k1(logp, old), mask)
    assert torch.equal(geometric, weight.within(w, k1, low=-math.log(1.1), high=-math.log(0.9)))


def test_a_long_response_is_judged_as_a_short_one():
    """A ratio of 1.005 on each of 1,000 tokens: the product is 146, the geometric mean 1.005."""
    mask, logp = torch.ones(1, 1000, dtype=torch.bool), torch.full((1, 1000), -1.0)
    w, old = weight.token_mean(mask), logp + math.log(1.005)
    assert torch.equal(weight.geometric_mask(w, old, logp, mask), w)
    assert (weight.masked_is_seq(w, old, logp, mask) == 0).all()


def test_one_far_token_voids_its_response_only():
    mask = torch.ones(2, 4, dtype=torch.bool)
    w, logp = weight.token_mean(mask), torch.full((2, 4), -2.0)
    old = logp.clone()
    old[1, 2] += 1.0
    kept = weight.trust_region_mask(w, old, logp, mask, limit=0.1) > 0
    assert kept.tolist() == [[True] * 4, [False] * 4]
    kept = weight.second_moment_mask(w, old, logp, mask) > 0
    assert kept.tolist() == [[True] * 4, [True, True, False, True]]


def test_garbage_outside_the_mask_and_excluded_tokens_stay_finite():
    w, mask = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[True, True, False]])
    old, logp = torch.tensor([[-torch.inf, -2.0, torch.nan]]), torch.tensor([[-1.0, -2.0, torch.nan]])
    for f in (weight.geometric_mask, partial(weight.trust_region_mask, limit=1.0)):
        assert (f(w, old, logp, mask) == 0).all()
    assert weight.second_moment_mask(w, old, logp, mask).tolist() == [[0, 0.5, 0]]


@pytest.mark.parametrize("name", ["geometric_mask", "trust_region_mask"])
def test_a_mask_by_rows_does_not_look_at_other_rows(name):
    correct = partial(
        getattr(weight, name), **MASKS[name] | {"limit": 0.5} if "trust" in name else MASKS[name]
    )
    assert testing.importance_bias(correct, gap=0.0).bias < 1e-12
    assert testing.importance_bias(correct).bias > 0.01


# ---------- a proximal policy between two, and what an environment wrote


def test_proximal_log_probs_lie_between_both_and_carry_no_gradient():
    old, logp = (
        torch.tensor([-2.0, -1.0, -torch.inf]),
        torch.tensor([-1.0, -3.0, -torch.inf]).requires_grad_(),
    )
    prox = loss.proximal_logp(logp, old, 0.25)
    assert prox[:2].tolist() == [-1.75, -1.5] and not prox.requires_grad
    assert torch.equal(loss.proximal_logp(logp, old, 0.0), old)
    assert torch.equal(loss.proximal_logp(logp, old, torch.tensor([1.0, 2.0, 1.0]))[:2], logp.detach()[:2])


def observed(exp):
    """The tokens of a turn of the environment: every third one in mask."""
    return {"observed": ((exp.mask.cumsum(-1) % 3 == 0) & exp.mask).double()}


def test_observed_tokens_of_a_rollout_are_those_between_its_own():
    mask = torch.tensor([[False, True, False, True, False, False], [False] * 6])
    zero = torch.zeros(2, 6)
    played = rollout_of(mask, zero)
    assert rollout.observed(played).tolist() == [[False, False, True, False, True, False], [False] * 6]


def rollout_of(mask, zero):
    length = torch.tensor([5, 4])
    none = torch.zeros(2, dtype=torch.long)
    return Rollout(
        tokens=zero.long(),
        mask=mask,
        logp=zero,
        length=length,
        truncated=none.bool(),
        group=none,
        version=none,
    )


def echo(out, b):
    return loss.with_observed(loss.ppo_clip(out.logp, b.old_logp, b.adv), out.logp, b.extra["observed"])


def test_observed_tokens_are_learned_by_their_own_count():
    """ECHO: GRPO on what was sampled and, with a coefficient, the likelihood of what was read."""
    testing.check_all(echo, extra=observed, on_policy=False)
    c = testing.case(0, extra=observed)
    seen = c.exp.extra["observed"] > 0
    acted = c.exp.mask & ~seen
    w = weight.token_mean(acted) + 0.1 * weight.token_mean(seen)
    pack = packing.pack(tree.replace(c.exp, w=w), range(8))
    got = testing.total_and_grad(echo, c.apply, c.params, [pack])
    parts = []
    for mask, scale, f in (
        (acted, 1.0, lambda out, b: loss.ppo_clip(out.logp, b.old_logp, b.adv)),
        (seen, 0.1, lambda out, b: loss.nll(out.logp)),
    ):
        part = packing.pack(tree.replace(c.exp, w=scale * weight.token_mean(mask)), range(8))
        parts.append(testing.total_and_grad(f, c.apply, c.params, [part]))
    torch.testing.assert_close(got[0], parts[0][0] + parts[1][0])
    torch.testing.assert_close(got[1]["bigram"], parts[0][1]["bigram"] + parts[1][1]["bigram"])
