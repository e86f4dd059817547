"""Values of rows as JSON, and the media beside them."""

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

import torch

from rft_fn import check

__all__ = ["dump", "entries", "finite", "load", "media_in", "media_out", "plain"]

_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, Path)
_SHOWN = 60  # characters of what came instead of JSON


def dump(x: Any) -> bytes:
    """Return JSON of plain values, with U+FFFD in place of halves of surrogate pairs."""
    text = json.dumps(x, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return check.writable(text).encode()


def load(data: bytes) -> Any:
    """The value of JSON.

    ValueError for anything else, for NaN and infinities, which Python's reader would take, for numbers and
    brackets beyond its limits, and for text that is no Unicode.
    """
    try:
        value = check.parse_json(data, decoder=_FINITE)
    except (json.JSONDecodeError, UnicodeDecodeError):
        began = " ".join(data[:_SHOWN].decode(errors="replace").split())
        raise ValueError(f"expected JSON, got {began!r}") from None
    check.check_text(value)
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"expected finite numbers, got {name}")


_FINITE = json.JSONDecoder(parse_constant=_refuse)


def plain(value: Any) -> Any:
    """The value as JSON can hold it. TypeError for one of a type that it cannot.

    Arrays become lists, bytes {"base64"}, images of PIL {"mime", "base64"}, dates and decimals text. JSON has
    no numbers that are not finite: they become null.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
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
    if hasattr(value, "convert") and hasattr(value, "save"):
        return _of_image(value)
    raise TypeError(f"expected a value that JSON can hold, got {type(value).__name__}")


def _of_image(image: Any) -> dict[str, str]:
    """An image of PIL, without loss."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"mime": "image/png", "base64": _encoded(file.getvalue())}


def entries(name: str, values: Any, count: int) -> list[Any]:
    """A list of `count` entries. ValueError for anything else."""
    if not isinstance(values, list):
        raise ValueError(f"{name}: expected a list of {count} entries, got {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"{name}: expected {count} entries, one for each completion, got {len(values)}")
    return values


def finite(name: str, values: Any, count: int) -> list[float | None]:
    """A list of `count` numbers that are finite as float32, or None. ValueError for anything else."""
    for i, x in enumerate(entries(name, values, count)):
        if x is not None and not _is_number(x):
            raise ValueError(f"{name}: expected finite numbers or null, got {x!r:.40} at {i}")
    return values


def _is_number(x: Any) -> bool:
    """Whether x is a number that float32 can hold; True and False are none."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return False
    return abs(x) <= torch.finfo(torch.float32).max  # False for NaN


# ------------------------------------------------------------------------------------------------ media


def media_out(media: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, str]], list[list[int]]]:
    """(files, each medium once; the numbers of those of each completion, in order).

    The completions of a prompt share its media, which are so sent once. `media` holds the records of each
    completion, as `reward.media.records` makes them; a file is {"kind", "mime", "base64" or "url"}.
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
                files.append(_file(record))
            places.append(known[key])
        of.append(places)
    return files, of


def _file(record: Mapping[str, Any]) -> dict[str, str]:
    """A record as JSON can hold it."""
    file = {name: record[name] for name in ("kind", "mime", "url") if name in record}
    if "bytes" in record:
        file["base64"] = _encoded(record["bytes"])
    return file


def media_in(files: Any, of: Any, count: int) -> list[list[dict[str, Any]]]:
    """The records of each of `count` completions; see `media_out`.

    ValueError for files that are none, and for numbers of others.
    """
    if not isinstance(files, list):
        raise ValueError(f"files: expected a list, got {type(files).__name__}")
    read = [_record(file, i) for i, file in enumerate(files)]
    found: list[list[dict[str, Any]]] = []
    for places in entries("media", of, count):
        if not isinstance(places, list):
            raise ValueError(f"media: expected a list of numbers for each completion, got {places!r:.40}")
        for at in places:
            if type(at) is not int or not 0 <= at < len(read):
                raise ValueError(f"media: expected numbers of {len(read)} files, got {at!r:.40}")
        found.append([read[at] for at in places])
    return found


def _record(file: Any, i: int) -> dict[str, Any]:
    """The record of a file. ValueError for another thing."""
    if not isinstance(file, dict) or not {"kind", "mime"} <= set(file) or not {"url", "base64"} & set(file):
        raise ValueError(
            f"files: expected objects with 'kind', 'mime' and 'base64' or 'url', got another at {i}"
        )
    record = {name: file[name] for name in ("kind", "mime", "url") if name in file}
    if "base64" in file:
        try:
            record["bytes"] = base64.b64decode(file["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError(f"files: expected base64, got another text at {i}") from None
    return record


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
