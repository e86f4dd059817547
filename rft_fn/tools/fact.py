"""One thing that the doctor looked at."""

from typing import Literal, NamedTuple

__all__ = ["Fact", "State"]


State = Literal["ok", "off", "note", "wrong"]
"""off: it can be added; note: something to know; wrong: a required part is missing or does not work."""


class Fact(NamedTuple):
    """A name, its value, and what to do about it."""

    name: str
    value: str
    state: State = "ok"
    remedy: str = ""
