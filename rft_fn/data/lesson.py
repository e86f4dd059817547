"""Which tokens of a sequence are learned: lessons, and spans of their masks."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Lesson", "cut", "runs", "shared_prefix", "span", "special_tokens"]


class Lesson(NamedTuple):
    """One sequence to learn from."""

    ids: list[int]
    mask: list[bool]  # [ids] True for the tokens that are learned
    media: Mapping[str, Tensor] | None = None  # the processor's tensors


def shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of elements that two sequences begin with in common."""
    same = 0
    for x, y in zip(a, b):
        if x != y:
            break
        same += 1
    return same


@lru_cache(8)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens, with those that were added later."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each run of ones."""
    at = 0
    for one, group in groupby(mask):
        size = len(list(group))
        if one:
            yield at, at + size
        at += size


def span(size: int, start: int, end: int) -> list[bool]:
    """Return [size] True in [start, end)."""
    return [start <= i < end for i in range(size)]


def cut(ids: Sequence[int], mask: Sequence[bool]) -> Lesson:
    """Cut off the tokens after the last learned one."""
    size = len(mask)
    while not mask[size - 1]:
        size -= 1
    return Lesson(list(ids[:size]), list(mask[:size]))
