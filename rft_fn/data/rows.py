"""Rows, and where each stands: records of a text file, lists, several files as one, a part of the rows."""

import bisect
import itertools
import os
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Joined", "Listed", "Part", "Records", "Row", "Rows", "Unfit", "decode", "place_of"]

Row = Mapping[str, Any]


class Unfit(ValueError):
    """A row that cannot be used: where it stands, and why."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"data: {place}: {reason}")
        self.place, self.reason = place, reason


class Rows(Sequence):
    """Rows that know where each of them stands."""

    @abstractmethod
    def place(self, i: int) -> str:
        """Where row i stands, for an error: a file and a line, or a name and a number."""


def place_of(rows: Sequence[Row], i: int, name: str) -> str:
    """Where row i stands: as the rows know it, else their name and its number, counted from 1."""
    if isinstance(rows, Rows):
        return rows.place(i)
    return f"{name}, row {i + 1}"


class Records(Rows):
    """The records of a text file, each parsed when it is asked for: a file may be larger than memory.

    `records[i]` raises Unfit for a record that is broken, ValueError for a file that was changed meanwhile.
    """

    def __init__(
        self, path: Path, file: BinaryIO, starts: array, lines: array, parse: Callable[[str, str], Row]
    ):
        """`starts` [records + 1] are positions in `file`, the last is the end; `lines` [records] from 1."""
        self._path, self._file, self._parse = path, file, parse
        self._starts, self._lines = starts, lines
        self._stamp = _stamp(file)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: Any) -> Any:
        if _stamp(self._file) != self._stamp:
            raise ValueError(f"data: {self._path} was changed while it was read; start again")
        i = range(len(self))[i]
        self._file.seek(self._starts[i])
        text = self._file.read(self._starts[i + 1] - self._starts[i])
        return self._parse(decode(text, self._starts[i], self.place(i)), self.place(i))

    def place(self, i: int) -> str:
        """FILE, line N: where record i begins."""
        return f"{self._path}, line {self._lines[i]}"


class Listed(Rows):
    """Rows that are in memory, or in a table of `datasets`, with the name that their places begin with."""

    def __init__(self, rows: Sequence[Row], name: str):
        self._rows, self._name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        return self._rows[i]

    def place(self, i: int) -> str:
        """NAME, row N: counted from 1."""
        return f"{self._name}, row {i + 1}"


class Joined(Rows):
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[Rows]):
        self._parts = parts
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, i: int) -> tuple[Rows, int]:
        """(the file's rows, the number among them) of row i."""
        i = range(len(self))[i]
        part = bisect.bisect_right(self._starts, i) - 1
        return self._parts[part], i - self._starts[part]

    def __getitem__(self, i: Any) -> Any:
        rows, at = self._find(i)
        return rows[at]

    def place(self, i: int) -> str:
        """Where row i stands in its own file."""
        rows, at = self._find(i)
        return rows.place(at)


class Part(Rows):
    """Some of the rows, by their numbers; each keeps its place."""

    def __init__(self, rows: Sequence[Row], index: Sequence[int], name: str):
        self._rows, self._index, self._name = rows, index, name

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: Any) -> Any:
        return self._rows[self._index[i]]

    def place(self, i: int) -> str:
        """Where the row stands among all."""
        return place_of(self._rows, self._index[i], self._name)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def decode(text: bytes, start: int, place: str) -> str:
    """Bytes of a file from position `start` on, as text. Unfit names the first byte that is not UTF-8."""
    try:
        return text.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        file = place.rpartition(", line")[0]
        raise Unfit(
            place,
            f"byte {start + error.start} of the file, 0x{text[error.start]:02x}, is not UTF-8; convert it: "
            f"iconv -f latin1 -t utf-8 {file} > NEW",
        ) from None
