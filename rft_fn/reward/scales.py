"""Parts of a reward on one scale, before they are weighted."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rft_fn.reward.combine import Weighted
from rft_fn.reward.row_weights import weights_of
from rft_fn.reward.signature import (
    Judged,
)
from rft_fn.reward.veto import vetoed

__all__ = ["normalized", "standardized"]


Over = Literal["batch", "group"]


def normalized(
    score: Weighted, judged: Judged, prompts: Sequence[Any], *, over: Over = "group", eps: float = 1e-6
) -> Tensor:
    """Return the rewards [N, G] with each part normalised before it is weighted.

    reward = sum of weight * standardized(part), over the parts that apply to a row. So a part that varies
    little counts as much as one that varies a lot. `over` is "group", the responses to one prompt (GDPO, Liu
    et al., 2026, 2601.05242, before its second normalisation), or "batch", all responses. Vetoes look at the
    parts before it, and their totals are not normalised. `judged` is what `score` gave for the `prompts`. For
    running moments see `reward_shaping.running_norm`, which has explicit state.
    """
    n, g = judged.reward.shape
    total = torch.zeros_like(judged.reward)
    names = dict.fromkeys(name for p in prompts for name in p.columns)
    columns = {name: [p.columns.get(name) for p in prompts] for name in names}
    for name, (fn, weight) in score.components.items():
        if fn.held:
            continue
        scaled = standardized(judged.parts[name], over=over, eps=eps)
        total = total + (weights_of(name, weight, columns, n)[:, None] * scaled).nan_to_num()
    return vetoed(total, judged.parts, score.vetoes)[0].view(n, g)


def standardized(x: Tensor, *, over: Over, eps: float = 1e-6) -> Tensor:
    """Return (x - mean) / (sample std + eps) of x [N, G], by row or over all; NaN stays and is ignored.

    A row, or a batch, with fewer than two numbers becomes 0 where it has one.
    """
    shape = x.shape
    if over == "batch":
        x = x.reshape(1, -1)
    there = ~x.isnan()
    count = there.sum(1, keepdim=True)
    wide = x.double()
    centred = wide - wide.nansum(1, keepdim=True) / count
    variance = centred.square().nansum(1, keepdim=True) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + eps)).float().reshape(shape)
