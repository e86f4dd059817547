"""Rows that cannot be used: the first few of them, and one line about all."""

from collections.abc import Iterable
from typing import Any

from rft_fn.data.table import Part, Table

__all__ = ["FirstFew", "TooLong", "check_window", "invalid_line"]


_SHOWN = 3  # rows that an error or a warning names


class TooLong(Exception):
    """A prompt or a pair above its limit. The text is its length, as "600 tokens"."""


def check_window(count: int, max_new: int, window: int | None, *, limit: str = "max_prompt") -> None:
    """Raise ValueError unless the model's window holds `count` tokens and `max_new` after them.

    None is no limit; `limit` is the option that leaves long rows out. Tokens of images, audio and videos are
    counted as they are widened.
    """
    if window is None or count + max_new <= window:
        return
    if max_new:
        size = f"{count} + {max_new} tokens with max_new, those of media among them"
        remedy = f"lower max_new, or {limit} to leave it out"
    else:
        size = f"{count} tokens, those of media among them"
        remedy = f"shorten it, or lower {limit}"
    raise ValueError(f"the row has {size}, above the model's window of {window}; {remedy}")


class FirstFew:
    """The first few of many things, and the count of all."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[Any] = []

    def add(self, x: Any) -> None:
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(x)

    def join(self, count: int, shown: Iterable[Any]) -> None:
        """Add `count` things of which these are the first few."""
        self.count += count
        self.shown = [*self.shown, *shown][:_SHOWN]

    def more(self) -> str:
        """Return the count of the others as the end of a line: "; and 4 more"."""
        hidden = self.count - len(self.shown)
        return f"; and {hidden} more" if hidden else ""


def invalid_line(invalid: FirstFew, rows: "Table") -> str:
    """Return the error for invalid rows: the first ones by reason, and their count."""
    total = len(rows)
    part = f" (a part of {rows.whole} rows)" if isinstance(rows, Part) else ""
    reasons: dict[str, list[str]] = {}
    for place, reason in invalid.shown:
        reasons.setdefault(reason, []).append(place)
    shown = "; ".join(f"{_join_places(places)}: {reason}" for reason, places in reasons.items())
    more = invalid.more()
    return f"data: {shown}{more}. {invalid.count} of {total} rows cannot be used{part}: mend or remove them"


def _join_places(places: list[str]) -> str:
    """Join several places to one text, such as "FILE, lines 1, 2"."""
    heads, numbers = zip(*(place.rsplit(" ", 1) for place in places))
    if len(places) == 1 or len(set(heads)) > 1:
        return " and ".join(places)
    return f"{heads[0]}s {', '.join(numbers)}"
