"""Rows that cannot be used: the errors, and one line that names the first of them and counts all."""

from typing import Any

__all__ = ["FirstFew", "TooLong", "Unfit", "unfit_line"]

_SHOWN = 3  # rows that an error or a warning names


class Unfit(ValueError):
    """A row that cannot be used, with its place and the reason."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"data: {place}: {reason}")
        self.place = place
        self.reason = reason


class TooLong(Exception):
    """A prompt or a pair above its limit; the text is its length, as "600 tokens"."""


class FirstFew:
    """The first few of many things, and the count of all."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[Any] = []

    def add(self, x: Any) -> None:
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(x)

    def more(self) -> str:
        """The end of a line that lists the shown ones: "; and 4 more", or nothing."""
        hidden = self.count - len(self.shown)
        if not hidden:
            return ""
        return f"; and {hidden} more"


def unfit_line(unfit: FirstFew, total: int) -> str:
    """The error for unfit rows: the first ones, grouped by reason, and the count of all."""
    reasons: dict[str, list[str]] = {}
    for place, reason in unfit.shown:
        reasons.setdefault(reason, []).append(place)
    shown = "; ".join(f"{_join_places(places)}: {reason}" for reason, places in reasons.items())
    return f"data: {shown}{unfit.more()}. {unfit.count} of {total} rows cannot be used: mend or remove them"


def _join_places(places: list[str]) -> str:
    """Several places in one text; those of one file are shortened to "FILE, lines 1, 2"."""
    heads, numbers = zip(*(place.rsplit(" ", 1) for place in places))
    if len(places) == 1 or len(set(heads)) > 1:
        return " and ".join(places)
    return f"{heads[0]}s {', '.join(numbers)}"
