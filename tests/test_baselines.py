"""Advantages by success rates, by the batch, by the best of a group, by role and by token; draws of rows."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import ref_pieces
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import advantage, reward_shaping, rollout, testing

pytestmark = pytest.mark.usefixtures("float64")
GROUP = {
    "maxrl": (advantage.maxrl, ref_pieces.maxrl),
    "gpg": (advantage.gpg, ref_pieces.gpg),
    "lite_ppo": (advantage.lite_ppo, ref_pieces.lite_ppo),
    "best_minus_second": (advantage.best_minus_second, ref_pieces.best_minus_second),
    "best_minus_second, scaled": (
        partial(advantage.best_minus_second, scale=True),
        partial(ref_pieces.best_minus_second, scale=True),
    ),
    "max_at_2": (partial(advantage.max_at_k, k=2), partial(ref_pieces.max_at_k, k=2)),
}
each_name = each("name", GROUP)
values = st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0, 10).map(lambda x: round(x, 3))


@st.composite
def groups(draw, most=7):
    n, g = draw(st.integers(1, 4)), draw(st.integers(2, most))
    return np.array(draw(st.lists(values, min_size=n * g, max_size=n * g))).reshape(n, g)


@each_name
@given(reward=groups())
def test_against_the_definition(name, reward):
    ours, definition = GROUP[name]
    np.testing.assert_allclose(ours(torch.from_numpy(reward)), definition(reward), rtol=1e-9, atol=1e-9)


@given(reward=groups(), data=st.data())
def test_max_at_k_is_its_definition_for_every_k(reward, data):
    k = data.draw(st.integers(2, reward.shape[1]))
    got = advantage.max_at_k(torch.from_numpy(reward), k=k)
    np.testing.assert_allclose(got, ref_pieces.max_at_k(reward, k=k), rtol=1e-9, atol=1e-9)


@given(reward=groups(), beta=st.floats(0.2, 3), more=groups())
def test_a_star_is_its_definition(reward, beta, more):
    got = advantage.a_star(torch.from_numpy(reward), beta=beta)
    np.testing.assert_allclose(got, ref_pieces.a_star(reward, reward, beta), rtol=1e-9, atol=1e-9)
    given_, want = np.resize(more, (len(reward), 3)), None
    want = ref_pieces.a_star(reward, given_, beta)
    got = advantage.a_star(torch.from_numpy(reward), torch.from_numpy(given_), beta=beta)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


# ---------- what sets them apart


def test_the_best_of_all_is_max_at_g():
    reward = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(advantage.max_at_k(reward, k=5) / 5, advantage.best_minus_second(reward))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_max_at_k_has_the_gradient_of_the_expected_best_of_k(k):
    """By enumeration of all groups of 4 responses of a policy over 3 words, with the weight of a sum over
    responses divided by their number."""
    theta = torch.tensor([0.3, -0.2, 0.5]).requires_grad_()
    reward = torch.tensor([0.1, 2.0, -1.0])
    logp = theta.log_softmax(-1)
    best = sum(
        logp[list(s)].sum().exp() * reward[list(s)].max() for s in itertools.product(range(3), repeat=k)
    )
    (want,) = torch.autograd.grad(best, theta, retain_graph=True)
    estimate = torch.zeros(3)
    for s in itertools.product(range(3), repeat=4):
        adv = advantage.max_at_k(reward[list(s)][None], k=k)[0]
        (g,) = torch.autograd.grad((adv * logp[list(s)]).mean(), theta, retain_graph=True)
        estimate += logp[list(s)].sum().exp().detach() * g
    torch.testing.assert_close(estimate, want, rtol=1e-12, atol=1e-14)


def test_maxrl_has_the_gradient_of_the_likelihood_of_success():
    """Of the first G - 1 terms of its series: minus the sum of (1 - p)^k / k, for rewards 0 or 1."""
    theta = torch.tensor([0.3, -0.2, 0.5]).requires_grad_()
    reward = torch.tensor([1.0, 0.0, 0.0])
    logp, size = theta.log_softmax(-1), 4
    p = (logp.exp() * reward).sum()
    (want,) = torch.autograd.grad(-sum((1 - p) ** k / k for k in range(1, size)), theta, retain_graph=True)
    estimate = torch.zeros(3)
    for s in itertools.product(range(3), repeat=size):
        adv = advantage.maxrl(reward[list(s)][None], eps=1e-12)[0]
        (g,) = torch.autograd.grad((adv * logp[list(s)]).mean(), theta, retain_graph=True)
        estimate += logp[list(s)].sum().exp().detach() * g
    torch.testing.assert_close(estimate, want, rtol=1e-9, atol=1e-12)


def test_a_hard_prompt_weighs_more_under_maxrl_than_under_grpo():
    hard, easy = torch.tensor([[1.0, *[0.0] * 7]]), torch.tensor([[*[1.0] * 7, 0.0]])
    gain = [advantage.maxrl(x).abs().sum() / advantage.grpo(x).abs().sum() for x in (hard, easy)]
    assert gain[0] > 5 * gain[1]


def test_gpg_makes_up_for_groups_without_a_gradient():
    reward = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    assert advantage.gpg(reward)[0].tolist() == [2.0, -2.0]
    assert (advantage.gpg(reward[1:]) == 0).all()


def test_the_value_of_a_star_lies_between_the_mean_and_the_best():
    reward = torch.tensor([[0.0, 1.0, 0.5]])
    near_best = reward - advantage.a_star(reward, beta=1e-3)
    near_mean = reward - advantage.a_star(reward, beta=1e3)
    assert near_best.max() == pytest.approx(1, abs=2e-3) and near_mean.max() == pytest.approx(0.5, abs=1e-3)


def test_which_advantages_depend_on_the_other_groups():
    """Lite PPO's are scaled by the batch."""
    with pytest.raises(AssertionError, match="alone instead of among 6 groups"):
        testing.check_group_estimator(advantage.lite_ppo)


# ---------- roles, and tokens


@given(
    reward=st.lists(values, min_size=1, max_size=8), data=st.data(), decay=st.sampled_from([0.0, 0.5, 0.95])
)
def test_rae_is_its_definition(reward, data, decay):
    role = data.draw(st.lists(st.integers(0, 2), min_size=len(reward), max_size=len(reward)))
    before = [0.5, -1.0, 2.0]
    want = ref_pieces.rae(reward, role, before, decay)
    got = advantage.rae(*map(torch.tensor, (reward, role, before)), decay=decay)
    for ours, theirs in zip(got, want):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_two_players_of_a_zero_sum_game_keep_baselines_of_their_own():
    baseline, role = torch.zeros(2), torch.tensor([0, 1])
    for _ in range(200):
        adv, baseline = advantage.rae(torch.tensor([1.0, -1.0]), role, baseline)
    assert adv.abs().max() < 1e-3 and baseline[0] > 0.99 > -0.99 > baseline[1]


@st.composite
def tokens(draw):
    """(return, log-prob, sum of squares, mask, group) of up to 6 responses of up to 5 tokens."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    p = generator.dirichlet([0.7] * 4, shape)
    chosen = p[..., 0].clip(1e-6)
    mask = generator.random(shape) < 0.8
    return (
        generator.normal(size=shape),
        np.log(chosen),
        (p**2).sum(-1),
        mask,
        generator.integers(0, 2, shape[0]),
    )


@given(x=tokens(), weighted=st.booleans())
def test_the_optimal_token_baseline_is_its_definition(x, weighted):
    ratio = np.exp(x[0]) if weighted else None
    want = ref_pieces.optimal_token_baseline(*x, ratio=ratio)
    given_ = None if ratio is None else torch.from_numpy(ratio)
    got = advantage.optimal_token_baseline(*map(torch.from_numpy, x), ratio=given_)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)


def test_a_token_that_only_one_response_reaches_has_no_baseline_and_holes_count_nothing():
    mask = torch.tensor([[True, False, True], [True, False, False]])
    ret = torch.ones(2, 1)
    logp, p2 = torch.full((2, 3), math.log(0.5)), torch.full((2, 3), 0.5)
    adv = advantage.optimal_token_baseline(ret, logp, p2, mask, torch.zeros(2, dtype=torch.long))
    assert adv.tolist() == [[0, 0, 1], [0, 0, 0]]


# ---------- PF-PPO


def test_rows_are_drawn_in_proportion_and_by_their_key():
    weight = torch.tensor([0.0, 1.0, 3.0, 0.0])
    drawn = rollout.draw_rows(weight, 7, count=4000)
    share = torch.bincount(drawn, minlength=4) / 4000
    assert share[0] == share[3] == 0 and share[2] == pytest.approx(0.75, abs=0.03)
    assert torch.equal(drawn, rollout.draw_rows(weight, 7, count=4000))
    assert not torch.equal(drawn, rollout.draw_rows(weight, 8, count=4000))
    assert (drawn.sort().values == drawn).all() and len(rollout.draw_rows(weight, 0)) == 4


def test_the_best_and_the_worst_of_each_group():
    reward = torch.tensor([[0.0, 1.0, 0.5, 1.0], [0.3, 0.3, 0.3, 0.3]])
    assert reward_shaping.best_and_worst(reward).tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]


R = torch.zeros(2, 4)
BAD = [
    (lambda: advantage.max_at_k(R, k=1), "k: expected between 2 and the 4 responses of each prompt, got 1"),
    (lambda: advantage.max_at_k(R, k=5), "k: expected between 2 and the 4 responses of each prompt, got 5"),
    (lambda: advantage.maxrl(R[:, :1]), "reward: .*: a group of one has no baseline"),
    (lambda: advantage.best_minus_second(R[:, :1]), "reward: .*: a group of one has no baseline"),
    (lambda: advantage.a_star(R, beta=0.0), "beta: expected > 0, got 0.0"),
    (lambda: advantage.a_star(R, R[:1]), r"reference_reward: expected \[N, 1\] = \[2, 1\], got \[1, 1\]"),
    (lambda: advantage.rae(R[0], R[0].long(), R[0], decay=1.0), "decay: expected 0 <= decay < 1, got 1.0"),
    (lambda: rollout.draw_rows(R[0], 0), "weight: expected numbers >= 0 with a sum above 0"),
    (lambda: rollout.draw_rows(R[0] - 1, 0), "weight: expected numbers >= 0 with a sum above 0"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()
