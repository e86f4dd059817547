"""Pieces of a range, and of tensors that may be absent."""

from __future__ import annotations

from torch import Tensor


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def cut(size: int, step: int) -> list[slice]:
    """[0, size) in slices of at most `step`.

    One empty slice if size is 0: products over it are zeros.
    """
    starts = range(0, max(size, 1), step)
    return [slice(start, min(start + step, size)) for start in starts]


def part(x: Tensor | None, at: slice) -> Tensor | None:
    """x[at], or None without x."""
    if x is None:
        return None
    return x[at]
