"""Rows that know their places: of a text file, a list, several files as one, or a part of others."""

import bisect
import glob
import hashlib
import itertools
import os
import weakref
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from rft_fn.file_digest import digest, digest_of
from rft_fn.text import check_text

__all__ = [
    "Endless",
    "InvalidRow",
    "Joined",
    "Listed",
    "Part",
    "Place",
    "Records",
    "Row",
    "Rows",
    "Table",
    "content_of",
    "decode",
    "place_of",
    "row_at",
]


class InvalidRow(ValueError):
    """A row that cannot be used, with its place and the reason."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"data: {place}: {reason}")
        self.place = place
        self.reason = reason

    def __reduce__(self):
        return InvalidRow, (self.place, self.reason)


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

    def content(self) -> str | None:
        """Return a text that differs for other rows and for other places; None where none is known."""
        return None


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


def content_of(rows: Table) -> str | None:
    """Return a text that differs for other rows, from the bytes of their files; None for rows in memory."""
    if isinstance(rows, Rows):
        return rows.content()
    files = getattr(rows, "cache_files", None)  # of a table of `datasets`
    if not files:
        return None
    digests = [digest(Path(file["filename"])) for file in files]
    return repr((type(rows).__name__, getattr(rows, "_fingerprint", ""), digests))


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
        check_text(row)
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

    def _check_unchanged(self) -> None:
        if _stamp(self._file) != self._stamp:
            raise ValueError(f"data: {self._path} was changed while it was read; start again")

    def __getitem__(self, i: Any) -> Any:
        self._check_unchanged()
        i = range(len(self))[i]
        start = self._starts[i]
        self._file.seek(start)
        content = self._file.read(self._starts[i + 1] - start)
        place = self.place(i)
        return self._parse(decode(content, start, place), place)

    def place(self, i: int) -> Place:
        """Return FILE, line N: the line where record i begins."""
        return Place(f"{self._path}, line {self._lines[i]}", self._path.parent)

    def content(self) -> str | None:
        """Return the digest of the file, with its name."""
        found = digest_of(self._file.fileno())
        self._check_unchanged()
        return repr((str(self._path), len(self), found))


class Listed(Rows):
    """Rows in memory, with a name for their places."""

    def __init__(self, rows: Table, name: str, folder: Path | None = None, digest: str | None = None):
        """Keep the rows; `digest` is that of the file that they are of."""
        self._rows = rows
        self._name = name
        self._folder = folder
        self._digest = digest

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        return self._rows[i]

    def place(self, i: int) -> Place:
        """Return NAME, row N: counted from 1."""
        return Place(f"{self._name}, row {i + 1}", self._folder)

    def content(self) -> str | None:
        """Return the digest of the file, with the name; None for rows of no file."""
        return self._digest and repr((self._name, len(self), self._digest))


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

    def content(self) -> str | None:
        """Return the content of all files; None where that of one is not known."""
        parts = [part.content() for part in self._parts]
        return None if None in parts else repr(parts)


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

    def content(self) -> str | None:
        """Return the content of all rows, with the numbers of these."""
        whole = content_of(self._rows)
        if whole is None:
            return None
        numbers = hashlib.blake2b(np.asarray(self._index, np.int64).tobytes(), digest_size=16).hexdigest()
        return repr((whole, numbers))


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
