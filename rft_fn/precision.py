"""The types that numbers of 16 bits are computed in, and how far their rounding moves log-probs."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["gap_by_rounding", "wide", "widen"]

# the gaps that were measured, and the faults that a limit must catch: docs/trust.md
_GAPS = {torch.float16: 0.02, torch.bfloat16: 0.08}
_WIDE_GAP = 0.01


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type for sums, products and softmaxes: float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Cast `x` to `wide` of its type; leave integers and booleans unchanged."""
    return x.to(wide(x.dtype)) if x.is_floating_point() else x


def gap_by_rounding(dtypes: Iterable[torch.dtype]) -> float:
    """Return the most that two computations of one model differ by [mean nats per token] by rounding.

    The coarsest of the types decides, those of both computations; no types count as float32.
    """
    return max((_GAPS.get(x, _WIDE_GAP) for x in dtypes), default=_WIDE_GAP)
