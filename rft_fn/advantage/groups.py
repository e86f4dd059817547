"""Baselines of groups: advantages [N, G] from the rewards [N, G] of GRPO, RLOO, ReMax and OPO."""

import torch
from torch import Tensor

from rft_fn import check

__all__ = ["centre", "grpo", "opo", "remax", "rloo", "size_of_groups"]


def size_of_groups(reward: Tensor) -> int:
    """Return G of rewards [N, G]; ValueError for groups of one."""
    size = check.shapes(reward=(reward, "N G"))["G"]
    if size < 2:
        raise ValueError(
            f"reward: expected [N, G] with G >= 2, got {list(reward.shape)}: a group of one has no baseline; "
            "sample more per prompt (group >= 2) or use an advantage that is not normalised by group"
        )
    return size


def centre(reward: Tensor, share: Tensor | None = None) -> Tensor:
    """Subtract the mean of each group from rewards [N, G]; exactly 0 in a group without variance.

    `share` [N, G] weights the mean, which is uniform without it. ValueError for groups of one.
    """
    size_of_groups(reward)
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
    centred = centre(reward)
    return centred / (reward.std(-1, keepdim=True) + eps) if scale else centred


def rloo(reward: Tensor) -> Tensor:
    """Return leave-one-out advantages, [N, G].

        r - mean of the other G - 1 = (r - mean) G / (G - 1)

    Unbiased, because the baseline of a sample does not depend on it. arXiv 2402.14740. ValueError for
    groups of one.
    """
    group = reward.shape[-1]
    return centre(reward) * (group / max(group - 1, 1))


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
    return centre(reward, share)
