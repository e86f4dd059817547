"""Advantages that count the best of a group: pass@k, max@k, and the best against the others."""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.advantage.groups import size_of_groups

__all__ = ["advantage_of_subsets", "best_against_worst", "best_minus_second", "max_at_k", "pass_at_k"]


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


def best_minus_second(reward: Tensor, *, scale: bool = False, eps: float = 1e-6) -> Tensor:
    """Return advantages [N, G] of the best response of each group only: the gap to the second best.

        r_max - r_second on the best response, 0 on the others

    Unbiased for the expected best of G, as the baseline of the best response does not depend on it: it is
    `max_at_k` with k = G, divided by G. The first of equally good ones is the best, with an advantage of 0.
    `scale` divides by the group's deviation, which is verl's default and not the paper's. arXiv 2503.19595.
    ValueError for groups of one.
    """
    size_of_groups(reward)
    top = reward.topk(2, -1).values
    best = torch.zeros_like(reward).scatter(-1, reward.argmax(-1, keepdim=True), top[:, :1] - top[:, 1:])
    return best / (reward.std(-1, keepdim=True) + eps) if scale else best


def best_against_worst(reward: Tensor) -> Tensor:
    """Return 1 for the best response of each group, -1 for the worst, 0 for the others, [N, G].

    The first of equally good ones; all 0 in a group whose rewards are equal. The pairs of `loss.online_dpo`.
    ValueError for groups of one.
    """
    size_of_groups(reward)
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
    size = size_of_groups(reward)
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
