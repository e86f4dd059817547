"""Values and media as JSON, as requests and answers of reward servers hold them."""

import base64
import binascii
import datetime
import decimal
import io
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_fn import border
from rft_fn.data.medium import KINDS
from rft_fn.text import writable

__all__ = ["dump", "media_in", "media_out", "plain"]


_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, Path)


def dump(x: Any) -> bytes:
    """Return JSON of plain values, with U+FFFD in place of halves of surrogate pairs."""
    text = json.dumps(x, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return writable(text).encode()


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it. TypeError for one of a type that it cannot.

    Arrays become lists, bytes {"base64"}, images of PIL {"mime", "base64"}, dates and decimals text. JSON has
    no numbers that are not finite: they become null.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": _encoded(bytes(value))}
    if isinstance(value, _AS_TEXT):
        return str(value)
    if hasattr(value, "tolist"):  # arrays and tensors
        return plain(value.tolist())
    if hasattr(value, "convert") and hasattr(value, "save"):  # an image of PIL, without loss
        file = io.BytesIO()
        value.save(file, "PNG")
        return {"mime": "image/png", "base64": _encoded(file.getvalue())}
    raise TypeError(f"expected a value that JSON can hold, got {type(value).__name__}")


def media_out(media: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, str]], list[list[int]]]:
    """Return (the files, each once; the numbers of each completion's files, in order).

    The completions of a prompt share its media, which are so sent once. `media` holds the records of each
    completion, as `media_records` makes them; a file is {"kind", "mime", "base64" or "url"}.
    """
    files: list[dict[str, str]] = []
    known: dict[tuple[str, Any], int] = {}
    of: list[list[int]] = []
    for records in media:
        places: list[int] = []
        for record in records:
            key = (record["kind"], record.get("url", record.get("bytes")))
            if key not in known:
                known[key] = len(files)
                file = {name: record[name] for name in ("kind", "mime", "url") if name in record}
                if "bytes" in record:
                    file["base64"] = _encoded(record["bytes"])
                files.append(file)
            places.append(known[key])
        of.append(places)
    return files, of


def media_in(files: Any, of: Any, count: int) -> list[list[dict[str, Any]]]:
    """Return the records of `count` completions; see `media_out`. ValueError for anything else."""
    read = [_record(file, i) for i, file in enumerate(border.entries("files", files, None))]
    records: list[list[dict[str, Any]]] = []
    for i, places in enumerate(border.entries("media", of, count)):
        numbers = border.integers(f"media[{i}]: numbers of files", places, low=0, high=len(read) - 1)
        records.append([read[at] for at in numbers])
    return records


def _record(file: Any, i: int) -> dict[str, Any]:
    """Return the record of a file. ValueError for another thing."""
    if not isinstance(file, dict) or not {"kind", "mime"} <= set(file) or not {"url", "base64"} & set(file):
        raise ValueError(
            f"files: expected objects with 'kind', 'mime' and 'base64' or 'url', got another at {i}"
        )
    names = [name for name in ("kind", "mime", "url") if name in file]
    record: dict[str, Any] = {name: border.text(f"files[{i}]: {name}", file[name]) for name in names}
    if record["kind"] not in KINDS:
        raise ValueError(f"files[{i}]: kind: expected one of {', '.join(KINDS)}, got {record['kind']!r:.40}")
    if "base64" in file:
        try:
            record["bytes"] = base64.b64decode(file["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError(f"files: expected base64, got another text at {i}") from None
    return record


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
