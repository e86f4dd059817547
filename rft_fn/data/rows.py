"""Rows of files: jsonl, json, csv and parquet, data sets of `datasets`; where each row stands in its file."""

import csv
import io
import json
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rft_fn import hub

__all__ = ["Records", "Unfit", "place_of", "read_rows"]

Row = Mapping[str, Any]


class Unfit(ValueError):
    """A row that cannot be used: where it stands, and why."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"data: {place}: {reason}")
        self.place, self.reason = place, reason


class Records(Sequence):
    """The records of a text file, each parsed when it is asked for: a file may be larger than memory.

    `records[i]` raises Unfit for a record that is broken, ValueError for a file that was changed meanwhile.
    """

    def __init__(self, path: Path, starts: array, lines: array, parse: Callable[[str, str], Row]):
        """`starts` [records + 1] are positions in bytes, the last is the end; `lines` [records] from 1."""
        self._path, self._starts, self._lines, self._parse = path, starts, lines, parse
        self._file = path.open("rb")
        self._stamp = _stamp(self._file)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: Any) -> Any:
        if _stamp(self._file) != self._stamp:
            raise ValueError(f"data: {self._path} was changed while it was read; start again")
        i = range(len(self))[i]
        self._file.seek(self._starts[i])
        text = self._file.read(self._starts[i + 1] - self._starts[i])
        return self._parse(_decode(text, self._starts[i], self.place(i)), self.place(i))

    def place(self, i: int) -> str:
        """FILE, line N: where record i begins."""
        return f"{self._path}, line {self._lines[i]}"


def place_of(rows: Sequence[Row], i: int, name: str) -> str:
    """Where row i stands: its line where the rows know it, else its number, counted from 1."""
    if isinstance(rows, Records):
        return rows.place(i)
    return f"{name}, row {i + 1}"


def _stamp(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _decode(text: bytes, start: int, place: str) -> str:
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


def _json_lines(path: Path) -> Records:
    """One object a line; blank lines are skipped."""
    starts, lines, at = array("q"), array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                starts.append(at)
                lines.append(number)
            at += len(line)
    starts.append(at)
    return Records(path, starts, lines, _parse_object)


def _parse_object(text: str, place: str) -> Row:
    try:
        row = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        raise Unfit(
            place, f"expected an object in one line, got broken JSON: {error.msg} at column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Unfit(place, f"expected an object in one line, got broken JSON: {error}") from None
    if not isinstance(row, dict):
        raise Unfit(place, f"expected an object of columns, got {type(row).__name__}")
    return row


def _json_file(path: Path) -> Sequence[Row]:
    """A list of objects, or one object a line."""
    with path.open("rb") as file:
        first = next((line.lstrip(b"\xef\xbb\xbf \t\r\n") for line in file if line.strip()), b"")
    if not first.startswith(b"["):
        return _json_lines(path)
    rows = json.loads(_decode(path.read_bytes(), 0, f"{path}, line 1"))
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise Unfit(place_of(rows, i, str(path)), f"expected an object of columns, got {kind}")
    return rows


@contextmanager
def _long_fields() -> Iterator[None]:
    """The csv module refuses fields above 131,072 characters unless it is told otherwise."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _cells(text: str) -> list[str]:
    with _long_fields():
        return next(csv.reader(io.StringIO(text, newline="\n"), strict=True))


def _csv_file(path: Path) -> Records:
    """Rows below a line of names; every value is text, as it stands there."""
    starts, lines = array("q"), array("q")
    with path.open("rb") as file, _long_fields():
        at = number = 0

        def feed() -> Iterator[str]:
            nonlocal at, number
            for line in file:
                at += len(line)
                number += 1
                yield line.decode("latin-1")  # commas, quotes and ends of lines are the same bytes in UTF-8

        reader = csv.reader(feed(), strict=True)
        while True:
            start, line = at, number + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise Unfit(f"{path}, line {line}", f"expected comma-separated values, got {error}") from None
            if cells is None:
                break
            if cells:  # not a blank line
                starts.append(start)
                lines.append(line)
    if not lines:
        return Records(path, array("q", [0]), lines, _parse_object)
    starts.append(at)
    return _below_header(path, starts, lines)


def _below_header(path: Path, starts: array, lines: array) -> Records:
    """The records but the first, with the columns that the first one names."""
    with path.open("rb") as file:
        file.seek(starts[0])
        names = _cells(_decode(file.read(starts[1] - starts[0]), starts[0], f"{path}, line {lines[0]}"))
    if len(set(names)) < len(names):
        raise Unfit(f"{path}, line {lines[0]}", f"expected a name of its own for each column, got {names}")

    def parse(text: str, place: str) -> Row:
        cells = _cells(text)
        if len(cells) > len(names):
            raise Unfit(place, f"expected {len(names)} cells as the first line has, got {len(cells)}")
        return dict(zip(names, cells))

    return Records(path, starts[1:], lines[1:], parse)


def _parquet_file(path: Path) -> Sequence[Row]:
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what it logs is raised too
    return datasets.load_dataset("parquet", data_files=str(path), split="train")


_READERS: dict[str, Callable[[Path], Sequence[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json_file,
    ".parquet": _parquet_file,
    ".csv": _csv_file,
}


def _read_file(path: Path) -> Sequence[Row]:
    if not path.exists():
        raise FileNotFoundError("no such file")
    if not path.stat().st_size:
        return []
    return _READERS[path.suffix](path)


def _read_saved(source: str, split: str) -> Sequence[Row]:
    """A folder that `datasets` saved, or a hub data set."""
    import datasets

    if Path(source).exists() and not Path(source).is_dir():
        raise ValueError(f"expected a name that ends in {', '.join(_READERS)}, for that is how it is read")
    if not Path(source).is_dir():
        return _read_hub(source, split)
    rows = datasets.load_from_disk(source)
    return rows[split] if isinstance(rows, datasets.DatasetDict) else rows


def _read_hub(source: str, split: str) -> Sequence[Row]:
    """A data set of the hub; without a hub the copy of it that was fetched before."""
    import datasets

    why = hub.unreachable()
    if not why:
        return datasets.load_dataset(source, split=split)
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True  # otherwise it asks again and again
    try:
        return datasets.load_dataset(source, split=split)
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(f"it is neither a file nor in the hub's cache, and {why}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def read_rows(source: str, *, split: str = "train") -> Sequence[Row]:
    """The rows of a .jsonl, .json, .csv or .parquet file, a folder that `datasets` saved, or a hub data set.

    Values are as they stand in the file: those of jsonl have JSON's types, and nothing is taken for a date;
    those of csv are text. Lines of jsonl and csv are read when they are asked for, and a broken one raises
    ValueError with its number then.

    ValueError for a file that is not there, cannot be read or has no rows.
    """
    path = Path(source)
    try:
        rows = _read_file(path) if path.suffix in _READERS else _read_saved(source, split)
    except Unfit:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"data: could not read {source!r}: {reason}") from error
    if not len(rows):
        raise ValueError(f"data: expected at least one row, got none in {source!r}")
    return rows
