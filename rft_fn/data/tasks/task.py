"""The record of a task, and functions that several tasks share."""

import random
import string
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rft_fn import rng

__all__ = ["ALPHABET", "Generate", "Task", "TaskRow", "exact", "random_word", "row_random"]


ALPHABET = string.digits + string.ascii_lowercase + "+-*/()=,:"
"""Every character of `short` and `answer`, in all tasks: the vocabulary of a character-level model."""
_HARDEST = 1000  # the digits of a number at this level; Python prints no more than 4300

TaskRow = Mapping[str, str]
"""A problem: `question`, `short`, `answer`, `level`, and whatever else the verifier reads."""


Generate = Callable[[int, int, int], dict[str, str]]
"""(seed, index, level) -> the problem of these numbers; ValueError for a level outside of [1, 1000]."""


class Task(NamedTuple):
    """One family of problems, as plain functions.

    `verify` never raises, whatever the text is. As a reward it gets the columns of `generate` without the
    question: no `question`, `short`, `level` or media.
    """

    name: str
    generate: Generate
    verify: Callable[[str, TaskRow], float]  # (text, row) -> a score in [0, 1], 1 for a right answer
    chance: Callable[[int], float]  # level -> the expected score of `guess`
    guess: Callable[[random.Random, TaskRow], str]  # an answer of the right format, drawn


def row_random(name: str, seed: int, index: int, level: int) -> random.Random:
    """Return the random generator of one row. Raises ValueError for a level outside of [1, 1000]."""
    if not 1 <= level <= _HARDEST:
        raise ValueError(f"level: expected an integer in [1, {_HARDEST}], got {level}")
    return random.Random(rng.fold_in(seed, name, level, index))


def random_word(random_: random.Random, symbols: str, length: int) -> str:
    """Draw `length` symbols, independent and uniform."""
    return "".join(random_.choice(symbols) for _ in range(length))


def exact(text: str, row: TaskRow) -> float:
    """Return 1 if the answer is the row's, character by character; else 0."""
    return float(text.strip() == row["answer"])
