"""The checks of estimators: they pass for what is right, and say what is wrong with what people write."""

import numpy as np
import pytest
import ref
import torch

from rft_fn import advantage, loss, testing
from rft_fn.testing.cases import normal


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("f", [loss.kl_k2, loss.kl])
def test_kl_gradient_passes(f, seed):
    testing.check_kl_gradient(f, seed=seed)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            loss.kl_k1,
            r"not that of KL\(pi, ref\): off by at most 0\.\d+ \(cosine -?0\.0000, norm ratio 0\.0000\)",
        ),
        (loss.kl_k3, r"off by at most [\d.]+ \(cosine 0\.\d+, norm ratio"),
        (lambda logp, ref_logp: loss.kl_k2(logp, ref_logp) / 2, r"cosine 1\.0000, norm ratio 0\.5000"),
        (lambda logp, ref_logp: -loss.kl_k2(logp, ref_logp), r"cosine -1\.0000"),
    ],
)
def test_kl_gradient_fails_and_says_how(f, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_kl_gradient(f)


def return_to_go(reward, value, discount, *, mask):
    """An estimator without a critic, by the same door."""
    return advantage.gae(reward, torch.zeros_like(value), discount, 1.0, mask=mask)[0]


def zeroed(reward, value, discount, *, mask):
    """Tool tokens read as value 0 and reward 0, and the recursion runs over them."""
    adv, ret = advantage.gae(reward * mask, value * mask, discount, 0.95)
    return adv * mask, ret * mask


def not_cleared(reward, value, discount, *, mask):
    adv, ret = advantage.gae(reward, value, discount, 0.95, mask=mask)
    return adv + ~mask, ret


def no_bootstrap_over_the_hole(reward, value, discount, *, mask):
    """The sequence ends at every tool call."""
    after = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], -1)
    return advantage.gae(reward, value, discount * after, 0.95, mask=mask)


def return_over_holes(reward, value, discount, *, mask):
    """Tool tokens discount what comes after them."""
    return advantage.discounted_return(reward * mask, discount) * mask


def without_a_lag(reward, value, discount, *, mask):
    """The value of the token itself, for that of the next one."""
    adv = advantage.discounted_return(
        torch.where(mask, reward + (discount - 1) * value, 0), torch.where(mask, discount * 0.95, 1)
    )
    return adv * mask, (adv + value) * mask


def test_values_of_the_next_token_are_read():
    """What deleting tokens does not show."""
    for seed in range(3):
        testing.check_exact_values(advantage.gae, seed=seed)
        testing.check_exact_values(return_to_go, seed=seed)
    for check in (testing.check_exact_values, testing.check_deletion_invariance):
        with pytest.raises(AssertionError, match=r"adv of row \d, token \d+: expected 0 where every"):
            check(without_a_lag)


@pytest.mark.parametrize("f", [advantage.gae, return_to_go])
@pytest.mark.parametrize("seed", range(3))
def test_deletion_invariance_passes(f, seed):
    testing.check_deletion_invariance(f, seed=seed)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (zeroed, r"adv of row \d changed by [\d.]+ when its \d+ masked tokens were deleted: \["),
        (not_cleared, r"adv of row 0: expected 0 outside mask, got \[1\.0"),
        (no_bootstrap_over_the_hole, r"adv of row \d changed by"),
        (return_over_holes, r"adv of row \d changed by [\d.]+ when its \d+ masked tokens were deleted"),
    ],
)
def test_deletion_invariance_fails_and_says_where(f, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_deletion_invariance(f)


def test_deletion_to_a_tolerance():
    def by_length(reward, value, discount, *, mask):
        """A little more for every position there is."""
        return advantage.gae(reward, value, discount, mask=mask)[0] + 1e-6 * mask * mask.shape[-1]

    testing.check_deletion_invariance(by_length, atol=1e-4)
    with pytest.raises(AssertionError, match=r"adv of row \d changed by \de-0\d|changed by \d\.\de-0\d"):
        testing.check_deletion_invariance(by_length)


def centred(reward):
    return reward - reward.mean(-1, keepdim=True)


def textbook_grpo(reward):
    """As everyone writes it: right, but for groups of three 0.1."""
    return centred(reward) / (reward.std(-1, keepdim=True) + 1e-6)


def textbook_without_eps(reward):
    return centred(reward) / reward.std(-1, keepdim=True)


def std_of_the_batch(reward):
    return centred(reward) / (reward.std() + 1e-6)


def mean_of_the_batch(reward):
    return reward - reward.mean()


def relative_to_the_mean(reward):
    return centred(reward) / (reward.mean(-1, keepdim=True).abs() + 1e-6)


def first_is_the_baseline(reward):
    return reward - reward[:, :1]


def last_is_the_baseline(reward):
    return reward - reward[:, -1:]


def neighbour_is_the_baseline(reward):
    """Each against the one before: for two responses that is leave-one-out, for more it is not."""
    return reward - reward.roll(1, -1)


def nearly_equal(reward):
    """Noise is cut off, at a size that only float64 stays under."""
    c = centred(reward)
    return torch.where(c.abs() < 1e-12, 0, c) / (reward.std(-1, keepdim=True) + 1e-6)


def floored(reward):
    return dr_grpo(reward.clamp(min=-2.5))


def ranks(reward):
    """Ties go to whoever comes first."""
    return reward.argsort(dim=-1, stable=True).argsort(-1).double() - (reward.shape[-1] - 1) / 2


def sorted_away(reward):
    """Ranked and never put back."""
    return centred(reward.sort(-1).values)


def dr_grpo(reward):
    return advantage.grpo(reward, scale=False)


def raw(reward):
    """REINFORCE: no baseline at all."""
    return reward.clone()


def passed(reward):
    """A function of passed and failed, which a constant changes."""
    return dr_grpo((reward > 0).double())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("f", [advantage.grpo, advantage.rloo, dr_grpo])
def test_group_estimators_pass(f, seed):
    testing.check_group_estimator(f, seed=seed)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            textbook_grpo,
            r"^3 equal rewards of 0.1 in torch.float64: expected advantages of exactly 0, got \[-1",
        ),
        (textbook_without_eps, r"^2 equal rewards of 0 in .*float64: .* exactly 0, got \[nan, nan\]"),
        (
            std_of_the_batch,
            r"^group \d alone instead of among 6 groups: with rewards \[.*\] the advantages ch",
        ),
        (
            mean_of_the_batch,
            r"^group 0 alone instead of among 6 groups: .* changed by [\d.]+, from \[.*to \[",
        ),
        (
            relative_to_the_mean,
            r"^\+10 on all rewards of group 0: with rewards \[.*\] the advantages changed",
        ),
        (raw, r"^\+10 on all rewards of group 0: .* changed by 10, from \["),
        (passed, r"^\+10 on all rewards of group \d: .* to \[0, 0\]"),
        (first_is_the_baseline, r"^responses of group 0 in the order \[1, 0\]: with rewards"),
        (last_is_the_baseline, r"^responses of group 0 in the order \[1, 0\]: with rewards"),
        (neighbour_is_the_baseline, r"^responses of group 0 in the order \[1, 0, 2\]: with rewards"),
        (nearly_equal, r"^\d equal rewards of -?[\d.]+ in torch.float32: expected advantages of exactly 0"),
        (floored, r"^-3 on all rewards of group \d: with rewards"),
        (sorted_away, r"^responses of group \d in the order \[1, 0\]: .* the advantages changed by"),
        (ranks, r"^2 equal rewards of 0 in torch.float64: .* got \[-0.5, 0.5\]"),
        (lambda r: r.mean(-1), r"one advantage per reward, \[N, G\] = \[6, 2\], got \[6\]"),
        (lambda r: r.mean(-1, keepdim=True), r"\[N, G\] = \[6, 2\], got \[6, 1\]"),
    ],
)
def test_group_estimators_fail_and_say_why(f, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_group_estimator(f)


def test_the_options_of_the_group_check():
    """`shift` and `flat` leave one property out each, `groups` are the sizes, `rtol` the tolerance."""
    testing.check_group_estimator(raw, shift=False, flat=False)
    testing.check_group_estimator(passed, shift=False)
    testing.check_group_estimator(textbook_grpo, flat=False)
    testing.check_group_estimator(textbook_grpo, groups=(2,))  # the mean of two equals is exact
    with pytest.raises(AssertionError, match=r"^3 equal rewards"):
        testing.check_group_estimator(textbook_grpo, groups=(3,))
    with pytest.raises(AssertionError, match=r"^2 equal rewards of 0 "):
        testing.check_group_estimator(lambda r: r + 1, shift=False)
    with pytest.raises(AssertionError, match=r"^responses of group \d in the order"):
        testing.check_group_estimator(ranks, flat=False, groups=(8,))
    with pytest.raises(AssertionError, match=r"^responses of group 0 in the order \[2, 0, 1\]"):
        testing.check_group_estimator(last_is_the_baseline, groups=(3,))
    noisy = lambda r: dr_grpo(r.float()).to(r.dtype)  # noqa: E731
    testing.check_group_estimator(noisy, rtol=1e-4)
    with pytest.raises(AssertionError, match=r"^[+-]\d+ on all rewards of group \d: .* changed by \d.*e-0"):
        testing.check_group_estimator(noisy)


@pytest.mark.parametrize(("group", "vocab"), [(2, 2), (2, 3), (3, 3), (4, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_unbiased_estimators_have_the_gradient_of_the_reward(group, vocab, seed):
    size = {"group": group, "vocab": vocab, "seed": seed}
    testing.check_estimator_gradient(advantage.rloo, **size)
    testing.check_estimator_gradient(raw, **size)
    testing.check_estimator_gradient(lambda r: r - 0.7, **size)
    testing.check_estimator_gradient(dr_grpo, factor=(group - 1) / group, **size)


def best_only(reward):
    return torch.where(reward == reward.amax(-1, keepdim=True), dr_grpo(reward), 0)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            dr_grpo,
            r"over all 27 groups of 3 is not 1 times that of E\[R\]: .*cosine 1.0000, norm ratio 0.6667",
        ),
        (advantage.grpo, r"off by at most 0.\d+ \(cosine 0\.[89]\d+, norm ratio 0\.\d+\)"),
        (std_of_the_batch, r"cosine 0\.[89]\d+, norm ratio"),
        (best_only, r"cosine 0\.\d+, norm ratio"),
        (lambda r: -advantage.rloo(r), r"cosine -1.0000, norm ratio 1.0000"),
        (lambda r: advantage.rloo(r).clamp(min=0), r"cosine 0\.\d+, norm ratio 0\."),
        (torch.zeros_like, r"cosine 0.0000, norm ratio 0.0000"),
        (lambda r: r.mean(-1), r"one advantage per reward, \[N, G\] = \[1, 3\], got \[1\]"),
    ],
)
def test_biased_estimators_are_found(f, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_estimator_gradient(f)


def test_the_factor_and_the_tolerance_of_the_gradient_check():
    testing.check_estimator_gradient(advantage.grpo, atol=1.0)
    with pytest.raises(AssertionError, match=r"all 16 groups of 4 is not 0.75 times .* ratio 1.3333"):
        testing.check_estimator_gradient(advantage.rloo, group=4, vocab=2, factor=0.75)


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("f", [advantage.grpo, dr_grpo, best_only])
def test_the_gradient_check_against_the_definition(f, prompts):
    """Cosine and norm ratio of the message, by loops: over the groups for the one gradient, from the values
    of actions for the other."""
    got, want = [], []
    for i in range(prompts):
        p = ref.softmax(normal(5, f"policy of prompt {i}", 3).numpy())
        reward = normal(5, f"reward of prompt {i}", 3).numpy()
        got += [ref.group_gradient(p, reward, lambda r: f(torch.from_numpy(r)).numpy(), 3)]
        want += [ref.reward_gradient({(): p}, {(a,): r for a, r in enumerate(reward)})[()]]
    got, want = np.concatenate(got), np.concatenate(want)
    size, one = np.linalg.norm(got), np.linalg.norm(want)
    words = f"cosine {got @ want / size / one:.4f}, norm ratio {size / one:.4f}"
    with pytest.raises(AssertionError, match=words):
        testing.check_estimator_gradient(f, prompts=prompts, seed=5)
