"""Advantages [B] of responses whose groups may differ in size.

`group` [B] has equal numbers for rows that belong together, in any order and with gaps, as `Rollout.group`
has. Each function equals its namesake on [N, G] where all groups have G rows. A row alone in its group has
nothing to be compared with: its advantage is 0, where the namesake raises. B may be 0.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import check, segment
from rft_fn.advantage.groups import advantage_of_subsets

__all__ = [
    "cpgd_by", "gdpo_by", "grpo_by", "opo_by", "pass_at_k_by", "reinforce_pp_baseline_by", "remax_by",
    "rloo_by",
]  # fmt: skip

Reduce = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _index(reward: Tensor, group: Tensor) -> Tensor:
    """Groups [B] numbered from 0 without gaps. ValueError unless there is one for each row."""
    check.shapes(reward=(reward, "B"), group=(group, "B"))
    return torch.unique(group, return_inverse=True)[1]


def _within(reduce: Reduce, x: Tensor, index: Tensor) -> Tensor:
    """A reduction of x [B] over each group, on every row of the group [B]."""
    everything = torch.ones_like(index, dtype=torch.bool)
    return segment.spread(reduce(x, everything, index, len(index)), index)


def _size(index: Tensor, like: Tensor) -> Tensor:
    """The rows of each row's group [B], as floats of the type of `like`."""
    return _within(segment.sum, torch.ones_like(like), index)


def _centre(reward: Tensor, index: Tensor, share: Tensor | None = None) -> Tensor:
    """Rewards [B] minus the mean of their group, exactly 0 in a group without variance.

    `share` [B] weights the mean, which is uniform without it.
    """
    mean = _within(segment.mean, reward, index)
    if share is not None:
        mean = _within(segment.sum, share * reward, index)
    equal = _within(segment.max, reward, index) == -_within(segment.max, -reward, index)
    return torch.where(equal, 0, reward - mean)


def grpo_by(reward: Tensor, group: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO's advantages [B] of rewards [B], normalised per group of any size.

        (r - mean) / (std + eps)

    std is the sample's, divided by the rows of the group less one. `scale=False` leaves out the division: Dr.
    GRPO. 0 for a row alone in its group. See `grpo`.
    """
    index = _index(reward, group)
    centred = _centre(reward, index)
    if not scale:
        return centred
    others = (_size(index, reward) - 1).clamp(min=1)
    std = (_within(segment.sum, centred.square(), index) / others).sqrt()
    return centred / (std + eps)


def rloo_by(reward: Tensor, group: Tensor) -> Tensor:
    """Leave-one-out advantages [B] of rewards [B] in groups of any size.

        r - mean of the other rows of the group

    0 for a row alone in its group. See `rloo`.
    """
    index = _index(reward, group)
    size = _size(index, reward)
    return _centre(reward, index) * (size / (size - 1).clamp(min=1))


def remax_by(reward: Tensor, group: Tensor, greedy_reward: Tensor) -> Tensor:
    """ReMax's advantages [B]: rewards [B] less those of their prompts' greedy responses.

    `group` [B] are rows of `greedy_reward` [N] here, numbers of prompts. Defined for groups of one too. See
    `remax`.
    """
    check.shapes(reward=(reward, "B"), group=(group, "B"), greedy_reward=(greedy_reward, "N"))
    return reward - segment.spread(greedy_reward, group)


def opo_by(reward: Tensor, group: Tensor, length: Tensor) -> Tensor:
    """OPO's advantages [B], with a baseline weighted by length in groups of any size.

        r - sum(l r) / sum(l)    in each group, l [B] the tokens of a response

    0 for a row alone in its group. See `opo`.
    """
    index = _index(reward, group)
    check.shapes(reward=(reward, "B"), length=(length, "B"))
    tokens = length.to(reward.dtype)
    share = tokens / _within(segment.sum, tokens, index).clamp(min=1)
    return _centre(reward, index, share)


def cpgd_by(reward: Tensor, group: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """CPGD's advantages [B], which equal `grpo_by`'s. See `cpgd`."""
    return grpo_by(reward, group, scale=scale, eps=eps)


def reinforce_pp_baseline_by(reward: Tensor, group: Tensor) -> Tensor:
    """Advantages [B] of REINFORCE++ with baseline, which equal `grpo_by(scale=False)`'s.

    See `reinforce_pp_baseline`.
    """
    return grpo_by(reward, group, scale=False)


def gdpo_by(parts: Tensor, group: Tensor, weights: Tensor) -> Tensor:
    """GDPO's advantages [B] for several rewards in groups of any size.

    Normalises each of the K rewards in `parts` [K, B] by `grpo_by`, and sums them by `weights` [K]. See
    `gdpo`.
    """
    sizes = check.shapes(parts=(parts, "K B"), group=(group, "B"), weights=(weights, "K"))
    index = torch.unique(group, return_inverse=True)[1]

    # each reward has groups of its own
    start = torch.arange(sizes["K"], device=index.device) * sizes["B"]
    own = rearrange(start, "k -> k 1") + index
    each = grpo_by(parts.flatten(), own.flatten()).view_as(parts)
    return (rearrange(weights, "k -> k 1") * each).sum(0)


def pass_at_k_by(correct: Tensor, group: Tensor, *, k: int) -> Tensor:
    """Pass@k advantages [B] of responses in groups of any size, from correct [B] bool.

    0 in a group of fewer than k responses, which has no subset of k. See `pass_at_k`. ValueError unless k >=
    1.
    """
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    check.shapes(correct=(correct, "B"), group=(group, "B"))
    index = torch.unique(group, return_inverse=True)[1]
    wrong = (~correct).double()
    size = _size(index, wrong)
    return advantage_of_subsets(correct, _within(segment.sum, wrong, index), size, k)
