"""Advantage estimators against their definitions, and what each of them promises."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import ref
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import advantage, testing

pytestmark = pytest.mark.usefixtures("float64")
GROUP = {
    "grpo": (advantage.grpo, ref.grpo),
    "dr_grpo": (lambda r: advantage.grpo(r, scale=False), lambda r: ref.grpo(r, scale=False)),
    "rloo": (advantage.rloo, ref.rloo),
    "cpgd": (advantage.cpgd, ref.cpgd_advantage),
    "cpgd_unscaled": (partial(advantage.cpgd, scale=False), partial(ref.cpgd_advantage, scale=False)),
    "reinforce_pp_baseline": (advantage.reinforce_pp_baseline, ref.reinforce_pp_baseline),
    "opo": (lambda r: advantage.opo(r, torch.ones_like(r)), lambda r: ref.opo(r, np.ones_like(r))),
}
each_group = each("name", GROUP)


@st.composite
def groups(draw):
    n, g = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    values = st.sampled_from([0.0, 0.1, 1.0]) | st.floats(-10, 10).map(lambda x: round(x, 3))
    return np.array(draw(st.lists(values, min_size=n * g, max_size=n * g))).reshape(n, g)


@each_group
@given(reward=groups())
def test_group_advantages_against_the_definition(name, reward):
    ours, definition = GROUP[name]
    np.testing.assert_allclose(ours(torch.from_numpy(reward)), definition(reward), rtol=1e-10, atol=1e-10)


@each_group
@given(reward=groups())
def test_group_advantages_are_centred(name, reward):
    total = GROUP[name][0](torch.from_numpy(reward)).sum(-1)
    assert total.abs().max() <= 1e-9


@each_group
@given(reward=groups(), offset=st.sampled_from([-1e6, -3.0, 0.5, 1e6]))
def test_an_offset_of_all_rewards_changes_nothing(name, reward, offset):
    ours = GROUP[name][0]
    want, got = ours(torch.from_numpy(reward)), ours(torch.from_numpy(reward) + offset)
    # what the addition rounds away of a reward (1e-10 at 1e6), over the smallest standard deviation of the
    # examples
    assert (got - want).abs().max() <= abs(offset) * 1e-11 + 1e-10


@each_group
@given(reward=groups(), unit=st.sampled_from([2.0**-60, 2.0**-20, 2.0**-9, 2.0**9, 2.0**40]))
def test_the_unit_of_rewards_is_that_of_advantages(name, reward, unit):
    """However little rewards differ: a group is without variance where they are equal, and nowhere else.

    Where a deviation divides, the unit is gone but for the part of eps in the divisor.
    """
    r = torch.from_numpy(reward)
    if name in ("grpo", "cpgd"):
        got = GROUP[name][0](unit * r, eps=unit * 1e-6)
        torch.testing.assert_close(got, GROUP[name][0](r, eps=1e-6), rtol=1e-12, atol=0)
        np.testing.assert_allclose(GROUP[name][0](unit * r), GROUP[name][1](unit * reward), rtol=1e-9)
    else:
        assert torch.equal(GROUP[name][0](unit * r), unit * GROUP[name][0](r))


@each_group
@each("gap", [1e-12, 1e-7, 1e-4])
@each("level", [0.0, 1.0, -300.0])
def test_a_small_difference_beside_a_large_mean_is_learned(name, level, gap):
    adv = GROUP[name][0](torch.tensor([[level, level + gap, level]]))
    assert adv[0, 1] > 0 > adv[0, 0] == adv[0, 2]


@each_group
@given(reward=groups(), seed=st.integers(0, 100))
def test_groups_do_not_see_each_other(name, reward, seed):
    """A fault of other systems: a mean over the micro-batch in place of the prompt's own group."""
    ours, r = GROUP[name][0], torch.from_numpy(reward)
    alone = torch.cat([ours(row[None]) for row in r])
    order = torch.randperm(len(r), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(ours(r), alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours(r[order]), alone[order], rtol=1e-12, atol=1e-12)


@each_group
def test_alternating_rewards_teach_something(name):
    """A fault of other systems: an estimator that normalises over single values, and is zero
    for rewards 1, 0, 1, 0."""
    adv = GROUP[name][0](torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]))
    assert (adv[0, [0, 2]] > 0.4).all() and (adv[0, [1, 3]] < -0.4).all()
    assert adv[1, 3] > adv[0, 0] > 0  # the rarer success weighs more: each group has its baseline


@each_group
@each("dtype", [torch.float32, torch.float64])
@each("value", [0.0, 1.0, 0.1, 1 / 3, -0.7, 1e6 + 0.1, 1e-30])
def test_a_group_without_variance_gives_exactly_zero(name, value, dtype):
    """Constants like 0.1 have a mean that rounds: (r - mean) / (std + 1e-6) is then
    not 0 but noise over noise."""
    for size in (2, 3, 5, 7, 64):
        reward = torch.full((2, size), value, dtype=dtype)
        assert (GROUP[name][0](reward) == 0).all()


@each_group
def test_a_group_of_one_is_an_error_and_not_nan(name):
    with pytest.raises(ValueError, match=r"reward: expected .* G >= 2, got \[3, 1\].*group of one"):
        GROUP[name][0](torch.ones(3, 1))


def test_grpo_has_the_standard_deviation_of_a_sample_and_no_whitening():
    adv = advantage.grpo(torch.tensor([[1.0, 0.0], [5.0, 1.0]]), eps=0.0)
    torch.testing.assert_close(adv, torch.full((2, 2), math.sqrt(0.5)) * torch.tensor([1.0, -1.0]))
    raw = advantage.grpo(torch.tensor([[1.0, 0.0], [5.0, 1.0]]), scale=False)
    assert raw.tolist() == [[0.5, -0.5], [2.0, -2.0]]


def test_rloo_baseline_is_independent_of_its_own_sample():
    """Unbiased: the baseline that is subtracted from a reward stays the same when that reward changes."""
    r = torch.tensor([[1.0, 2.0, 6.0]])
    changed = r.clone()
    changed[0, 1] = 100.0
    baseline, other = r - advantage.rloo(r), changed - advantage.rloo(changed)
    torch.testing.assert_close(baseline[0, 1], other[0, 1])
    assert baseline[0, 0] != other[0, 0]


def tensors(*arrays):
    return [torch.from_numpy(np.asarray(a)) for a in arrays]


QS = st.sampled_from([0.05, 0.2, 0.4, 0.5, 0.55, 0.7, 0.75, 1.0])


@given(reward=groups(), q=QS, scale=st.booleans())
def test_quantile_against_the_definition(reward, q, scale):
    got = advantage.quantile(torch.from_numpy(reward), q=q, scale=scale)
    np.testing.assert_allclose(got, ref.quantile(reward, q, scale), rtol=1e-10, atol=1e-10)


@each("size", [2, 3, 8, 20])
@given(q=QS)
def test_a_quantile_teaches_hard_prompts_by_successes_and_easy_ones_by_failures(size, q):
    """Of every success rate p: the gate of the paper, at p = 1 - q to the response."""
    right = torch.arange(1, size)[:, None]
    reward = (torch.arange(size) < right).double()
    adv = advantage.quantile(reward, q=q)
    hard = right.double() / size <= 1 - q + 1e-9
    assert torch.equal(adv > 0, (reward == 1) & hard) and torch.equal(adv < 0, (reward == 0) & ~hard)


@given(reward=groups(), seed=st.integers(0, 2**32))
def test_remax_and_opo_against_their_definitions(reward, seed):
    rng = np.random.default_rng(seed)
    greedy, length = rng.normal(size=len(reward)), rng.integers(1, 500, size=reward.shape)
    got = advantage.remax(*tensors(reward, greedy))
    np.testing.assert_allclose(got, ref.remax(reward, greedy), rtol=1e-10, atol=1e-10)
    for size in (length, length.astype(np.float64)):  # tokens are counted in integers, and a mean is not one
        got = advantage.opo(*tensors(reward, size))
        np.testing.assert_allclose(got, ref.opo(reward, length), rtol=1e-10, atol=1e-10)
        assert np.abs((got.numpy() * length).sum(-1)).max() <= 1e-8 * length.sum()  # what its baseline is for


@given(reward=groups(), offset=st.sampled_from([-1e6, -3.0, 0.5, 1e6]), seed=st.integers(0, 2**32))
def test_an_offset_of_rewards_and_baseline_changes_nothing(reward, offset, seed):
    rng = np.random.default_rng(seed)
    r, greedy, length = tensors(reward, rng.normal(size=len(reward)), rng.integers(1, 500, size=reward.shape))
    far = advantage.remax(r + offset, greedy + offset), advantage.opo(r + offset, length)
    for got, want in zip(far, (advantage.remax(r, greedy), advantage.opo(r, length))):
        assert (got - want).abs().max() <= abs(offset) * 1e-14 + 1e-10


@given(reward=groups(), tokens=st.integers(1, 1000))
def test_opo_of_equal_lengths_is_dr_grpo(reward, tokens):
    r = torch.from_numpy(reward)
    got = advantage.opo(r, torch.full(r.shape, tokens))
    torch.testing.assert_close(got, advantage.grpo(r, scale=False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_opo_of_a_group_without_variance_is_exactly_zero(value, dtype):
    for size in (2, 3, 7, 64):
        reward = torch.full((2, size), value, dtype=dtype)
        assert (advantage.opo(reward, torch.arange(1, size + 1).expand(2, -1)) == 0).all()


def test_opo_of_responses_without_tokens_is_not_nan():
    """Nothing to weight by: the baseline is 0, and there is no token that would learn from it."""
    adv = advantage.opo(
        torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0, 0], [0, 0], [1, 3]])
    )
    assert adv.tolist() == [[1.0, 0.0], [0.0, 0.0], [0.75, -0.25]]


def test_remax_of_single_samples_and_of_a_tie():
    r = torch.tensor([[1.0], [0.0], [0.3]])
    assert advantage.remax(r, torch.tensor([0.0, 1.0, 0.3])).tolist() == [[1.0], [-1.0], [0.0]]


def test_the_advantages_of_cpgd_are_not_all_zero():
    """A fault of other systems: the baseline of a reward is that reward, and a run learns nothing."""
    for scale in (True, False):
        adv = advantage.cpgd(torch.tensor([[1.0, 0.0, 0.0, 0.5], [0.2, 0.2, 0.2, 0.2]]), scale=scale)
        assert (adv[0].abs() > 0.1).all() and adv[0, 0] > 0 > adv[0, 1] and (adv[1] == 0).all()


# ---------- several rewards


@given(parts=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_gdpo_against_the_definition(parts, seed):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 4, size=(parts, 1, 1))
    reward, weights = rng.integers(0, 3, size=(parts, 3, 4)) * scale, rng.normal(size=parts)
    got = advantage.gdpo(*tensors(reward, weights))
    np.testing.assert_allclose(got, ref.gdpo(reward, weights), rtol=1e-10, atol=1e-10)


@given(reward=groups(), weight=st.floats(-3, 3))
def test_gdpo_of_one_reward_is_grpo(reward, weight):
    r = torch.from_numpy(reward)
    got = advantage.gdpo(r[None], torch.tensor([weight]))
    torch.testing.assert_close(got, weight * advantage.grpo(r), rtol=1e-12, atol=1e-12)


def test_gdpo_hears_the_small_reward_beside_the_large_one():
    """Why it is there: in the sum of both, what differs by 0.01 is lost beside what differs by 100."""
    parts = torch.tensor([[[100.0, 0.0, 100.0, 0.0]], [[0.01, 0.01, 0.0, 0.0]]])
    adv = advantage.gdpo(parts, torch.ones(2))[0]
    assert adv[0] > adv[1] + 1 and adv[1] == pytest.approx(adv[2].item(), abs=1e-3)
    flat = advantage.gdpo(torch.stack([parts[0], torch.full((1, 4), 0.1)]), torch.ones(2))
    torch.testing.assert_close(flat, advantage.grpo(parts[0]))  # a part without variance teaches nothing


@given(row=st.lists(st.booleans(), min_size=1, max_size=8), k=st.integers(1, 8))
def test_pass_at_k_against_all_subsets(row, k):
    k, correct = min(k, len(row)), np.array([row, row[::-1]])
    got = advantage.pass_at_k(torch.from_numpy(correct), k=k)
    np.testing.assert_allclose(got, ref.pass_at_k(correct, k), rtol=1e-10, atol=1e-10)


def exact_pass_at_k(size, right, k):
    """(advantage of a right one, of a wrong one), in fractions up to the root."""
    wrong, choose = size - right, math.comb
    none = Fraction(choose(wrong, k), choose(size, k))
    without = Fraction(choose(wrong - 1, k - 1), choose(size - 1, k - 1)) if wrong else none
    return [math.copysign(1, x) * math.sqrt(x * x / (none - none**2)) for x in (none, none - without)]


@each("right", [1, 2, 511, 1000, 1016])
@each("k", [1, 2, 8])
def test_pass_at_k_of_large_groups_is_that_of_fractions(k, right):
    correct = torch.arange(1024).expand(2, -1) < right
    want = torch.tensor(exact_pass_at_k(1024, right, k))
    adv = advantage.pass_at_k(correct, k=k)
    torch.testing.assert_close(adv[0, [0, -1]], want, rtol=1e-10, atol=1e-12)
    assert (adv[:, :right] == adv[0, 0]).all() and (adv[:, right:] == adv[0, -1]).all()


@pytest.mark.parametrize("k", [1, 2, 512, 1023, 1024])
def test_pass_at_k_of_large_groups_is_finite_for_every_count(k):
    right = torch.arange(1025).unsqueeze(-1)
    adv = advantage.pass_at_k(torch.arange(1024) < right, k=k)
    assert adv.isfinite().all()
    assert adv.sum(-1).abs().max() < 1e-8  # centred: every response is in as many subsets as another
    assert (adv[(right[:, 0] == 0) | (1024 - right[:, 0] < k)] == 0).all()  # all subsets pass, or none does
    if 1 < k < 1024:
        assert (adv[1, 0] > 0) and (adv[1, 1:] < 0).all()


@given(row=st.lists(st.booleans(), min_size=2, max_size=16))
def test_pass_at_1_is_grpo_with_the_deviation_of_the_population(row):
    correct = torch.tensor([row])
    reward = correct.double()
    population = torch.where(reward.std(-1, keepdim=True) > 0, reward.std(-1, correction=0, keepdim=True), 1)
    want = advantage.grpo(reward, scale=False) / population
    torch.testing.assert_close(advantage.pass_at_k(correct, k=1), want, rtol=1e-12, atol=1e-12)


def test_pass_at_k_rewards_the_rare_success_more_as_k_grows():
    """One right of eight is pushed up; of four right ones, a right one hardly, as most pairs pass already."""
    few, many = torch.arange(8) < 1, torch.arange(8) < 4
    gain = [advantage.pass_at_k(torch.stack([few, many]), k=k)[:, 0].tolist() for k in (1, 4)]
    assert gain[0][0] > gain[0][1] == pytest.approx(1.0)
    assert gain[1][0] == pytest.approx(1.0) and gain[1][1] < 0.2


@pytest.mark.parametrize("right", [1, 511, 1020])
def test_pass_at_k_in_float32_is_exact_to_float32(right):
    """Differences of log-gammas near 6,000 would keep three digits of it."""
    torch.set_default_dtype(torch.float32)
    try:
        adv = advantage.pass_at_k(torch.arange(1024)[None] < right, k=4)[0, [0, -1]]
    finally:
        torch.set_default_dtype(torch.float64)
    assert adv.dtype == torch.float32
    torch.testing.assert_close(adv.double(), torch.tensor(exact_pass_at_k(1024, right, 4)), rtol=1e-6, atol=0)


def by_length(reward):
    """OPO with lengths 1, 2, 3, ...: data of a response that does not move with it."""
    return advantage.opo(reward, torch.arange(1, reward.shape[1] + 1).expand_as(reward))


def equal_length(reward):
    return advantage.opo(reward, torch.full(reward.shape, 7))


def passed(reward, k=2):
    return advantage.pass_at_k(reward > 0, k=k)


@pytest.mark.parametrize("seed", range(3))
def test_group_estimators_keep_to_their_groups(seed):
    for f in (advantage.grpo, advantage.rloo, advantage.cpgd, advantage.reinforce_pp_baseline, equal_length):
        testing.check_group_estimator(f, seed=seed)
    testing.check_group_estimator(passed, shift=False, seed=seed)
    with pytest.raises(AssertionError, match="responses of group"):
        testing.check_group_estimator(by_length, seed=seed)


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_expected_gradients_by_enumeration(group, seed):
    """Unbiased where the baseline does not depend on the sample; (G - 1) / G where its own reward is in it;
    and bent, not only scaled, where a deviation divides."""
    check = partial(testing.check_estimator_gradient, group=group, seed=seed)
    check(advantage.rloo)
    check(lambda r: advantage.remax(r, torch.tensor([0.7])))
    for f in (partial(advantage.grpo, scale=False), advantage.reinforce_pp_baseline, equal_length):
        check(f, factor=(group - 1) / group)
    for f in (advantage.grpo, advantage.cpgd):
        with pytest.raises(AssertionError, match=r"cosine 0\.[89]"):
            check(f)


def test_opo_weighs_by_every_length_there_is():
    """Down to one token in the whole group, and to none: then there is no baseline."""
    reward = torch.tensor([[1.0, 0.0, 0.5]])
    for length, baseline in (([1, 0, 0], 1.0), ([0, 1, 1], 0.25), ([0, 0, 0], 0.0), ([3, 1, 0], 0.75)):
        got = advantage.opo(reward, torch.tensor([length]))
        torch.testing.assert_close(got, reward - baseline)
        by = advantage.opo_by(reward[0], torch.zeros(3, dtype=torch.long), torch.tensor(length))
        torch.testing.assert_close(by, got[0])


def test_opo_keeps_the_factor_whatever_the_lengths():
    """A response with the share s of its group's tokens has s of its own reward in its baseline, and the mean
    of 1 - s over a group is (G - 1) / G."""
    testing.check_estimator_gradient(by_length, factor=2 / 3)


R, FLAT, ROW = torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 5)
MASK = torch.ones(2, 5, dtype=torch.bool)


@each(
    ("call", "message"),
    [
        (lambda: advantage.grpo(FLAT), r"^reward: expected \[N, G\]"),
        (lambda: advantage.remax(FLAT, FLAT), r"^reward: expected \[N, G\] .*got \[2\]"),
        (lambda: advantage.remax(R, torch.zeros(3)), r"^greedy_reward: expected \[N\] = \[2\], got \[3\]"),
        (
            lambda: advantage.remax(R, torch.zeros(2, 1)),
            r"^greedy_reward: expected \[N\] = \[2\], got \[2, 1\]",
        ),
        (lambda: advantage.opo(R, torch.ones(2, 3)), r"^length: expected \[N, G\] = \[2, 4\], got \[2, 3\]"),
        (lambda: advantage.opo(R, torch.ones(8)), r"^length: expected \[N, G\] = \[2, 4\], got \[8\]"),
        (lambda: advantage.opo(R[:, :1], R[:, :1]), r"^reward: .* G >= 2, got \[2, 1\]: a group of one"),
        (
            lambda: advantage.reinforce_pp(ROW, MASK[:, :4]),
            r"^mask: expected \[B, S\] = \[2, 5\], got \[2, 4\]",
        ),
        (lambda: advantage.reinforce_pp(FLAT, MASK), r"^token_reward: expected \[B, S\]"),
        (lambda: advantage.gdpo(R, FLAT), r"^parts: expected \[K, N, G\] .*got \[2, 4\]"),
        (lambda: advantage.gdpo(R[None], FLAT), r"^weights: expected \[K\] = \[1\], got \[2\]"),
        (lambda: advantage.gdpo(R[None, :, :1], FLAT[:1]), r"^reward: .*: a group of one has no baseline"),
        (lambda: advantage.quantile(R, q=0.0), r"^q: expected 0 < q <= 1, got 0.0"),
        (lambda: advantage.quantile(R, q=40), r"^q: expected 0 < q <= 1, got 40"),
        (lambda: advantage.quantile(FLAT, q=0.4), r"^reward: expected \[N, G\]"),
        (lambda: advantage.quantile(R[:, :1], q=0.4), r"^reward: .*: a group of one has no baseline"),
        (lambda: advantage.pass_at_k(R > 0, k=0), r"^k: expected between 1 and the 4 responses .*got 0"),
        (lambda: advantage.pass_at_k(R > 0, k=5), r"^k: expected between 1 and the 4 responses .*got 5"),
        (lambda: advantage.pass_at_k(FLAT > 0, k=1), r"^correct: expected \[N, G\]"),
        (lambda: advantage.length_adaptive_lambda(FLAT, alpha=0.0), r"^alpha: expected > 0, got 0.0"),
        (lambda: advantage.length_adaptive_lambda(FLAT, alpha=math.nan), r"^alpha: expected > 0, got nan"),
        (lambda: advantage.gae(ROW, ROW[:1], ROW), r"^value: expected \[..., S\] = \[2, 5\], got \[1, 5\]"),
        (
            lambda: advantage.decoupled_gae(ROW, ROW, ROW, policy_lambda=1.0, mask=MASK[:, 1:]),
            r"^mask: expected \[..., S\] = \[2, 5\], got \[2, 4\]",
        ),
        (
            lambda: advantage.decoupled_gae(ROW, ROW, ROW, policy_lambda=1.0, bootstrap=torch.zeros(3)),
            r"^bootstrap: expected \[...\] = \[2\], got \[3\]",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
