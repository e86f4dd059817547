"""Limits of options, in their types: `fields` checks a whole record of options against them."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")

__all__ = [
    "AtLeast0", "AutoCount", "Count", "Filled", "Finite", "Free", "Positive", "PositiveShare", "Range",
    "Seed", "Several", "Share", "Warmup", "Whole",
]  # fmt: skip


@dataclass(frozen=True)
class Range:
    """The limits of a number, to annotate its type: `lr: Annotated[float, Range(0, inf)]`."""

    low: float = -inf
    high: float = inf
    open_low: bool = False  # excludes low itself; an infinite limit is always excluded
    open_high: bool = False

    def __contains__(self, x: float) -> bool:
        # comparisons exclude NaN too; math.isfinite would fail for integers beyond any float
        if not -inf < x < inf:
            return False
        if x == self.low and self.open_low:
            return False
        if x == self.high and self.open_high:
            return False
        return self.low <= x <= self.high

    def __str__(self) -> str:
        left = "(" if self.open_low or self.low == -inf else "["
        right = ")" if self.open_high or self.high == inf else "]"
        return f"{left}{self.low}, {self.high}{right}"


FREE = "changes no result of a run"
Free = Annotated[T, FREE]  # Free[Count]: a resumed run may have another value
FILLED = "is not empty"  # marks the type of a text, as `Free` does that of an option
Filled = Annotated[str, FILLED]
Finite = Annotated[float, Range()]
Positive = Annotated[float, Range(0, open_low=True)]
AtLeast0 = Annotated[float, Range(0)]
Above1 = Annotated[float, Range(1, open_low=True)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, open_low=True)]
Decay = Annotated[float, Range(0, 1, open_high=True)]
Count = Annotated[int, Range(1)]
Several = Annotated[int, Range(2)]
Whole = Annotated[int, Range(0)]
if TYPE_CHECKING:
    AutoCount = int  # `run.sizes` makes `auto` a number before anything reads it
else:
    AutoCount = Count | Literal["auto"]
Warmup = Annotated[int, Range(0)] | Annotated[float, Range(0, 1, open_low=True, open_high=True)]
Seed = Annotated[int, Range(-(2**63), 2**63 - 1)]  # the seeds of torch's generators

_LARGEST = 3.4e38  # what float32 holds, in which models compute

_KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
}


def fields(record: Any) -> None:
    """Check the fields of a dataclass against their types and ranges.

    Fields of nested dataclasses are checked too. Known types are bool, int, float, str, Literal, tuples and
    unions of them; others pass. With `__post_init__ = limits.fields` a dataclass is checked whenever one is
    made. Raises `ValueError("lr: expected a number in (0, inf), got nan")`; NaN and inf are outside every
    range.
    """
    for name, hint in _hints(type(record)).items():
        field(name, getattr(record, name), hint)


def exclude(values: Mapping[str, Any], off: Mapping[str, Any], pairs: Mapping[tuple[str, str], str]) -> None:
    """Raise ValueError for a pair of options that exclude each other and are both other than off.

    The text of a pair says of its second option why: "which samples whole responses"; what stands behind a
    semicolon is the remedy.
    """
    for (one, other), why in pairs.items():
        if values[one] != off[one] and values[other] != off[other]:
            why, semicolon, remedy = why.partition("; ")
            raise ValueError(
                f"{one}: expected {_shown(off[one])} with {other} {_shown(values[other])}, {why}, got "
                f"{_shown(values[one])}{semicolon}{remedy}"
            )


def _shown(x: Any) -> str:
    """Return the value of an option as an error says it."""
    if isinstance(x, tuple):
        return ", ".join(map(str, x)) or "none"
    return f"{x:g}" if isinstance(x, float) else "none" if x == "" else str(x)


def free(kind: Any) -> set[str]:
    """Return the names of the `Free` fields of a dataclass; a nested one's are "part.name"."""
    names = set()
    for name, hint in _hints(kind).items():
        if FREE in _marks(hint):
            names.add(name)
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            names |= {f"{name}.{inner}" for inner in free(hint)}
    return names


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _marks(hint: Any) -> tuple[Any, ...]:
    """Return what an annotated type is annotated with."""
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def field(name: str, x: Any, hint: Any) -> None:
    """Check a value against the type and the range of a field, as `fields` does."""
    marks = _marks(hint)
    limits = [m for m in marks if isinstance(m, Range)]
    if FILLED in marks and isinstance(x, str) and not x.strip():
        raise ValueError(f"{name}: expected a text that is not empty, got {x!r}")
    if get_origin(hint) is Annotated:
        hint = hint.__origin__
    if dataclasses.is_dataclass(x):
        for inner, part in _hints(type(x)).items():
            field(f"{name}.{inner}", getattr(x, inner), part)
    elif get_origin(hint) in (Union, UnionType):
        _union(name, x, get_args(hint))
    elif get_origin(hint) is Literal and x not in get_args(hint):
        known = ", ".join(str(choice) or "''" for choice in get_args(hint))
        raise ValueError(f"{name}: expected one of {known}, got {x!r}")
    elif get_origin(hint) is tuple:
        _tuple(name, x, get_args(hint))
    elif hint in _KINDS:
        _plain(name, x, hint, limits)


def _plain(name: str, x: Any, hint: Any, limits: Sequence[Range]) -> None:
    kind, want = _KINDS[hint]
    if limits:
        want += f" in {limits[0]}"
    right = isinstance(x, kind) and (hint is bool or not isinstance(x, bool))
    if not right or any(x not in limit for limit in limits):
        raise ValueError(f"{name}: expected {want}, got {x!r}")
    if hint is int and not -(2**63) <= x < 2**63:
        raise ValueError(f"{name}: expected an integer of at most 64 bits, got {x!r}")
    if hint is float and _LARGEST < abs(x) < inf:
        raise ValueError(f"{name}: expected a number in [-{_LARGEST}, {_LARGEST}], got {x!r}")


def _union(name: str, x: Any, options: Sequence[Any]) -> None:
    """Check a field of a union type.

    x may be any of the options; else the error is about the first one that is not None.
    """
    error = None
    for option in options:
        if option is type(None):
            if x is None:
                return
            continue
        try:
            return field(name, x, option)
        except ValueError as found:
            error = error or found
    if error is not None and type(None) in options:
        raise ValueError(str(error).replace(", got ", ", or None, got ", 1))
    if error is not None:
        raise error


def _tuple(name: str, x: Any, inner: Sequence[Any]) -> None:
    if not isinstance(x, tuple | list):
        raise ValueError(f"{name}: expected a tuple, got {x!r}")
    if len(inner) == 2 and inner[1] is Ellipsis:
        for i, item in enumerate(x):
            field(f"{name}[{i}]", item, inner[0])
