"""Other scales of the rewards [N, G] of groups: quantiles, several rewards, success rates, batches."""

import math

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import check
from rft_fn.advantage.groups import centre, grpo, size_of_groups

__all__ = [
    "a_star", "cpgd", "gdpo", "gpg", "lite_ppo", "maxrl", "place_of_quantile", "quantile",
    "reinforce_pp_baseline",
]  # fmt: skip


def quantile(reward: Tensor, *, q: float, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return quantile advantages [N, G], with a quantile of the group's rewards as baseline.

        (r - Q) / (std + eps),    Q the smallest r of the group with #{r' <= Q} >= q G

    QAE, arXiv 2509.22611, which calls q K. With rewards 0 or 1 and a success rate p, Q is 0 where p <= 1 - q:
    a hard prompt teaches by its successes only, and an easy one, with Q = 1, by its failures only. std and
    `scale` as in `grpo`. Not centred; biased, because the baseline of a sample depends on it. ValueError for
    groups of one, and unless 0 < q <= 1.
    """
    size = size_of_groups(reward)
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


def maxrl(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return MaxRL's advantages [N, G] of rewards of at least 0, divided by the mean of the group.

        (r - mean) / (mean + eps)

    With rewards 0 or 1 the expected gradient is that of the log-likelihood of success, of the first G - 1
    terms of its series in the failure rate: hard prompts weigh more than under `grpo`. arXiv 2602.02710.
    ValueError for groups of one.
    """
    return centre(reward) / (reward.mean(-1, keepdim=True) + eps)


def gpg(reward: Tensor) -> Tensor:
    """Return GPG's advantages, [N, G].

        alpha (r - mean),    alpha = groups / groups whose rewards differ

    alpha makes up for the groups without a gradient. arXiv 2504.02546. verl's alpha counts rewards other than
    0 in their place. 0 if no group has rewards that differ. ValueError for groups of one.
    """
    centred = centre(reward)
    varied = (reward.amax(-1) > reward.amin(-1)).sum()
    return centred * (len(reward) / varied.clamp(min=1))


def lite_ppo(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return Lite PPO's advantages [N, G]: less the group's mean, divided by the deviation of the batch.

        (r - mean) / (std of all N G rewards + eps)

    So groups in which rewards hardly differ are not blown up as in `grpo`. arXiv 2508.08221. ValueError for
    groups of one.
    """
    return centre(reward) / (reward.std() + eps)


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
