"""Pieces of a range, and of tensors that may be absent."""

from __future__ import annotations

from torch import Tensor


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def cut(size: int, step: int) -> list[slice]:
    """Cut [0, size) into slices of at most `step`.

    One empty slice if size is 0: products over it are zeros.
    """
    starts = range(0, max(size, 1), step)
    return [slice(start, min(start + step, size)) for start in starts]


def part(x: Tensor | None, at: slice) -> Tensor | None:
    """Return x[at], or None without x."""
    if x is None:
        return None
    return x[at]
