"""JSON of a server or a folder as values with finite numbers, and the rows of the files of a run."""

import json
import math
from pathlib import Path
from typing import Any

from rft_fn.border.foreign_code import SHOWN, quoted
from rft_fn.border.values import entries, integer, number, numbers, numbers_or_none, object_of, text
from rft_fn.foreign_json import parse_json
from rft_fn.text import check_text

__all__ = ["json_rows", "read_json"]


_BEGAN = 60  # of what came instead of JSON


def _refuse(name: str) -> None:
    raise ValueError(f"expected finite numbers, got {name}")


def _finite(text: str) -> float:
    """Return a float. ValueError for one beyond all floats, such as 1e999, which Python reads as infinity."""
    x = float(text)
    if math.isinf(x):
        raise ValueError(f"expected finite numbers, got {text[:SHOWN]}")
    return x


_FINITE = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def read_json(data: str | bytes) -> Any:
    """Return the value of JSON text.

    ValueError for anything else, for numbers that are not finite (NaN, Infinity, 1e999), for brackets and
    integers beyond Python's limits, and for text that is no Unicode.
    """
    try:
        value = parse_json(data, decoder=_FINITE)
    except (json.JSONDecodeError, UnicodeDecodeError):
        began = data[:_BEGAN]
        began = began.decode(errors="replace") if isinstance(began, bytes) else began
        raise ValueError(f"expected JSON, got {' '.join(began.split())!r}") from None
    check_text(value)
    return value


def json_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file of a run, up to a line that is not whole; none for a missing file.

    A kill cuts the last line short. A number that is not finite becomes None, as a metric that is not there.
    ValueError for a line that is no object, has no step, or has other values than runs write in such a file.
    """
    check_row = _ROWS.get(path.name, _any_row)
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for i, line in enumerate(path.read_text(errors="replace").split("\n"), 1):  # a text may have U+2028
        try:
            row = parse_json(line, decoder=_ABSENT)
        except ValueError:
            break
        where = f"{path}, line {i}"
        integer(f"{where}: step", object_of(where, row).get("step"), low=0)
        check_row(where, row)
        found.append(row)
    return found


def _absent(_: str) -> None:
    return None


def _or_absent(text: str) -> float | None:
    x = float(text)
    return None if math.isinf(x) else x


_ABSENT = json.JSONDecoder(parse_constant=_absent, parse_float=_or_absent)


def _any_row(where: str, row: dict[str, Any]) -> None:
    """Take every row: its values are shown, and nothing computes with them."""


def _row_of_numbers(where: str, row: dict[str, Any]) -> None:
    """Check a row of metrics.jsonl or timing.jsonl: numbers, None for one that is not there."""
    for name, x in row.items():
        if x is not None and type(x) is not bool:
            number(f"{where}: {quoted(name)}", x)


def _row_of_quantiles(where: str, row: dict[str, Any]) -> None:
    """Check a row of distributions.jsonl: the same number of quantiles of each quantity."""
    sizes = {len(numbers(f"{where}: {quoted(name)}", x)) for name, x in row.items() if name != "step"}
    if sizes - {_QUANTILES}:
        raise ValueError(f"{where}: expected {_QUANTILES} quantiles, got {min(sizes - {_QUANTILES})}")


def _row_of_tokens(where: str, row: dict[str, Any]) -> None:
    """Check a row of tokens.jsonl: the pieces of a response, and as many numbers in each of its lists."""
    pieces = entries(f"{where}: pieces", row.get("pieces"), None)
    for i, piece in enumerate(pieces):
        text(f"{where}: pieces[{i}]", piece)
    numbers_or_none(f"{where}: mask", row.get("mask"), count=len(pieces))
    integer(f"{where}: group", row.get("group"), low=0)
    for name in {"prompt", "name"} & row.keys():
        text(f"{where}: {name}", row[name])
    if row.get("reward") is not None:
        number(f"{where}: reward", row["reward"])
    for name, xs in row.items():
        if isinstance(xs, list) and name not in ("pieces", "media", "conversation"):
            numbers_or_none(f"{where}: {quoted(name)}", xs, count=len(pieces))
    for i, medium in enumerate(entries(f"{where}: media", row.get("media", []), None)):
        entries(f"{where}: media[{i}]", medium, 3)
    for i, turn in enumerate(entries(f"{where}: conversation", row.get("conversation") or [], None)):
        object_of(f"{where}: conversation[{i}]", turn)


def _row_of_options(where: str, row: dict[str, Any]) -> None:
    """Check a row of overrides.jsonl: the option that was changed, and its values."""
    text(f"{where}: name", row.get("name"))
    if not {"old", "new"} <= row.keys():
        raise ValueError(f"{where}: expected old and new, got {', '.join(map(str, row))}")


_QUANTILES = 7  # of each row of distributions.jsonl
_ROWS = {
    "metrics.jsonl": _row_of_numbers,
    "timing.jsonl": _row_of_numbers,
    "distributions.jsonl": _row_of_quantiles,
    "tokens.jsonl": _row_of_tokens,
    "overrides.jsonl": _row_of_options,
}
