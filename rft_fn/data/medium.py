"""One image, audio or video of a row: where rows hold it, and how it is read.

A row has them in the columns `image`, `images`, `audio`, `audios`, `video` and `videos`, or inside the parts
of a message's content.
"""

import base64
import binascii
import hashlib
import os
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rft_fn.foreign_json import parse_json

__all__ = [
    "KINDS", "Content", "Medium", "columns_of", "digest", "for_template", "label", "marks", "media_of_turns",
    "name_of", "part_of", "placed", "read", "shown_turns",
]  # fmt: skip


KINDS = ("image", "video", "audio")
"""The kinds of media, in the order in which those without a place are put before the text."""

_INNER = ("url", "path", "data", "base64", "bytes")  # where a part of content may hold its source


class Medium(NamedTuple):
    """One image, audio or video, not yet read."""

    kind: str  # of KINDS
    source: Any  # a path, bytes, an array ..., as the row holds it
    folder: Path | None = None  # what a relative path begins from; None for a source without files

    def __repr__(self) -> str:
        return f"<{self.kind} {label(self.source) or type(self.source).__name__}>"


def columns_of(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the media in the columns of a row, by kind and in their order.

    `image` holds one, `images` a list, or JSON text of a list; empty cells hold none. ValueError for a row
    with both columns of a kind.
    """
    media = {}
    for kind in KINDS:
        names = [name for name in (kind, f"{kind}s") if not _is_hole(row.get(name))]
        if len(names) > 1:
            raise ValueError(f"expected one of the columns {names[0]!r} and {names[1]!r}, got both")
        if names:
            media[kind] = _cells(kind, names[0], row[names[0]])
    return {kind: cells for kind, cells in media.items() if cells}


def _cells(kind: str, name: str, cell: Any) -> list[Any]:
    """Return the media of one cell. ValueError for one that is no list where a list is due."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = parse_json(cell)
        except ValueError:
            raise ValueError(f"column {name!r}: expected JSON text of a list, got {cell!r:.40}") from None
    if name == kind:
        if kind != "video" and isinstance(cell, (list, tuple)) and len(cell) == 1:
            return list(cell)
        return [cell]
    if isinstance(cell, np.ndarray) and cell.dtype == object:  # a list of a table
        cell = cell.tolist()
    if not isinstance(cell, (list, tuple)):
        raise ValueError(f"column {name!r}: expected a list, got {type(cell).__name__}; one is {kind!r}")
    for i, x in enumerate(cell, 1):
        if _is_hole(x):
            raise ValueError(f"column {name!r}: {kind} {i} is empty")
    return list(cell)


def _is_hole(cell: Any) -> bool:
    """Return whether a cell holds nothing."""
    if isinstance(cell, Mapping):
        return all(x is None for x in cell.values())
    return cell is None or (isinstance(cell, (str, list, tuple)) and not len(cell))


def part_of(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a part of content as {"type": kind}, with its source under the kind if it has one.

    These forms are read: {"type": "image"}, {"type": "image", "image": x} (or "url", "path", "base64"),
    {"type": "image_url", "image_url": {"url": x}} and {"type": "input_audio", "input_audio": {"data": x}}.
    None for a part that is no medium.
    """
    given = {name: x for name, x in part.items() if x is not None}
    named = given.get("type")
    if named is None:
        named = next((kind for kind in KINDS if kind in given or f"{kind}_url" in given), "")
    kind = str(named).removeprefix("input_").removesuffix("_url")
    if kind not in KINDS:
        return None
    for name in (kind, f"{kind}_url", f"input_{kind}", *_INNER):
        if name in given:
            return {"type": kind, kind: given[name]}
    return {"type": kind}


def media_of_turns(turns: Iterable[Mapping[str, Any]]) -> list[Medium]:
    """Return the media in the contents of turns, in order."""
    media = []
    for turn in turns:
        if isinstance(turn["content"], str):
            continue
        media += [part[part["type"]] for part in turn["content"] if part["type"] in KINDS]
    return media


def shown_turns(turns: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return turns with the names of their media in place of these, for rewards and trajectories."""
    left = iter(names)
    shown = []
    for turn in turns:
        content = turn["content"]
        if not isinstance(content, str):
            content = [
                {**part, part["type"]: next(left, part["type"])} if part["type"] in KINDS else dict(part)
                for part in content
            ]
        shown.append({**turn, "content": content})
    return shown


def label(source: Any) -> str:
    """Return the name that a source has by itself: that of its file; "" without one."""
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, str):
        if not source.startswith("data:"):
            return source
        head = source.partition(",")[0].split(";")
        return next((x.removeprefix("name=") for x in head if x.startswith("name=")), "")
    if isinstance(source, Mapping):
        names = (label(source[name]) for name in ("path", "url", *KINDS) if isinstance(source.get(name), str))
        return next((name for name in names if name), "")
    filename = getattr(source, "filename", None)  # of an image of PIL
    return filename if isinstance(filename, str) else ""


# ---------- puts the media of a row where its text has places for them


Turn = dict[str, Any]

marks = re.compile("<(image|video|audio)>")
"""A place in text, as verl and others write it."""


def placed(
    turns: Sequence[Mapping[str, Any]], row: Mapping[str, Any], kinds: Collection[str], folder: Path | None
) -> list[Turn]:
    """Put the media of a row into the contents of turns, each in its place.

    A place is a mark "<image>" in the text of a turn that is not the assistant's, or a part {"type":
    "image"}. Places are filled from the columns in order, kind by kind; a part with a source needs none. A
    row without any place has its media before the text of the user's first turn. Turns without media keep
    their text.

    `kinds` are those that the model reads; marks of others are text. ValueError for media that the model
    does not read, and where the number of places is not that of the media.
    """
    cells = columns_of(row)
    parted = [_parted(turn, kinds) for turn in turns]
    parts = [part for turn in parted for part in _media_parts(turn)]
    for kind in [*cells, *(part["type"] for part in parts)]:
        if kind not in kinds:
            *more, last = ["text", *(f"{known}s" for known in KINDS if known in kinds)]
            reads = f"{', '.join(more)} and {last}" if more else last
            raise ValueError(
                f"the row has {kind}s, and the model reads {reads} alone: take a model for {kind}s, or other "
                "rows"
            )

    # without any place the media come first, as TRL has it
    if cells and not parts:
        _put_first(parted, cells)
        parts = [part for turn in parted for part in _media_parts(turn)]

    # each place takes the next one of its kind
    places = Counter(part["type"] for part in parts if part["type"] not in part)
    for kind in KINDS:
        have = len(cells.get(kind, ()))
        if places[kind] != have:
            raise ValueError(f"expected as many places as {kind}s, got {places[kind]} and {have}")
    left = {kind: iter(x) for kind, x in cells.items()}
    for part in parts:
        kind = part["type"]
        if kind not in part:
            part[kind] = next(left[kind])
        part[kind] = Medium(kind, part[kind], folder)
    return parted


def _media_parts(turn: Turn) -> list[dict[str, Any]]:
    """Return the parts of a turn that are media."""
    if isinstance(turn["content"], str):
        return []
    return [part for part in turn["content"] if part["type"] in KINDS]


def _parted(turn: Mapping[str, Any], kinds: Collection[str]) -> Turn:
    """Return a copy of a turn; its content is a list of parts where it has places."""
    content = turn["content"]
    if isinstance(content, str):
        parts = _split(content, turn["role"], kinds)
    else:
        parts = []
        for part in content:
            if part["type"] == "text":
                parts += _split(part["text"], turn["role"], kinds)
            else:
                parts.append(dict(part))
    if any(part["type"] in KINDS for part in parts):
        return {**turn, "content": parts}
    return {**turn, "content": "".join(part["text"] for part in parts)}


def _split(text: str, role: str, kinds: Collection[str]) -> list[dict[str, Any]]:
    """Cut text at its marks into parts."""
    if role == "assistant":
        return [{"type": "text", "text": text}]
    parts: list[dict[str, Any]] = []
    at = 0
    for mark in marks.finditer(text):
        if mark[1] not in kinds:
            continue
        if mark.start() > at:
            parts.append({"type": "text", "text": text[at : mark.start()]})
        parts.append({"type": mark[1]})
        at = mark.end()
    if at < len(text) or not parts:
        parts.append({"type": "text", "text": text[at:]})
    return parts


def _put_first(turns: list[Turn], cells: Mapping[str, Sequence[Any]]) -> None:
    """Put places for all media before the text of the user's first turn."""
    user = next((turn for turn in turns if turn["role"] == "user"), None)
    if user is None:
        raise ValueError("the row has media, and no user's turn to put them into")
    places = [{"type": kind} for kind in KINDS for _ in cells.get(kind, ())]
    user["content"] = [*places, {"type": "text", "text": user["content"]}]


def for_template(turn: Mapping[str, Any], *, as_parts: bool) -> dict[str, Any]:
    """Return a turn as a chat template reads it: media as bare places, text as a part if it must be."""
    content = turn["content"]
    if isinstance(content, str):
        return {**turn, "content": [{"type": "text", "text": content}] if as_parts else content}
    bare = [{"type": part["type"]} if part["type"] in KINDS else part for part in content]
    return {**turn, "content": bare}


# ---------- the content of a medium, as a file or a row stores it, and its digest


Content = Any
"""Bytes of a file, an array, an image of PIL, (array, rate) of an audio, or a list of contents of frames."""

_SECONDS = 30  # that a URL may take
_MOST = 1 << 28  # bytes of a file or a URL


def read(medium: Medium, *, urls: bool = False) -> Content:
    """Return the content of a medium, not yet decoded.

    Relative paths begin from the folder of the medium, and all must stay inside of it. A URL is fetched only
    with `urls`. ValueError for a source that is none, for a path outside, and for a file that is missing,
    empty or larger than 256 MiB.
    """
    return _read(medium.source, medium.kind, medium.folder, urls)


def _read(source: Any, kind: str, folder: Path | None, urls: bool) -> Content:
    if isinstance(source, (str, Path)):
        return _bytes_named(str(source), folder, urls)
    if isinstance(source, Mapping):
        return _mapped(source, kind, folder, urls)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _filled(bytes(source), "it")
    if kind == "video" and isinstance(source, (list, tuple)):
        return [_read(frame, "image", folder, urls) for frame in source]
    if hasattr(source, "convert"):  # an image of PIL
        return source
    if hasattr(source, "detach"):
        return source.detach().cpu().numpy()
    if isinstance(source, (list, tuple)):
        return _array(source)
    if isinstance(source, np.ndarray):
        return source
    raise ValueError(f"expected a path, bytes or an array, got {type(source).__name__}")


def _mapped(source: Mapping[str, Any], kind: str, folder: Path | None, urls: bool) -> Content:
    """Return the content of an object, such as {"bytes", "path"} or {"array", "sampling_rate"}."""
    given = {name: x for name, x in source.items() if x is not None}
    if "bytes" in given:
        return _read(given["bytes"], kind, folder, urls)
    if "array" in given:
        if "sampling_rate" not in given:
            raise ValueError("expected 'sampling_rate' beside 'array', got none")
        return _array(given["array"]), _rate(given["sampling_rate"])
    for name in ("path", "url", kind):
        if name in given:
            return _read(given[name], kind, folder, urls)
    for name in ("data", "base64"):
        if name in given:
            return _decoded(given[name])
    known = ", ".join(map(repr, source))
    raise ValueError(f"expected an object with 'bytes' or 'path', got one with {known or 'nothing'}")


def _rate(x: Any) -> int:
    try:
        if int(x) == float(x):
            return int(x)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"expected 'sampling_rate' as a whole number of Hz, got {x!r:.40}")


def _array(x: Any) -> np.ndarray:
    try:
        return np.asarray(x, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("expected an array of numbers, got a list of other things") from None


def _bytes_named(text: str, folder: Path | None, urls: bool) -> bytes:
    """Return the bytes that a text names: a data URI, a URL or a path."""
    if text.startswith("data:"):
        return _decoded(text.partition(",")[2])
    if text.startswith(("http://", "https://")):
        if not urls:
            raise ValueError(f"{text} is a URL, which is not fetched without --media-urls")
        return _fetched(text)
    return _file(_inside(text.removeprefix("file://"), folder))


def _decoded(text: Any) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise ValueError(f"expected base64, got {type(text).__name__}")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected base64, got {error}") from None
    return _filled(content, "it")


def _inside(text: str, folder: Path | None) -> Path:
    """Return the path that a text names, without links. ValueError for one outside of the folder."""
    if folder is None:
        raise ValueError(f"{text} is a path, and the rows come from no folder: give --media-folder")
    if "\0" in text:
        raise ValueError(f"expected a path, got {text!r:.80}")
    base = os.path.abspath(folder)
    named = os.path.abspath(os.path.join(base, os.path.expanduser(text)))
    target = os.path.realpath(named)
    if os.path.commonpath([base, named]) != base:
        raise ValueError(f"{text} is outside of the data's folder {base}: --media-folder names another")
    if os.path.commonpath([os.path.realpath(base), target]) != os.path.realpath(base):
        raise ValueError(
            f"{text} is a link to {target}, outside of the data's folder {base}: --media-folder names another"
        )
    return Path(target)


def _file(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MOST:
            raise ValueError(f"{path} has {size} bytes, above {_MOST}")
        return _filled(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def _fetched(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as response:
            content = response.read(_MOST + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ValueError(f"{url} could not be fetched: {getattr(error, 'reason', error)}") from None
    if len(content) > _MOST:
        raise ValueError(f"{url} has more than {_MOST} bytes")
    return _filled(content, url)


def _filled(content: bytes, what: str) -> bytes:
    if not content:
        raise ValueError(f"{what} is empty, 0 bytes")
    return content


def digest(content: Content) -> str:
    """Return a hash of a content: equal bytes or numbers have equal ones."""
    hashed = hashlib.blake2b(digest_size=16)
    _add(hashed, content)
    return hashed.hexdigest()


def _add(hashed: Any, content: Content) -> None:
    if isinstance(content, bytes):
        hashed.update(content)
    elif isinstance(content, (list, tuple)):
        for x in content:
            hashed.update(digest(x).encode())
    elif isinstance(content, np.ndarray):
        hashed.update(f"{content.dtype} {content.shape}".encode())
        hashed.update(np.ascontiguousarray(content).tobytes())
    elif hasattr(content, "tobytes"):  # an image of PIL
        hashed.update(f"{content.mode} {content.size}".encode())
        hashed.update(content.tobytes())
    else:
        hashed.update(repr(content).encode())


def name_of(medium: Medium, content: Content) -> str:
    """Return a name for a medium: its file, URL or given name, else its kind and the begin of its digest."""
    return label(medium.source) or f"{medium.kind}-{digest(content)[:12]}"
