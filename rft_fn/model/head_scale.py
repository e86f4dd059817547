"""The heads of a reward model, and what makes their scores comparable."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rft_fn import check

__all__ = ["Head", "calibrated", "final_scores", "standardized", "tempered"]


@dataclass(frozen=True)
class Head:
    """One dimension that a reward model scores, and its calibration.

    The calibrated score is (score - shift) / scale. ValueError for a scale that is not positive, and for
    numbers that are not finite.
    """

    name: str
    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("head: expected a name, got ''")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"head: {self.name}: expected a positive scale, got {self.scale}")
        if not math.isfinite(self.shift):
            raise ValueError(f"head: {self.name}: expected a finite shift, got {self.shift}")


def final_scores(score: Tensor, mask: Tensor) -> Tensor:
    """Return the scores of whole rows: score [B, S, H] at the last token in mask [B, S] -> [B, H].

    `score` is `st.score(..., fields=("score",)).score` of the experience that `packing.scored` makes,
    `mask` that experience's. ValueError for a row without a token in mask.
    """
    check.shapes(score=(score, "B S H"), mask=(mask, "B S"))
    empty = (~mask.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"mask: expected a token of each row, got none in rows {empty[:3]}")
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return score[torch.arange(len(score), device=score.device), last]


def calibrated(score: Tensor, heads: Sequence[Head]) -> Tensor:
    """Return (score - shift) / scale of each head: [..., H] -> [..., H]."""
    _check(score, heads)
    shift = score.new_tensor([head.shift for head in heads])
    scale = score.new_tensor([head.scale for head in heads])
    return (score - shift) / scale


def standardized(score: Tensor, heads: Sequence[Head]) -> tuple[Head, ...]:
    """Calibrate heads by held-out rows [N, H]: scores of mean 0 and standard deviation 1.

    ValueError for fewer than two rows, for a head that scores all alike, and for NaN or inf.
    """
    _check(score, heads)
    _check_finite(score, heads)
    if len(score) < 2:
        raise ValueError(f"score: expected two rows or more to calibrate heads, got {len(score)}")
    spread, mean = torch.std_mean(score.double(), 0)
    found = []
    for head, shift, scale in zip(heads, mean.tolist(), spread.tolist()):
        if not scale > 0:
            raise ValueError(f"score: {head.name}: expected scores that differ, got {shift} for all rows")
        found.append(replace(head, shift=shift, scale=scale))
    return tuple(found)


def tempered(chosen: Tensor, rejected: Tensor, heads: Sequence[Head]) -> tuple[Head, ...]:
    """Calibrate heads by held-out pairs [N, H]: differences of scores are logits of a preference.

    The scale of each head is the temperature T > 0 with the least cross-entropy of sigmoid((chosen -
    rejected) / T) to the label (N + 1) / (N + 2), as in Platt (1999): with the label 1, pairs that are all
    in order would have T = 0. The shift is the mean of both sides. ValueError for a head that orders the
    pairs no better than chance, and for NaN or inf.
    """
    _check(chosen, heads)
    check.shapes(chosen=(chosen, "N H"), rejected=(rejected, "N H"))
    _check_finite(torch.cat([chosen, rejected]), heads)
    shift = torch.cat([chosen, rejected]).double().mean(0).tolist()
    found = []
    for h, head in enumerate(heads):
        scale = _temperature(head.name, (chosen[:, h] - rejected[:, h]).double())
        found.append(replace(head, shift=shift[h], scale=scale))
    return tuple(found)


def _temperature(name: str, margin: Tensor) -> float:
    """Solve d/d(1/T) of the cross-entropy of margins [N] = 0 for T; it is convex in 1/T."""
    label = (len(margin) + 1) / (len(margin) + 2)
    size = margin.abs().mean()
    if not margin.mean() * (label - 0.5) > 0:
        raise ValueError(
            f"score: {name}: expected pairs with a higher score for the chosen side on average, got a mean "
            f"difference of {float(margin.mean()):.3g}"
        )

    # In units of the mean margin the root lies far inside of these limits.
    low, high = -30.0, 30.0
    for _ in range(80):
        middle = (low + high) / 2
        slope = (margin * (torch.sigmoid(margin / size * math.exp(middle)) - label)).sum()
        low, high = (middle, high) if slope < 0 else (low, middle)
    return float(size) / math.exp(low)


def _check(score: Tensor, heads: Sequence[Head]) -> None:
    if score.shape[-1] != len(heads):
        names = [head.name for head in heads]
        raise ValueError(f"score: expected [..., {len(heads)}] for heads {names}, got {list(score.shape)}")


def _check_finite(score: Tensor, heads: Sequence[Head]) -> None:
    for head, column in zip(heads, score.T):
        if not column.isfinite().all():
            raise ValueError(f"score: {head.name}: expected finite scores, got NaN or inf")
