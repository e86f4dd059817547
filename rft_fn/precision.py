"""The type in which numbers of 16 bits are computed."""

import torch
from torch import Tensor

__all__ = ["wide", "widen"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type for sums, products and softmaxes: float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Cast `x` to `wide` of its type; leave integers and booleans unchanged."""
    return x.to(wide(x.dtype)) if x.is_floating_point() else x
