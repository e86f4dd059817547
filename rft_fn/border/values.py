"""Values from outside: texts, objects, numbers, and lists of numbers."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from rft_fn.border.foreign_code import quoted

__all__ = [
    "entries", "finite", "integer", "integers", "is_finite", "number", "numbers", "numbers_or_none",
    "object_of", "text",
]  # fmt: skip

LARGEST = torch.finfo(torch.float32).max
INT64 = 2**63


def object_of(name: str, x: Any) -> dict[str, Any]:
    """Return an object of JSON. ValueError for any other value."""
    if not isinstance(x, dict):
        raise ValueError(f"{name}: expected an object, got {type(x).__name__}")
    return x


def text(name: str, x: Any) -> str:
    """Return a text. ValueError for anything else."""
    if not isinstance(x, str):
        raise ValueError(f"{name}: expected a text, got {quoted(x)}")
    return x


def is_finite(x: Any) -> bool:
    """Return whether a number is finite as a float32."""
    return abs(x) <= LARGEST  # False for NaN


def finite(name: str, x: Any) -> Any:
    """Return a value of JSON. ValueError for a number inside it that is not finite, which JSON has not."""
    if isinstance(x, Mapping):
        for key, y in x.items():
            finite(f"{name}[{quoted(key)}]", y)
    elif isinstance(x, (list, tuple)):
        for i, y in enumerate(x):
            finite(f"{name}[{i}]", y)
    elif isinstance(x, float) and not math.isfinite(x):
        raise ValueError(f"{name}: expected a finite number, got {x!r}")
    return x


def integer(name: str, x: Any, *, low: int = -INT64, high: int = INT64 - 1) -> int:
    """Return a whole number in [low, high], which fits 64 bits. ValueError for another, 3.0, "3" and True."""
    if type(x) is not int or not low <= x <= high:
        raise ValueError(f"{name}: expected a whole number{_limits(low, high)}, got {quoted(x)}")
    return x


def number(name: str, x: Any, *, low: float = -LARGEST, high: float = LARGEST) -> float:
    """Return a number in [low, high] that is finite as a float32. ValueError for another, and for True."""
    if type(x) not in (int, float) or not low <= x <= high:
        limits = "" if high == LARGEST else f" in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: expected a finite number{limits}, got {quoted(x)}")
    return float(x)


def _limits(low: int, high: int) -> str:
    """Return the limits of whole numbers as the end of what is expected."""
    if high < INT64 - 1:
        return f" from {low} to {high}"
    return f" of at least {low}" if low > -INT64 else " of 64 bits"


def entries(name: str, xs: Any, count: int | None) -> list[Any]:
    """Return a list of `count` entries, of any number for None. ValueError for anything else."""
    if not isinstance(xs, list):
        wanted = "a list" if count is None else f"a list of {count} entries"
        raise ValueError(f"{name}: expected {wanted}, got {type(xs).__name__}")
    if count is not None and len(xs) != count:
        raise ValueError(f"{name}: expected {count} entries, got {len(xs)}")
    return xs


def integers(
    name: str, xs: Any, *, count: int | None = None, low: int = -INT64, high: int = INT64 - 1
) -> list[int]:
    """Return a list of `count` whole numbers in [low, high]. ValueError for anything else."""
    xs = entries(name, xs, count)
    if not {*map(type, xs)} <= {int} or (xs and not low <= min(xs) <= max(xs) <= high):
        at = next(i for i, x in enumerate(xs) if type(x) is not int or not low <= x <= high)
        raise ValueError(f"{name}: expected whole numbers{_limits(low, high)}, got {quoted(xs[at])} at {at}")
    return xs


def numbers(
    name: str, xs: Any, *, count: int | None = None, low: float = -LARGEST, high: float = LARGEST
) -> list[float]:
    """Return a list of `count` numbers in [low, high], finite as float32. ValueError for anything else."""
    xs = entries(name, xs, count)
    if not {*map(type, xs)} <= {int, float} or not all(low <= x <= high for x in xs):
        at = next(i for i, x in enumerate(xs) if type(x) not in (int, float) or not low <= x <= high)
        limits = "" if high == LARGEST else f" in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: expected finite numbers{limits}, got {quoted(xs[at])} at {at}")
    return [float(x) for x in xs]


def numbers_or_none(name: str, xs: Any, *, count: int) -> list[float | None]:
    """Return a list of `count` numbers that are finite as float32, or None. ValueError for anything else."""
    for i, x in enumerate(entries(name, xs, count)):
        if x is not None and (type(x) not in (int, float) or not is_finite(x)):
            raise ValueError(f"{name}: expected finite numbers or null, got {quoted(x)} at {i}")
    return xs
