"""The type in which numbers of 16 bits are computed."""

import torch
from torch import Tensor

__all__ = ["wide", "widen"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type for sums, products and softmaxes: float64 for float64, else float32."""
    if dtype == torch.float64:
        return dtype
    return torch.float32


def widen(x: Tensor) -> Tensor:
    """`x` in `wide` of its type. Integers and booleans stay as they are."""
    if not x.is_floating_point():
        return x
    return x.to(wide(x.dtype))
