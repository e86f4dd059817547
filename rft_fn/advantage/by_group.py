"""Advantages [B] of responses in groups that may differ in size."""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import check, segment
from rft_fn.advantage.best_of_group import advantage_of_subsets
from rft_fn.advantage.of_groups import place_of_quantile

__all__ = [
    "cpgd_by", "gdpo_by", "grpo_by", "opo_by", "pass_at_k_by", "quantile_by", "rae",
    "reinforce_pp_baseline_by", "remax_by", "rloo_by",
]  # fmt: skip


Reduce = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # as `segment.sum`


def _index(reward: Tensor, group: Tensor) -> Tensor:
    """Number the groups [B] from 0 without gaps. ValueError unless there is one for each row."""
    check.shapes(reward=(reward, "B"), group=(group, "B"))
    return torch.unique(group, return_inverse=True)[1]


def _within(reduce: Reduce, x: Tensor, index: Tensor) -> Tensor:
    """Reduce x [B] over each group, and return the result on every row of the group [B]."""
    every_row = torch.ones_like(index, dtype=torch.bool)
    return segment.spread(reduce(x, every_row, index, len(index)), index)


def _size(index: Tensor, like: Tensor) -> Tensor:
    """Count the rows of each row's group [B], as floats of the type of `like`."""
    return _within(segment.sum, torch.ones_like(like), index)


def _centre_by_group(reward: Tensor, index: Tensor, share: Tensor | None = None) -> Tensor:
    """Subtract the mean of each group from rewards [B], as `_centre` does."""
    uniform = share is None
    mean = _within(segment.mean, reward, index) if uniform else _within(segment.sum, share * reward, index)
    equal = _within(segment.max, reward, index) == -_within(segment.max, -reward, index)
    return torch.where(equal, 0, reward - mean)


def _deviation(centred: Tensor, index: Tensor) -> Tensor:
    """Return the sample's standard deviation of each row's group [B], of centred rewards [B]."""
    others = (_size(index, centred) - 1).clamp(min=1)
    return (_within(segment.sum, centred.square(), index) / others).sqrt()


def grpo_by(reward: Tensor, group: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return GRPO's advantages [B] of rewards [B], normalised per group of any size.

        (r - mean) / (std + eps)

    std is the sample's, divided by the rows of the group less one. `scale=False` leaves out the division: Dr.
    GRPO. 0 for the only row of a group. See `grpo`.
    """
    index = _index(reward, group)
    centred = _centre_by_group(reward, index)
    return centred / (_deviation(centred, index) + eps) if scale else centred


def rloo_by(reward: Tensor, group: Tensor) -> Tensor:
    """Return leave-one-out advantages [B] of rewards [B] in groups of any size.

        r - mean of the other rows of the group

    0 for the only row of a group. See `rloo`.
    """
    index = _index(reward, group)
    size = _size(index, reward)
    return _centre_by_group(reward, index) * (size / (size - 1).clamp(min=1))


def remax_by(reward: Tensor, group: Tensor, greedy_reward: Tensor) -> Tensor:
    """Return ReMax's advantages [B]: rewards [B] minus the reward of each prompt's greedy response.

    `group` [B] are rows of `greedy_reward` [N] here, numbers of prompts. Defined for groups of one too. See
    `remax`.
    """
    check.shapes(reward=(reward, "B"), group=(group, "B"), greedy_reward=(greedy_reward, "N"))
    return reward - segment.spread(greedy_reward, group)


def opo_by(reward: Tensor, group: Tensor, length: Tensor) -> Tensor:
    """Return OPO's advantages [B], with a baseline weighted by length in groups of any size.

        r - sum(l r) / sum(l)    in each group, l [B] the tokens of a response

    0 for the only row of a group. See `opo`.
    """
    index = _index(reward, group)
    check.shapes(reward=(reward, "B"), length=(length, "B"))
    tokens = length.to(reward.dtype)
    share = tokens / _within(segment.sum, tokens, index).clamp(min=1)
    return _centre_by_group(reward, index, share)


def quantile_by(reward: Tensor, group: Tensor, *, q: float, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return quantile advantages [B] of rewards [B], in groups of any size.

        (r - Q) / (std + eps),    Q the q-quantile of the group

    0 for the only row of a group. See `quantile`.
    """
    index = _index(reward, group)
    size = torch.bincount(index)

    # sorted by group, and by reward in each group
    order = reward.argsort()
    order = order[index[order].argsort(stable=True)]
    first = size.cumsum(0) - size
    above = reward - segment.spread(reward[order[first + place_of_quantile(q, size)]], index)
    std = _deviation(_centre_by_group(reward, index), index)
    return above / (std + eps) if scale else above


def cpgd_by(reward: Tensor, group: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return CPGD's advantages [B], which equal `grpo_by`'s. See `cpgd`."""
    return grpo_by(reward, group, scale=scale, eps=eps)


def reinforce_pp_baseline_by(reward: Tensor, group: Tensor) -> Tensor:
    """Return the advantages [B] of REINFORCE++ with baseline, which equal `grpo_by(scale=False)`'s.

    See `reinforce_pp_baseline`.
    """
    return grpo_by(reward, group, scale=False)


def gdpo_by(parts: Tensor, group: Tensor, weights: Tensor) -> Tensor:
    """Return GDPO's advantages [B] for several rewards in groups of any size.

    Normalises each of the K rewards in `parts` [K, B] by `grpo_by`, and sums them by `weights` [K]. See
    `gdpo`.
    """
    sizes = check.shapes(parts=(parts, "K B"), group=(group, "B"), weights=(weights, "K"))
    index = torch.unique(group, return_inverse=True)[1]

    # each reward has its own groups
    start = torch.arange(sizes["K"], device=index.device) * sizes["B"]
    own = rearrange(start, "k -> k 1") + index
    each = grpo_by(parts.flatten(), own.flatten()).view_as(parts)
    return (rearrange(weights, "k -> k 1") * each).sum(0)


def pass_at_k_by(correct: Tensor, group: Tensor, *, k: int) -> Tensor:
    """Return pass@k advantages [B] of responses in groups of any size, from correct [B] bool.

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


# ---------- baselines that a run carries along


def rae(reward: Tensor, role: Tensor, baseline: Tensor, *, decay: float = 0.95) -> tuple[Tensor, Tensor]:
    """Return role-conditioned advantages [B] of rewards [B], and the next baseline of each role [R].

        A = r - b,    b' = decay b + (1 - decay) mean of the rewards of that role

    `role` [B] i64 are rows of `baseline` [R], such as the two players of a game: each has its own value in
    self-play, which a common mean would mix. The baseline does not depend on the batch, so the gradient is
    unbiased; that of a role without a row stays. SPIRAL, arXiv 2506.24119, which moves b by each episode in
    turn and before it is subtracted. ValueError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay: expected 0 <= decay < 1, got {decay}")
    check.shapes(reward=(reward, "B"), role=(role, "B"), baseline=(baseline, "R"))
    every = torch.ones_like(role, dtype=torch.bool)
    mean = segment.mean(reward, every, role, len(baseline))
    seen = torch.bincount(role, minlength=len(baseline)) > 0
    moved = torch.where(seen, decay * baseline + (1 - decay) * mean, baseline)
    return reward - segment.spread(baseline, role), moved
