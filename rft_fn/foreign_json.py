"""JSON that a model, a server or a stranger's file holds: read up to a limit of depth."""

import json
import re
from typing import Any

# a text in quotes, also one without its end, or a bracket outside of such texts; it never goes back
_QUOTED_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}]', re.DOTALL)
_JSON = json.JSONDecoder()


def parse_json(text: str | bytes, *, depth: int = 100, decoder: json.JSONDecoder = _JSON) -> Any:
    """Return the value of JSON text that a model, a server or a stranger's file holds.

    ValueError for what is no JSON, and for brackets that nest deeper than `depth`: Python's own reader raises
    RecursionError for those, at a depth that differs from caller to caller, and so does what walks the value.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    _check_depth(text, 0, depth)
    try:
        return decoder.decode(text)
    except RecursionError:  # the caller itself is deep
        raise ValueError("brackets nest too deep to be read here") from None


def json_at(
    text: str, start: int = 0, *, depth: int = 100, decoder: json.JSONDecoder = _JSON
) -> tuple[Any, int]:
    """Return (the JSON value that begins at a place of a text, where it ends); see `parse_json`."""
    if text[start : start + 1] in ("{", "["):
        _check_depth(text, start, depth)
    try:
        return decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError("brackets nest too deep to be read here") from None


def _check_depth(text: str, start: int, depth: int) -> None:
    """Raise ValueError if the value that begins at `start` has more than `depth` brackets around a place."""
    level = 0
    for match in _QUOTED_OR_BRACKET.finditer(text, start):
        if match[0] in ("{", "["):
            level += 1
            if level > depth:
                raise ValueError(f"brackets nest deeper than {depth}")
        elif match[0] in ("}", "]"):
            level -= 1
            if level <= 0:
                return
