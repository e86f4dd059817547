"""The file formats: jsonl, json, csv and parquet, plain or gzipped.

A new format is a reader and its row in `READERS`. json and csv are not read by `datasets`, which gives a
column one type (007 becomes 7, NA nothing, 7 beside 4.0 the number 7.0, 1e999 nothing, a date no text), and
whose errors name no line.
"""

import csv
import gzip
import hashlib
import io
import json
import logging
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rft_fn import opened
from rft_fn.data.table import InvalidRow, Joined, Listed, Records, Row, Rows, Table, decode
from rft_fn.foreign_json import parse_json

__all__ = ["READERS", "quiet_datasets", "read_files", "suffix_of", "undecoded"]

_BEFORE_BRACKET = b"\xef\xbb\xbf \t\r\n"  # a byte order mark and spaces may come before the first bracket


Reader = Callable[[Sequence[Path], str | None], Table]
"""(files of one format, the list of a json object) -> their rows, one file after the other.

A text file may be larger than memory: its rows are read when they are asked for. ValueError, without the name
of the source, for a file that cannot be read; InvalidRow for a row, with its place.
"""


def suffix_of(path: Path) -> str:
    """Return the suffix that names the format, ".jsonl" of a.jsonl.gz; "" for an unknown one."""
    suffix = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
    return suffix if suffix in READERS else ""


def read_files(paths: Sequence[Path], key: str | None = None) -> Table:
    """Return the rows of files of one format, one file after the other.

    `key` names the list of a json object. ValueError for files of several formats or of none, and for a file
    that its reader refuses.
    """
    suffixes = {suffix_of(path) for path in paths}
    if len(suffixes) > 1:
        raise ValueError(f"expected files of one kind, got {', '.join(sorted(suffixes))}")
    suffix = suffixes.pop()
    if not suffix:
        raise ValueError(f"expected a name that ends in {', '.join(READERS)}, for that is how it is read")
    if key is not None and suffix != ".json":
        raise ValueError(f"expected a .json file to have a list {key!r}, got {paths[0]}")
    return READERS[suffix](paths, key)


def _by_file(read: Callable[[Path, BinaryIO, str | None], Rows]) -> Reader:
    """Return a reader that reads each file with `read`."""

    def rows_of(path: Path, key: str | None) -> Rows:
        file = _open(path)
        try:
            rows = read(path, file, key)
        except BaseException:
            file.close()
            raise
        if not isinstance(rows, Records):  # which read it as long as they are there
            file.close()
        return rows

    def reader(paths: Sequence[Path], key: str | None) -> Table:
        parts = [rows_of(path, key) for path in paths]
        return parts[0] if len(parts) == 1 else Joined(parts)

    return reader


def _open(path: Path) -> BinaryIO:
    """Return a file that can be read at any position. A packed one is unpacked into a temporary file."""
    opened.note_rows(path)
    if path.suffix != ".gz":
        return path.open("rb")
    whole = tempfile.TemporaryFile()  # noqa: SIM115, it stays open as long as its rows are read
    with gzip.open(path) as packed:
        shutil.copyfileobj(packed, whole)
    whole.seek(0)
    return whole


def _json_lines(path: Path, file: BinaryIO, key: str | None = None) -> Records:
    """Find the records of a file with one object a line; blank lines are skipped."""
    begins, perhaps_blank, size = _line_begins(file)
    filled = np.ones(len(begins), bool)
    for i in perhaps_blank.tolist():
        file.seek(int(begins[i]))
        filled[i] = bool(file.readline().strip())
    starts, lines = array("q"), array("q")
    starts.frombytes(np.append(begins[filled], size).tobytes())
    lines.frombytes((np.flatnonzero(filled) + 1).tobytes())
    return Records(path, file, starts, lines, _parse_object)


_BLOCK = 1 << 24  # bytes
_IS_SPACE = np.array([bytes([byte]).isspace() for byte in range(256)])


def _line_begins(file: BinaryIO) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (where each line begins, which of them begin with a space or with their end, the size)."""
    found, spaces = [], []
    pending = np.zeros(1, np.int64)  # where a line begins, if the file does not end there
    at = 0
    file.seek(0)
    while block := file.read(_BLOCK):
        read = np.frombuffer(block, np.uint8)
        begins = np.append(pending, np.flatnonzero(read == ord("\n")) + at + 1)
        here = begins < at + len(read)
        found.append(begins[here])
        spaces.append(_IS_SPACE[read[begins[here] - at]])
        pending = begins[~here]
        at += len(read)
    none = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    return np.concatenate(found or none[0]), np.flatnonzero(np.concatenate(spaces or none[1])), at


def _parse_object(text: str, place: str) -> Row:
    try:
        row = parse_json(text.rstrip())
    except json.JSONDecodeError as error:
        raise InvalidRow(
            place, f"expected an object in one line, got broken JSON: {error.msg} at column {error.colno}"
        ) from None
    except ValueError as error:
        raise InvalidRow(place, f"expected an object in one line, got broken JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidRow(place, f"expected an object of columns, got {type(row).__name__}")
    return row


def _json(path: Path, file: BinaryIO, key: str | None) -> Rows:
    """Read a list of objects, an object with one such list, or one object per line."""
    # the first two lines that are not blank tell which of the three it is
    lines = (line.lstrip(_BEFORE_BRACKET) for line in file if line.strip(_BEFORE_BRACKET))
    first = next(lines, b"")
    second = next(lines, b"")
    file.seek(0)
    if first.startswith(b"["):
        if key is not None:
            raise ValueError(f"expected an object with a list {key!r}, got a list; leave out :{key}")
        rows, digest = _whole(path, file)
        return _objects(rows, str(path), path.parent, digest)
    if key is None and second and _is_json(first):
        return _json_lines(path, file)

    # one object over several lines, or broken lines: reading them as lines names the broken one
    try:
        whole, digest = _whole(path, file)
    except ValueError:
        return _json_lines(path, file)
    if not isinstance(whole, dict):
        raise ValueError(f"expected a list of rows, or an object with one, got {type(whole).__name__}")
    return _wrapped(path, whole, key, digest)


def _whole(path: Path, file: BinaryIO) -> tuple[Any, str]:
    """Return (the JSON value of a file, the digest of its bytes)."""
    content = file.read()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return parse_json(decode(content, 0, f"{path}, line 1")), digest


def _is_json(text: bytes) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _objects(rows: Sequence[Any], name: str, folder: Path, digest: str) -> Listed:
    """Return a list of rows. InvalidRow for an element that is no object."""
    listed = Listed(rows, name, folder, digest)
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidRow(listed.place(i), f"expected an object of columns, got {type(row).__name__}")
    return listed


def _wrapped(path: Path, whole: dict[str, Any], key: str | None, digest: str) -> Listed:
    """Return the rows of the named or the only list in an object; an object without lists is a row."""
    lists = [name for name, x in whole.items() if _is_table(x)]
    if key is None and not lists:
        return Listed([whole], str(path), path.parent, digest)
    if key is None and len(lists) > 1:
        raise ValueError(f"expected one list of rows, got {', '.join(lists)}; name one, as {path}:{lists[0]}")
    chosen = lists[0] if key is None else key
    if not isinstance(whole.get(chosen), list):
        raise ValueError(f"expected a list {chosen!r}, got an object with {', '.join(map(repr, whole))}")
    return _objects(whole[chosen], f"{path}, {chosen}", path.parent, digest)


def _is_table(x: Any) -> bool:
    """Return whether a value is a list of objects, and not of a conversation's turns."""
    if not isinstance(x, list) or not x or not all(isinstance(row, dict) for row in x):
        return False
    return "role" not in x[0] and "from" not in x[0]


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let the csv module read long fields: it refuses fields above 131,072 characters."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _cells(text: str) -> list[str]:
    with _long_fields():
        return next(csv.reader(io.StringIO(text, newline="\n"), strict=True))


def _csv(path: Path, file: BinaryIO, key: str | None) -> Records:
    """Find the rows below a line of names; every value is text, unchanged."""
    starts = array("q")
    lines = array("q")
    at = 0
    number = 0

    def feed() -> Iterator[str]:
        nonlocal at, number
        for line in file:
            at += len(line)
            number += 1
            yield line.decode("latin-1")  # commas, quotes and ends of lines are the same bytes in UTF-8

    # the csv module finds the records, and only their places are kept
    with _long_fields():
        reader = csv.reader(feed(), strict=True)
        while True:
            start = at
            line = number + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise InvalidRow(
                    f"{path}, line {line}", f"expected comma-separated values, got {error}"
                ) from None
            if cells is None:
                break
            if cells:  # not a blank line
                starts.append(start)
                lines.append(line)

    if not lines:
        return Records(path, file, array("q", [0]), lines, _parse_object)
    starts.append(at)
    return _below_header(path, file, starts, lines)


def _below_header(path: Path, file: BinaryIO, starts: array, lines: array) -> Records:
    """Return the records but the first, with the columns that the first one names."""
    file.seek(starts[0])
    names = _cells(decode(file.read(starts[1] - starts[0]), starts[0], f"{path}, line {lines[0]}"))
    if len(set(names)) < len(names):
        raise InvalidRow(f"{path}, line {lines[0]}", f"expected distinct column names, got {names}")

    def parse(text: str, place: str) -> Row:
        cells = _cells(text)
        if len(cells) > len(names):
            raise InvalidRow(place, f"expected {len(names)} cells as the first line has, got {len(cells)}")
        return dict(zip(names, cells))

    return Records(path, file, starts[1:], lines[1:], parse)


def _read_parquet(paths: Sequence[Path], key: str | None) -> Table:
    import datasets

    quiet_datasets()
    whole = [str(path) for path in paths if path.stat().st_size]
    if not whole:
        return []
    return undecoded(datasets.load_dataset("parquet", data_files=whole, split="train"))


def undecoded(table: Any) -> Any:
    """Return a table of `datasets` whose columns of media give {"bytes", "path"}, as they are stored.

    Its own decoders want further packages for audio, and decode what is in the cache already.
    """
    for name, feature in table.features.items():
        stored = _stored(feature)
        if stored is not None:
            table = table.cast_column(name, stored)
    return table


def _stored(feature: Any) -> Any:
    """Return the feature of a column of media, without decoding; None for other columns."""
    import datasets

    if isinstance(feature, (datasets.Image, datasets.Audio)):
        return type(feature)(decode=False)
    if isinstance(feature, datasets.List):
        inner = _stored(feature.feature)
        if inner is not None:
            return datasets.List(inner)
    return None


def quiet_datasets() -> None:
    """Silence the log and the progress bars of `datasets`. All that it logs is raised too."""
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)


READERS: dict[str, Reader] = {
    ".jsonl": _by_file(_json_lines),
    ".json": _by_file(_json),
    ".parquet": _read_parquet,
    ".csv": _by_file(_csv),
}
"""Suffix -> how files of that format are read."""
