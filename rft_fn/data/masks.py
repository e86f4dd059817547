"""Which tokens of a sequence are learned: lessons, and spans of their masks."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "FirstFew", "Lesson", "TooLong", "Unfit", "check_window", "cut", "runs", "shared_prefix", "span",
    "special_tokens", "unfit_line",
]  # fmt: skip


# ---------- which tokens of a sequence are learned: lessons, and spans of their masks


class Lesson(NamedTuple):
    """One sequence to learn from."""

    ids: list[int]
    mask: list[bool]  # [ids] True for the tokens that are learned
    media: Mapping[str, Tensor] | None = None  # the processor's tensors


def shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of elements that two sequences begin with in common."""
    same = 0
    for x, y in zip(a, b):
        if x != y:
            break
        same += 1
    return same


@lru_cache(8)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The special tokens, those that were added later among them."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of ones."""
    at = 0
    for one, group in groupby(mask):
        size = len(list(group))
        if one:
            yield at, at + size
        at += size


def span(size: int, start: int, end: int) -> list[bool]:
    """[size] True in [start, end)."""
    return [start <= i < end for i in range(size)]


def cut(ids: Sequence[int], mask: Sequence[bool]) -> Lesson:
    """A lesson without the tokens behind the last learned one."""
    size = len(mask)
    while not mask[size - 1]:
        size -= 1
    return Lesson(list(ids[:size]), list(mask[:size]))


# ---------- rows that cannot be used: errors for them, and one line about all


_SHOWN = 3  # rows that an error or a warning names


class Unfit(ValueError):
    """A row that cannot be used, with its place and the reason."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"data: {place}: {reason}")
        self.place = place
        self.reason = reason

    def __reduce__(self):
        return Unfit, (self.place, self.reason)


class TooLong(Exception):
    """A prompt or a pair above its limit.

    The text is its length, as "600 tokens".
    """


def check_window(
    place: str, count: int, max_new: int, window: int | None, *, limit: str = "max_prompt"
) -> None:
    """Unfit for a row of `count` tokens, and `max_new` after them, that the model's window does not hold.

    None is no limit; `limit` is the option that leaves long rows out. Tokens of images, audio and videos are
    counted as they are widened.
    """
    if window is None or count + max_new <= window:
        return
    size = f"{count} tokens, those of media among them"
    remedy = f"shorten it, or lower {limit}"
    if max_new:
        size = f"{count} + {max_new} tokens with max_new, those of media among them"
        remedy = f"lower max_new, or {limit} to leave it out"
    raise Unfit(place, f"the row has {size}, above the model's window of {window}; {remedy}")


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
        """The count of the others as the end of a line: "; and 4 more"."""
        hidden = self.count - len(self.shown)
        if not hidden:
            return ""
        return f"; and {hidden} more"


def unfit_line(unfit: FirstFew, total: int) -> str:
    """The error for unfit rows: the first ones by reason, and their count."""
    reasons: dict[str, list[str]] = {}
    for place, reason in unfit.shown:
        reasons.setdefault(reason, []).append(place)
    shown = "; ".join(f"{_join_places(places)}: {reason}" for reason, places in reasons.items())
    return f"data: {shown}{unfit.more()}. {unfit.count} of {total} rows cannot be used: mend or remove them"


def _join_places(places: list[str]) -> str:
    """Several places as one text, such as "FILE, lines 1, 2"."""
    heads, numbers = zip(*(place.rsplit(" ", 1) for place in places))
    if len(places) == 1 or len(set(heads)) > 1:
        return " and ".join(places)
    return f"{heads[0]}s {', '.join(numbers)}"
