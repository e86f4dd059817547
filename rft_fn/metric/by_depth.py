"""The mismatch of trainer and sampler by how deep in a sequence a token is: by position, and by turn.

Wrong positions, windows and states show in late tokens, while the mean over all tokens is still small.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.metric.kinds import Mean, Metric, f64

__all__ = ["DEPTHS", "GAP_AT", "TURNS", "by_depth", "told", "turn_of"]

DEPTHS = {"1k": 1 << 10, "4k": 1 << 12, "16k": 1 << 14, "64k": 1 << 16, "more": 1 << 62}
"""Name -> the position, from 0, that its tokens are below."""

TURNS = {"turn1": 1, "turn2": 2, "turn4": 4, "turn8": 8, "turns_more": 1 << 62}
"""Name -> the turn of the policy in a sequence, from 1, that its tokens are in at most."""

GAP_AT = "mismatch/gap@"
"""What the names of these metrics begin with."""


def by_depth(gap: Tensor, mask: Tensor, *, position: Tensor, turn: Tensor) -> dict[str, Metric]:
    """Measure the mean of |gap| over the tokens in mask by depth, all [*], in nats per token.

    `position` of a token in its sequence from 0, and the `turn` that it is in, from 1. The names are
    mismatch/gap@1k (below position 1,024), @4k, @16k, @64k and @more, and @turn1, @turn2, @turn4 (turns 3 and
    4), @turn8 and @turns_more.
    """
    check.shapes(gap=(gap, "..."), mask=(mask, "..."), position=(position, "..."), turn=(turn, "..."))
    return _bins(gap, mask, position + 1, DEPTHS) | _bins(gap, mask, turn, TURNS)


def _bins(gap: Tensor, mask: Tensor, x: Tensor, ends: Mapping[str, int]) -> dict[str, Metric]:
    """Return the mean of each bin of x, which holds its end and not the one before."""
    x, mask, gap = x.flatten(), mask.flatten(), gap.detach().flatten().abs()
    high = torch.tensor([[end] for end in ends.values()], device=x.device)
    low = torch.cat([torch.zeros_like(high[:1]), high[:-1]])
    inside = mask & (x > low) & (x <= high)  # [bins, T]
    total, count = f64(torch.where(inside, gap, 0)).sum(-1), f64(inside).sum(-1)
    return {GAP_AT + name: Mean(total=total[i], count=count[i]) for i, name in enumerate(ends)}


def turn_of(mask: Tensor, position: Tensor) -> Tensor:
    """Return the turn of each token [..., T] i64: 1 from where the policy first samples in a sequence.

    A turn is a run of tokens in mask, and what follows up to the next one; tokens before the first have 0.
    Sequences follow each other along T, and `position` [..., T] counts from 0 in each.
    """
    check.shapes(mask=(mask, "... T"), position=(position, "... T"))
    before = torch.zeros_like(mask)
    before[..., 1:] = mask[..., :-1]
    begins = (mask & (~before | (position == 0))).long()
    count = begins.cumsum(-1)
    first = torch.arange(mask.shape[-1], device=mask.device) - position  # of the token's sequence
    return count - (count - begins).gather(-1, first)


def told(values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a step without a depth that has all tokens: the mean over all says the same."""
    found = dict(values)
    for ends in (DEPTHS, TURNS):
        names = [GAP_AT + name for name in ends if GAP_AT + name in values]
        if len(names) == 1:
            del found[names[0]]
    return found
