"""Puts the media of a row where its text has places for them."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_fn.data.media.medium import KINDS, Medium, columns_of

__all__ = ["for_template", "marks", "placed"]

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
