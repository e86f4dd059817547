"""One image, audio or video of a row, and where rows hold them.

A row has them in the columns `image`, `images`, `audio`, `audios`, `video` and `videos`, or inside the parts
of a message's content.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rft_fn import check

__all__ = [
    "KINDS", "Medium", "columns_of", "for_template", "marks", "media_of_turns", "part_of", "placed",
    "shown_turns",
]  # fmt: skip


# ---------- one image, audio or video of a row, and where rows hold them


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
    """The media in the columns of a row, by kind and in their order.

    `image` holds one, `images` a list, or JSON text of a list; empty cells hold none. ValueError for a row
    with both columns of a kind.
    """
    found = {}
    for kind in KINDS:
        names = [name for name in (kind, f"{kind}s") if not _is_hole(row.get(name))]
        if len(names) > 1:
            raise ValueError(f"expected one of the columns {names[0]!r} and {names[1]!r}, got both")
        if names:
            found[kind] = _cells(kind, names[0], row[names[0]])
    return {kind: cells for kind, cells in found.items() if cells}


def _cells(kind: str, name: str, cell: Any) -> list[Any]:
    """The media of one cell. ValueError for one that is no list where a list is due."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = check.parse_json(cell)
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
    """Whether a cell holds nothing."""
    if isinstance(cell, Mapping):
        return all(x is None for x in cell.values())
    return cell is None or (isinstance(cell, (str, list, tuple)) and not len(cell))


def part_of(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """A part of content as {"type": kind}, with its source under the kind if it has one.

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
    source = given.get(kind, given.get(f"{kind}_url", given.get(f"input_{kind}")))
    if source is None:
        source = next((given[name] for name in _INNER if name in given), None)
    if source is None:
        return {"type": kind}
    return {"type": kind, kind: source}


def media_of_turns(turns: Iterable[Mapping[str, Any]]) -> list[Medium]:
    """The media in the contents of turns, in order."""
    found = []
    for turn in turns:
        if isinstance(turn["content"], str):
            continue
        found += [part[part["type"]] for part in turn["content"] if part["type"] in KINDS]
    return found


def shown_turns(turns: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Turns with the names of their media in place of these, for rewards and trajectories."""
    left = iter(names)
    shown = []
    for turn in turns:
        content = turn["content"]
        if not isinstance(content, str):
            content = [_named(part, left) for part in content]
        shown.append({**turn, "content": content})
    return shown


def _named(part: Mapping[str, Any], names: Any) -> dict[str, Any]:
    if part["type"] not in KINDS:
        return dict(part)
    return {"type": part["type"], part["type"]: next(names, part["type"])}


def label(source: Any) -> str:
    """The name that a source has by itself: that of its file; "" without one."""
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, str):
        if not source.startswith("data:"):
            return source
        head = source.partition(",")[0].split(";")
        return next((x.removeprefix("name=") for x in head if x.startswith("name=")), "")
    if isinstance(source, Mapping):
        found = (label(source[name]) for name in ("path", "url", *KINDS) if isinstance(source.get(name), str))
        return next((name for name in found if name), "")
    if isinstance(getattr(source, "filename", None), str):  # an image of PIL
        return source.filename
    return ""


# ---------- puts the media of a row where its text has places for them


Turn = dict[str, Any]

marks = re.compile("<(image|video|audio)>")
"""A place in text, as verl and others write it."""


def placed(
    turns: Sequence[Mapping[str, Any]], row: Mapping[str, Any], kinds: Collection[str], folder: Path | None
) -> list[Turn]:
    """Turns whose contents hold the media of a row, each in its place.

    A place is a mark "<image>" in the text of a turn that is not the assistant's, or a part {"type":
    "image"}. Places are filled from the columns in order, kind by kind; a part with a source needs none. A
    row without any place has its media before the text of the user's first turn. Turns without media keep
    their text.

    `kinds` are those that the model reads; marks of others are text. ValueError for media that the model
    does not read, and where the number of places is not that of the media.
    """
    cells = columns_of(row)
    parted = [_parted(turn, kinds) for turn in turns]
    found = [part for turn in parted for part in _media_parts(turn)]
    for kind in [*cells, *(part["type"] for part in found)]:
        if kind not in kinds:
            raise ValueError(_refusal(kind, kinds))

    # without any place the media come first, as TRL has it
    if cells and not found:
        _put_first(parted, cells)
        found = [part for turn in parted for part in _media_parts(turn)]

    # each place takes the next one of its kind
    places = Counter(part["type"] for part in found if part["type"] not in part)
    for kind in KINDS:
        have = len(cells.get(kind, ()))
        if places[kind] != have:
            raise ValueError(f"expected as many places as {kind}s, got {places[kind]} and {have}")
    left = {kind: iter(x) for kind, x in cells.items()}
    for part in found:
        kind = part["type"]
        if kind not in part:
            part[kind] = next(left[kind])
        part[kind] = Medium(kind, part[kind], folder)
    return parted


def _refusal(kind: str, kinds: Collection[str]) -> str:
    *more, last = ["text", *(f"{known}s" for known in KINDS if known in kinds)]
    reads = last
    if more:
        reads = f"{', '.join(more)} and {last}"
    return f"the row has {kind}s, and the model reads {reads} alone: take a model for {kind}s, or other rows"


def _media_parts(turn: Turn) -> list[dict[str, Any]]:
    """The parts of a turn that are media."""
    if isinstance(turn["content"], str):
        return []
    return [part for part in turn["content"] if part["type"] in KINDS]


def _parted(turn: Mapping[str, Any], kinds: Collection[str]) -> Turn:
    """A copy of a turn; its content is a list of parts where it has places."""
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
    """Text as parts, cut at its marks."""
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


def for_template(turn: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    """A turn as a chat template reads it, with media as bare places.

    Templates of processors mostly read lists of parts only, so that text becomes one.
    """
    content = turn["content"]
    if isinstance(content, str):
        if "'type'" not in template.replace('"', "'"):
            return turn
        return {**turn, "content": [{"type": "text", "text": content}]}
    bare = []
    for part in content:
        if part["type"] in KINDS:
            part = {"type": part["type"]}
        bare.append(part)
    return {**turn, "content": bare}
