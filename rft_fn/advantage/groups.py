"""Advantages of responses from the rewards [N, G] of groups of equal size."""

import math

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import check

__all__ = [
    "a_star", "advantage_of_subsets", "best_against_worst", "best_minus_second", "cpgd", "gdpo", "gpg",
    "grpo", "lite_ppo", "max_at_k", "maxrl", "opo", "pass_at_k", "place_of_quantile", "quantile",
    "reinforce_pp_baseline", "remax", "rloo",
]  # fmt: skip


def _size_of_groups(reward: Tensor) -> int:
    """Return G of rewards [N, G]; ValueError for groups of one."""
    size = check.shapes(reward=(reward, "N G"))["G"]
    if size < 2:
        raise ValueError(
            f"reward: expected [N, G] with G >= 2, got {list(reward.shape)}: a group of one has no baseline; "
            "sample more per prompt (group >= 2) or use an advantage that is not normalised by group"
        )
    return size


def _centre(reward: Tensor, share: Tensor | None = None) -> Tensor:
    """Subtract the mean of each group from rewards [N, G]; exactly 0 in a group without variance.

    `share` [N, G] weights the mean, which is uniform without it. ValueError for groups of one.
    """
    _size_of_groups(reward)
    uniform = share is None
    mean = reward.mean(-1, keepdim=True) if uniform else (share * reward).sum(-1, keepdim=True)
    equal = reward.amax(-1, keepdim=True) == reward.amin(-1, keepdim=True)
    return torch.where(equal, 0, reward - mean)


def grpo(reward: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return GRPO's advantages [N, G], normalised per group.

        (r - mean) / (std + eps)

    std is the sample's, divided by G - 1. arXiv 2402.03300. `scale=False` leaves out the division: Dr. GRPO
    (arXiv 2503.20783), without its bias towards easy and hard questions. ValueError for groups of one. Does
    not whiten over the batch.
    """
    centred = _centre(reward)
    return centred / (reward.std(-1, keepdim=True) + eps) if scale else centred


def rloo(reward: Tensor) -> Tensor:
    """Return leave-one-out advantages, [N, G].

        r - mean of the other G - 1 = (r - mean) G / (G - 1)

    Unbiased, because the baseline of a sample does not depend on it. arXiv 2402.14740. ValueError for
    groups of one.
    """
    group = reward.shape[-1]
    return _centre(reward) * (group / max(group - 1, 1))


def remax(reward: Tensor, greedy_reward: Tensor) -> Tensor:
    """Return ReMax's advantages, [N, G]: rewards minus the reward [N] of the prompt's greedy response.

    Unbiased, because the baseline does not depend
    on the sample; also defined for G = 1. Not centred. arXiv 2310.10505.
    """
    check.shapes(reward=(reward, "N G"), greedy_reward=(greedy_reward, "N"))
    return reward - greedy_reward.unsqueeze(-1)


def opo(reward: Tensor, length: Tensor) -> Tensor:
    """Return OPO's advantages, [N, G], with a length-weighted baseline.

        r - sum(l r) / sum(l)    in each group, l [N, G] the tokens of a response

    The baseline of least variance if the squared score of a response grows with its length. With equal
    lengths it is `grpo(scale=False)`. Not divided by a deviation. arXiv 2505.23585. ValueError for groups
    of one.
    """
    check.shapes(reward=(reward, "N G"), length=(length, "N G"))
    share = length.to(reward.dtype) / length.sum(-1, keepdim=True).clamp(min=1)
    return _centre(reward, share)


def quantile(reward: Tensor, *, q: float, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return quantile advantages [N, G], with a quantile of the group's rewards as baseline.

        (r - Q) / (std + eps),    Q the smallest r of the group with #{r' <= Q} >= q G

    QAE, arXiv 2509.22611, which calls q K. With rewards 0 or 1 and a success rate p, Q is 0 where p <= 1 - q:
    a hard prompt teaches by its successes only, and an easy one, with Q = 1, by its failures only. std and
    `scale` as in `grpo`. Not centred; biased, because the baseline of a sample depends on it. ValueError for
    groups of one, and unless 0 < q <= 1.
    """
    size = _size_of_groups(reward)
    place = place_of_quantile(q, torch.tensor(size))
    above = reward - reward.sort(-1).values[..., place, None]
    return above / (reward.std(-1, keepdim=True) + eps) if scale else above


def place_of_quantile(q: float, size: Tensor) -> Tensor:
    """Return the place i64 of the q-quantile among `size` sorted numbers: the first with a share of q."""
    if not 0 < q <= 1:
        raise ValueError(f"q: expected 0 < q <= 1, got {q}")
    # 0.55 * 20 is a little more than 11
    return (q * size.double() - 1e-9).ceil().long() - 1


def cpgd(reward: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return CPGD's advantages [N, G], which equal `grpo`'s.

    CPGD (arXiv 2505.12504) differs in its loss, `loss.cpgd`.
    """
    return grpo(reward, scale=scale, eps=eps)


def reinforce_pp_baseline(reward: Tensor) -> Tensor:
    """Return the advantages [N, G] of REINFORCE++ with baseline, which equal `grpo(scale=False)`'s.

    The algorithm whitens them over the whole batch (arXiv 2501.03262). ValueError for groups of one.
    """
    return grpo(reward, scale=False)


def gdpo(parts: Tensor, weights: Tensor) -> Tensor:
    """Return GDPO's advantages for several rewards, [N, G].

    Normalises each of the K rewards in `parts` [K, N, G] by `grpo`, and sums them by `weights` [K]. Rewards
    of different spread then count only by their weights. arXiv 2601.05242. The paper whitens the sum over
    the batch; `whiten` does, this does not.
    """
    sizes = check.shapes(parts=(parts, "K N G"), weights=(weights, "K"))
    each = grpo(rearrange(parts, "k n g -> (k n) g"))
    each = rearrange(each, "(k n) g -> k n g", k=sizes["K"])
    return (rearrange(weights, "k -> k 1 1") * each).sum(0)


def pass_at_k(correct: Tensor, *, k: int) -> Tensor:
    """Return pass@k advantages [N, G] of responses, from correct [N, G] bool.

    A subset of k responses has reward 1 if any of them is correct. The advantage is the mean reward of the
    subsets with this response minus the mean over all, divided by the deviation over all. With m wrong
    responses:

        p = 1 - C(m, k) / C(G, k),    sigma = sqrt(p (1 - p))
        correct: (1 - p) / sigma,    wrong: (1 - p - C(m - 1, k - 1) / C(G - 1, k - 1)) / sigma

    It is 0 if all subsets are alike. k = 1 is `grpo` with the population's deviation. Computed in float64
    from ratios, so large groups lose nothing. arXiv 2508.10751. ValueError unless 1 <= k <= G.
    """
    size = check.shapes(correct=(correct, "N G"))["G"]
    if not 1 <= k <= size:
        raise ValueError(f"k: expected between 1 and the {size} responses of each prompt, got {k}")
    wrong = (~correct).double().sum(-1, keepdim=True)
    return advantage_of_subsets(correct, wrong, wrong.new_tensor(size), k)


def advantage_of_subsets(correct: Tensor, wrong: Tensor, size: Tensor, k: int) -> Tensor:
    """Return `pass_at_k` of correct [...], from the number of wrong and of all responses of each group.

    `wrong` and `size` are float64 and broadcast against correct.
    """
    i = torch.arange(1, k, device=correct.device)
    # a group of fewer than k has a factor of 0, as all of its subsets are alike
    ratios = (wrong.unsqueeze(-1) - i).clamp(min=0) / (size.unsqueeze(-1) - i).clamp(min=1)
    with_wrong = ratios.prod(-1)  # C(m-1, k-1) / C(G-1, k-1)
    none = with_wrong * wrong / size  # 1 - p
    sigma = (none * (1 - none)).sqrt()
    adv = torch.where(correct, none, -with_wrong * (1 - wrong / size)) / torch.where(sigma > 0, sigma, 1)
    return adv.to(torch.get_default_dtype())


# ---------- success rates, batches, and the best of a group


def maxrl(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return MaxRL's advantages [N, G] of rewards of at least 0, divided by the mean of the group.

        (r - mean) / (mean + eps)

    With rewards 0 or 1 the expected gradient is that of the log-likelihood of success, of the first G - 1
    terms of its series in the failure rate: hard prompts weigh more than under `grpo`. arXiv 2602.02710.
    ValueError for groups of one.
    """
    return _centre(reward) / (reward.mean(-1, keepdim=True) + eps)


def gpg(reward: Tensor) -> Tensor:
    """Return GPG's advantages, [N, G].

        alpha (r - mean),    alpha = groups / groups whose rewards differ

    alpha makes up for the groups without a gradient. arXiv 2504.02546. verl's alpha counts rewards other than
    0 in their place. 0 if no group has rewards that differ. ValueError for groups of one.
    """
    centred = _centre(reward)
    varied = (reward.amax(-1) > reward.amin(-1)).sum()
    return centred * (len(reward) / varied.clamp(min=1))


def lite_ppo(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return Lite PPO's advantages [N, G]: less the group's mean, divided by the deviation of the batch.

        (r - mean) / (std of all N G rewards + eps)

    So groups in which rewards hardly differ are not blown up as in `grpo`. arXiv 2508.08221. ValueError for
    groups of one.
    """
    return _centre(reward) / (reward.std() + eps)


def best_minus_second(reward: Tensor, *, scale: bool = False, eps: float = 1e-6) -> Tensor:
    """Return advantages [N, G] of the best response of each group only: the gap to the second best.

        r_max - r_second on the best response, 0 on the others

    Unbiased for the expected best of G, as the baseline of the best response does not depend on it: it is
    `max_at_k` with k = G, divided by G. The first of equally good ones is the best, with an advantage of 0.
    `scale` divides by the group's deviation, which is verl's default and not the paper's. arXiv 2503.19595.
    ValueError for groups of one.
    """
    _size_of_groups(reward)
    top = reward.topk(2, -1).values
    best = torch.zeros_like(reward).scatter(-1, reward.argmax(-1, keepdim=True), top[:, :1] - top[:, 1:])
    return best / (reward.std(-1, keepdim=True) + eps) if scale else best


def best_against_worst(reward: Tensor) -> Tensor:
    """Return 1 for the best response of each group, -1 for the worst, 0 for the others, [N, G].

    The first of equally good ones; all 0 in a group whose rewards are equal. The pairs of `loss.online_dpo`.
    ValueError for groups of one.
    """
    _size_of_groups(reward)
    best, worst = reward.argmax(-1, keepdim=True), reward.argmin(-1, keepdim=True)
    one = torch.ones_like(reward[:, :1])
    return torch.zeros_like(reward).scatter_add(-1, best, one).scatter_add(-1, worst, -one)


def max_at_k(reward: Tensor, *, k: int) -> Tensor:
    """Return max@k advantages of responses, [N, G].

        k times the mean, over the subsets S of k responses with this one, of max(S) - max(S without it)

    With `weight.seq_sum` the gradient is an unbiased one of the expected best reward of k responses, of any
    rewards: the baseline does not depend on the response. The k - 1 worst of a group get 0. From sorted
    rewards, with ratios of binomials in float64. arXiv 2505.15201 (its leave-one-out-minus-one form),
    2510.23393. `pass_at_k` is another estimator, of rewards 0 or 1. ValueError unless 2 <= k <= G.
    """
    size = _size_of_groups(reward)
    if not 2 <= k <= size:
        raise ValueError(f"k: expected between 2 and the {size} responses of each prompt, got {k}")
    ranked, order = reward.double().sort(-1)

    # P[j, i]: that of k - 1 others of the response at place i, drawn at random, j is the best
    below = torch.arange(size)
    chance = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        others = below - (below > i).long()  # how many others are below each place
        tail = _binomial_ratio(others, size - 1, k - 1)
        chance[:, i] = torch.where(below == i, 0, tail)
    gain = (ranked[:, None, :] - ranked[:, :, None]).clamp(min=0)
    adv = k * (gain * chance.to(reward.device)).sum(1)
    return torch.zeros_like(adv).scatter(-1, order, adv).to(reward.dtype)


def _binomial_ratio(below: Tensor, size: int, k: int) -> Tensor:
    """Return C(below, k - 1) / C(size, k): the chance that one of `size` is the best of k, float64."""
    below = below.double()
    i = torch.arange(1, k, dtype=torch.float64)
    ratios = (below[:, None] - i + 1).clamp(min=0) / (size - i)
    return ratios.prod(-1) * k / size


def a_star(reward: Tensor, reference_reward: Tensor | None = None, *, beta: float = 0.5) -> Tensor:
    """Return the optimal advantages of A*-PO, [N, G].

        r - V*,    V* = beta log mean exp(r' / beta)

    r' are rewards [N, M] of responses of the reference policy, sampled once; without them those of the group,
    which are responses of the reference before the first update. V* is the value of the best policy with a KL
    of weight beta to the reference, between the mean (large beta) and the largest reward. `loss.a_star`
    learns from it. arXiv 2505.20686. ValueError unless beta > 0.
    """
    if not beta > 0:
        raise ValueError(f"beta: expected > 0, got {beta}")
    given = reward if reference_reward is None else reference_reward
    check.shapes(reward=(reward, "N G"), reference_reward=(given[:, :1], "N 1"))
    value = beta * ((given / beta).logsumexp(-1, keepdim=True) - math.log(given.shape[1]))
    return reward - value
