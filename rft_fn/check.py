"""Checks at public boundaries: shapes, limits of options, addresses, text, and foreign JSON.

The values of tensors are never read, because that would stop a GPU. The limits of an option are in its type,
and `fields` checks a whole record of options against them.
"""

import dataclasses
import json
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import unquote

T = TypeVar("T")

__all__ = [
    "AtLeast0", "Count", "Filled", "Finite", "Free", "Positive", "PositiveShare", "Range", "Seed", "Several",
    "Share", "Warmup", "Whole",
]  # fmt: skip


def _fits(size: tuple[int, ...], dims: list[str], known: dict[str, Any]) -> bool:
    """Return whether a size has these dimensions, and add new ones to `known`."""
    lead = dims[:1] == ["..."]
    named = [dim for dim in dims if dim != "..."]
    rest = len(size) - len(named)
    if rest < 0 or (rest and not lead):
        return False
    fits = True
    for dim, n in zip(named, size[rest:]):
        if dim.isdigit():
            fits &= int(dim) == n
        else:
            fits &= known.setdefault(dim, n) == n
    if lead:
        fits &= known.setdefault("...", size[:rest]) == size[:rest]
    return fits


def _written(dims: list[str], known: dict[str, Any]) -> str:
    """Write the expected sizes as text: "4, S" for "N S" if N is known to be 4."""
    sizes: list[Any] = [known.get(dim, dim) for dim in dims]
    if sizes and isinstance(sizes[0], tuple):  # the sizes of a leading ...
        sizes[:1] = sizes[0]
    return ", ".join(map(str, sizes))


def shapes(**args: tuple[Any, str]) -> dict[str, int]:
    """Check shapes of tensors and return the named sizes.

    Arguments are `name=(tensor, "N G")`, checked from left to right. A dimension is a name, which must have
    the same size everywhere, a number, or a leading `...`. None is skipped. Raises `ValueError("adv:
    expected [T] = [7], got [6]")`.
    """
    known: dict[str, int] = {}
    for name, (x, spec) in args.items():
        if x is None:
            continue
        dims = spec.split()
        before = dict(known)
        if not _fits(tuple(x.shape), dims, known):
            want = _written(dims, before)
            raise ValueError(f"{name}: expected [{', '.join(dims)}] = [{want}], got {list(x.shape)}")
    return known


def units(unit: int | Sequence[int], rows: int, where: str = "") -> list[int]:
    """Check that units make up all rows, and return the number of rows of each.

    `unit` is the number of rows of every unit, or of each. `where` tells what the rows are of. Raises
    `ValueError("unit: expected a divisor of the 7 rows, got 2")`.
    """
    if isinstance(unit, int):
        if unit < 1 or rows % unit:
            raise ValueError(f"unit: expected a divisor of the {rows} rows{where}, got {unit}")
        return [unit] * (rows // unit)
    sizes = [int(size) for size in unit]
    if any(size < 1 for size in sizes):
        raise ValueError(f"unit: expected at least 1 row in each of {len(sizes)} units, got {min(sizes)}")
    if sum(sizes) != rows:
        raise ValueError(f"unit: expected units of {rows} rows{where} together, got {sum(sizes)}")
    return sizes


def given(**args: T | None) -> tuple[T, ...]:
    """Check that no argument is None, and return them all.

    Raises `ValueError("old_value: expected a tensor, got None; ...")` for the first that is.
    """
    values: list[T] = []
    for name, x in args.items():
        if x is None:
            raise ValueError(
                f"{name}: expected a tensor, got None; give it to rft_fn.experience, or ask the model for it"
            )
        values.append(x)
    return tuple(values)


def at_most_one(**options: Any) -> None:
    """Check that at most one option is not None.

    Raises `ValueError("steps, epochs: expected one of them, got 30 and 3.0")`.
    """
    given = {name: x for name, x in options.items() if x is not None}
    if len(given) > 1:
        raise ValueError(
            f"{', '.join(given)}: expected one of them, got {' and '.join(map(repr, given.values()))}"
        )


# names of a query's words that hold secrets
_SECRET = re.compile(r"(?i)(^|[_.-]|api|access)key$|token|secret|passw|signature|^sig$|^auth(orization)?$")


def _secret(address: str) -> str:
    """Return what is secret in an address, or in several with commas between them; "" for nothing."""
    if "://" not in address:
        return ""
    if re.search("//[^/?#]*@", address):
        return "a name and a password in front of the host"
    for word in map(unquote, re.findall("[?&;]([^?&;=#]+)", address)):
        if _SECRET.search(word):
            return f"{word!r} in its query"
    return ""


def no_secret(name: str, address: str, instead: str) -> None:
    """Check that an address has no secret, which would be written to the files of a run.

    `instead` says where a secret belongs. The ValueError does not show the secret.
    """
    secret = _secret(address)
    if secret:
        raise ValueError(
            f"{name}: expected an address without a secret, which a run would write into its config.json, "
            f"got {secret}; {instead}"
        )


def shown_without_secrets(text: str) -> str:
    """Put *** in place of the secrets of the addresses in a text."""

    def hidden(word: re.Match[str]) -> str:
        return f"{word['name']}=***" if _SECRET.search(unquote(word["name"])) else word[0]

    text = re.sub("//[^/]*@", "//***@", text)
    return re.sub(r"(?<=[?&;])(?P<name>[^?&;=#]+)=[^&;,#'\"\s]*", hidden, text)


def error_text(error: BaseException) -> str:
    """Return the text of an error of code that is not ours in one line; its type where it gives none."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # its text is code that is not ours, too
        text = ""
    return text or type(error).__name__


# ------------------------------------------------------------------------------------------------------- json

# a text in quotes, also one without its end, or a bracket outside of such texts; it never goes back
_QUOTED_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}]', re.DOTALL)
_JSON = json.JSONDecoder()


def parse_json(text: str | bytes, *, depth: int = 100, decoder: json.JSONDecoder = _JSON) -> Any:
    """Return the value of JSON text that a model, a server or a stranger's file holds.

    ValueError for what is no JSON, and for brackets that nest deeper than `depth`: Python's own reader raises
    RecursionError for those, at a depth that differs from caller to caller, and so does what walks the value.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    _check_depth(text, 0, depth)
    try:
        return decoder.decode(text)
    except RecursionError:  # the caller itself is deep
        raise ValueError("brackets nest too deep to be read here") from None


def json_at(
    text: str, start: int = 0, *, depth: int = 100, decoder: json.JSONDecoder = _JSON
) -> tuple[Any, int]:
    """Return (the JSON value that begins at a place of a text, where it ends); see `parse_json`."""
    if text[start : start + 1] in ("{", "["):
        _check_depth(text, start, depth)
    try:
        return decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError("brackets nest too deep to be read here") from None


def _check_depth(text: str, start: int, depth: int) -> None:
    """Raise ValueError if the value that begins at `start` has more than `depth` brackets around a place."""
    level = 0
    for match in _QUOTED_OR_BRACKET.finditer(text, start):
        if match[0] in ("{", "["):
            level += 1
            if level > depth:
                raise ValueError(f"brackets nest deeper than {depth}")
        elif match[0] in ("}", "]"):
            level -= 1
            if level <= 0:
                return


# ------------------------------------------------------------------------------------------------------- text

# what a terminal obeys, or cannot show: controls but for tab and new line, directions of text, surrogates
_UNSHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: Any) -> str:
    """Return a text with `\\x1b` and the like in place of what would steer the terminal it is printed on."""
    return _UNSHOWN.sub(lambda found: ascii(found[0])[1:-1], str(text))


# half of a surrogate pair: JSON may hold one, no file can be written with it
_HALF = re.compile(r"[\ud800-\udfff]")


def check_text(value: Any) -> None:
    """Raise ValueError for text inside a value of JSON that is no Unicode: half of a surrogate pair."""
    place = _half_in(value)
    if place is not None:
        at = f" at {place}" if place else ""
        raise ValueError(f"expected Unicode text, got half of a surrogate pair{at}; write U+FFFD instead")


def _half_in(value: Any) -> str | None:
    """Return the place of the first text with half of a pair, as "['messages'][0]"; None for none."""
    if isinstance(value, str):
        return "" if not value.isascii() and _HALF.search(value) else None
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        if any(_half_in(name) is not None for name in value):
            return ""
        inner = list(value.items())
    elif isinstance(value, (list, tuple)):
        inner = list(enumerate(value))
    for name, x in inner:
        place = _half_in(x)
        if place is not None:
            return f"[{name!r}]{place}"
    return None


def writable(text: str) -> str:
    """Return a text with U+FFFD in place of each half of a surrogate pair, which nothing can write."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)


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
    unions of them; others pass. With `__post_init__ = check.fields` a dataclass is checked whenever one is
    made. Raises `ValueError("lr: expected a number in (0, inf), got nan")`; NaN and inf are outside every
    range.
    """
    for name, hint in _hints(type(record)).items():
        _field(name, getattr(record, name), hint)


def free(kind: Any) -> set[str]:
    """Return the names of the `Free` fields of a dataclass; a nested one's are "part.name"."""
    names = set()
    for name, hint in _hints(kind).items():
        if FREE in getattr(hint, "__metadata__", ()):
            names.add(name)
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            names |= {f"{name}.{inner}" for inner in free(hint)}
    return names


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _field(name: str, x: Any, hint: Any) -> None:
    marks = getattr(hint, "__metadata__", ())
    limits = [m for m in marks if isinstance(m, Range)]
    if FILLED in marks and isinstance(x, str) and not x.strip():
        raise ValueError(f"{name}: expected a text that is not empty, got {x!r}")
    if get_origin(hint) is Annotated:
        hint = hint.__origin__
    if dataclasses.is_dataclass(x):
        for inner, part in _hints(type(x)).items():
            _field(f"{name}.{inner}", getattr(x, inner), part)
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
            return _field(name, x, option)
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
            _field(f"{name}[{i}]", item, inner[0])
