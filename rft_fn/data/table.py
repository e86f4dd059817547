"""Rows that know their places, the errors of unusable ones, and values at paths into a row.

Rows are records of a text file, a list, several files as one, or a part of other rows.
"""

import bisect
import glob
import itertools
import os
import weakref
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from rft_fn import check

__all__ = [
    "Endless", "FirstFew", "InvalidRow", "Joined", "Listed", "Part", "Place", "Records", "Row", "Rows",
    "Table", "TooLong", "check_window", "column_at", "column_of", "decode", "invalid_line", "place_of",
    "row_at", "value_at",
]  # fmt: skip


# ---------- rows that cannot be used: errors for them, and one line about all


_SHOWN = 3  # rows that an error or a warning names


class InvalidRow(ValueError):
    """A row that cannot be used, with its place and the reason."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"data: {place}: {reason}")
        self.place = place
        self.reason = reason

    def __reduce__(self):
        return InvalidRow, (self.place, self.reason)


class TooLong(Exception):
    """A prompt or a pair above its limit. The text is its length, as "600 tokens"."""


def check_window(count: int, max_new: int, window: int | None, *, limit: str = "max_prompt") -> None:
    """Raise ValueError unless the model's window holds `count` tokens and `max_new` after them.

    None is no limit; `limit` is the option that leaves long rows out. Tokens of images, audio and videos are
    counted as they are widened.
    """
    if window is None or count + max_new <= window:
        return
    if max_new:
        size = f"{count} + {max_new} tokens with max_new, those of media among them"
        remedy = f"lower max_new, or {limit} to leave it out"
    else:
        size = f"{count} tokens, those of media among them"
        remedy = f"shorten it, or lower {limit}"
    raise ValueError(f"the row has {size}, above the model's window of {window}; {remedy}")


class FirstFew:
    """The first few of many things, and the count of all."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[Any] = []

    def add(self, x: Any) -> None:
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(x)

    def more(self) -> str:
        """Return the count of the others as the end of a line: "; and 4 more"."""
        hidden = self.count - len(self.shown)
        return f"; and {hidden} more" if hidden else ""


def invalid_line(invalid: FirstFew, rows: "Table") -> str:
    """Return the error for invalid rows: the first ones by reason, and their count."""
    total = len(rows)
    part = f" (a part of {rows.whole} rows)" if isinstance(rows, Part) else ""
    reasons: dict[str, list[str]] = {}
    for place, reason in invalid.shown:
        reasons.setdefault(reason, []).append(place)
    shown = "; ".join(f"{_join_places(places)}: {reason}" for reason, places in reasons.items())
    more = invalid.more()
    return f"data: {shown}{more}. {invalid.count} of {total} rows cannot be used{part}: mend or remove them"


def _join_places(places: list[str]) -> str:
    """Join several places to one text, such as "FILE, lines 1, 2"."""
    heads, numbers = zip(*(place.rsplit(" ", 1) for place in places))
    if len(places) == 1 or len(set(heads)) > 1:
        return " and ".join(places)
    return f"{heads[0]}s {', '.join(numbers)}"


# ---------- rows that know their places, for errors


Row = Mapping[str, Any]
"""One row of a data set: column -> value."""


class Table(Protocol):
    """Rows by number, from 0: a list, a table of `datasets`, or `Rows`."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Row: ...


class Endless(NamedTuple):
    """Rows without end, such as the rows of a built-in task."""

    name: str  # of the source, in errors
    row: Callable[[int], Row]  # the row at an index >= 0, the same at every call
    seed: int = 0  # that they were made with


class Place(str):
    """The place of a row as text, with the folder that paths in the row begin from."""

    folder: Path | None

    def __new__(cls, text: str, folder: Path | None = None) -> "Place":
        place = super().__new__(cls, text)
        place.folder = folder
        return place


class Rows(Sequence):
    """Rows that know their places, for errors."""

    @abstractmethod
    def place(self, i: int) -> Place:
        """Return the place of row i: FILE, line N or NAME, row N."""


def place_of(rows: Table, i: int, name: str) -> Place:
    """Return the place of row i, for an error.

    As the rows know it, else their name and its number, counted from 1; a name that is a file or a folder is
    where its paths begin.
    """
    if isinstance(rows, Rows):
        return rows.place(i)
    path = Path(name).expanduser()
    folder = path if path.is_dir() else None
    if folder is None and path.parent.is_dir() and (path.is_file() or glob.has_magic(path.name)):
        folder = path.parent
    return Place(f"{name}, row {i + 1}", folder)


def row_at(rows: Table, i: int, name: str) -> tuple[dict[str, Any], Place]:
    """Return (the columns of row i, its place).

    InvalidRow for a broken row, for a value that Python cannot hold, and for text that is no Unicode.
    """
    place = place_of(rows, i, name)
    try:
        row = dict(rows[i])
    except OverflowError as error:  # of a table: Arrow's dates and durations reach further
        raise InvalidRow(place, f"a date or duration is out of Python's range: {error}") from None
    try:
        check.check_text(row)
    except ValueError as error:
        raise InvalidRow(place, str(error)) from None
    return row, place


class Records(Rows):
    """The records of a text file, which may be larger than memory.

    Each is parsed when it is asked for. `records[i]` raises InvalidRow for a broken record, ValueError for a
    file that was changed meanwhile.
    """

    def __init__(
        self, path: Path, file: BinaryIO, starts: array, lines: array, parse: Callable[[str, str], Row]
    ):
        """Keep the positions of the records.

        `starts` [records + 1] are positions in `file`, the last is the end; `lines` [records] from 1; `parse`
        makes the row of (text, place), and raises InvalidRow for a broken record.
        """
        self._path = path
        self._file = file
        weakref.finalize(self, file.close)
        self._parse = parse
        self._starts = starts
        self._lines = lines
        self._stamp = _stamp(file)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: Any) -> Any:
        if _stamp(self._file) != self._stamp:
            raise ValueError(f"data: {self._path} was changed while it was read; start again")
        i = range(len(self))[i]
        start = self._starts[i]
        self._file.seek(start)
        content = self._file.read(self._starts[i + 1] - start)
        place = self.place(i)
        return self._parse(decode(content, start, place), place)

    def place(self, i: int) -> Place:
        """Return FILE, line N: the line where record i begins."""
        return Place(f"{self._path}, line {self._lines[i]}", self._path.parent)


class Listed(Rows):
    """Rows in memory, with a name for their places."""

    def __init__(self, rows: Table, name: str, folder: Path | None = None):
        self._rows = rows
        self._name = name
        self._folder = folder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        return self._rows[i]

    def place(self, i: int) -> Place:
        """Return NAME, row N: counted from 1."""
        return Place(f"{self._name}, row {i + 1}", self._folder)


class Joined(Rows):
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[Rows]):
        self._parts = parts
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, i: int) -> tuple[Rows, int]:
        """Return (the file's rows, the number among them) of row i."""
        i = range(len(self))[i]
        part = bisect.bisect_right(self._starts, i) - 1
        return self._parts[part], i - self._starts[part]

    def __getitem__(self, i: Any) -> Any:
        rows, at = self._find(i)
        return rows[at]

    def place(self, i: int) -> Place:
        """Return the place of row i in its own file."""
        rows, at = self._find(i)
        return rows.place(at)


class Part(Rows):
    """Some of the rows, by their numbers; each keeps its place."""

    def __init__(self, rows: Table, index: Sequence[int], name: str):
        self._rows = rows
        self._index = index
        self._name = name

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: Any) -> Any:
        return self._rows[self._index[i]]

    @property
    def whole(self) -> int:
        """Return the number of all rows."""
        return len(self._rows)

    def place(self, i: int) -> Place:
        """Return the place of the row among all."""
        return place_of(self._rows, self._index[i], self._name)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    """Return (size, time of the last change [ns]) of an open file."""
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


def decode(text: bytes, start: int, place: str) -> str:
    """Decode the bytes of a file from position `start` on. InvalidRow for a byte that is not UTF-8."""
    try:
        return text.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        file = place.rpartition(", line")[0]
        raise InvalidRow(
            place,
            f"byte {start + error.start} of the file, 0x{text[error.start]:02x}, is not UTF-8; convert it: "
            f"iconv -f latin1 -t utf-8 {file} > NEW",
        ) from None


# ---------- values at a path into a row, such as "reward_model.ground_truth"


_RAISE = object()


def value_at(row: Mapping[str, Any], path: str, default: Any = _RAISE) -> Any:
    """Return the value of a row at a path such as "reward_model.ground_truth".

    A column with dots in its own name wins. Where there is nothing at the path: the default, or KeyError
    without one.
    """
    if path in row:
        return row[path]

    # the longest column name that the path begins with, then the rest of the path inside its value
    for cut in range(len(path) - 1, 0, -1):
        if path[cut] != ".":
            continue
        inner = row.get(path[:cut])
        if isinstance(inner, Mapping):
            return value_at(inner, path[cut + 1 :], default)

    if default is _RAISE:
        raise KeyError(path)
    return default


def column_of(row: Row, column: str) -> Any:
    """Return the cell of a column. ValueError, with the columns that there are, for a missing one."""
    if column not in row:
        raise ValueError(f"the row has no column {column!r}; it has {', '.join(map(repr, row))}")
    return row[column]


def column_at(
    columns: Mapping[str, Sequence[Any]], path: str, count: int, default: Any = _RAISE
) -> list[Any]:
    """Return `value_at` for all of `count` rows that are given as columns."""
    heads = [name for name in columns if path == name or path.startswith(f"{name}.")]
    cells = []
    for i in range(count):
        row = {name: columns[name][i] for name in heads}
        cells.append(value_at(row, path, default))
    return cells
