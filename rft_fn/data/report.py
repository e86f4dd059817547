"""What is wrong with rows, in one line: the first of them by their places, and how many there are."""

from typing import Any

__all__ = ["First", "TooLong", "unfit_line"]

_SHOWN = 3  # rows that an error or a warning names


class TooLong(Exception):
    """A prompt above max_prompt: what it has."""


class First:
    """The first few of many, and how many there are."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[Any] = []

    def add(self, x: Any) -> None:
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(x)

    def more(self) -> str:
        """What stands behind the ones that are shown."""
        hidden = self.count - len(self.shown)
        return f"; and {hidden} more" if hidden else ""


def unfit_line(unfit: First, total: int) -> str:
    """The first rows that cannot be used, those with the same reason together, and how many there are."""
    reasons: dict[str, list[str]] = {}
    for place, reason in unfit.shown:
        reasons.setdefault(reason, []).append(place)
    shown = "; ".join(f"{_together(places)}: {reason}" for reason, places in reasons.items())
    return f"data: {shown}{unfit.more()}. {unfit.count} of {total} rows cannot be used: mend or remove them"


def _together(places: list[str]) -> str:
    """Places of one file in short: FILE, lines 1, 2."""
    heads, numbers = zip(*(place.rsplit(" ", 1) for place in places))
    if len(places) == 1 or len(set(heads)) > 1:
        return " and ".join(places)
    return f"{heads[0]}s {', '.join(numbers)}"
