"""The record of a task, and functions that several tasks share."""

import random
import string
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from rft_fn import rng

__all__ = ["ALPHABET", "Generate", "Task", "TaskRow", "exact", "random_word", "row_random"]

ALPHABET = string.digits + string.ascii_lowercase + "+-*/()=,:"
"""Every character of `short` and `answer`, in all tasks: the vocabulary of a character-level model."""
_HARDEST = 1000  # the digits of a number at this level; Python prints no more than 4300

TaskRow = Mapping[str, str]
"""A problem: `question`, `short`, `answer`, `level`, and whatever else the verifier reads."""


class Generate(Protocol):
    """Makes the problems of a task."""

    def __call__(self, seed: int, index: int, level: int, /) -> dict[str, str]:
        """The problem of these three numbers.

        ValueError for a level outside of [1, 1000].
        """
        ...


class Verify(Protocol):
    """Scores an answer."""

    def __call__(self, text: str, row: TaskRow, /) -> float:
        """A score in [0, 1], 1 for a right answer.

        It never raises, whatever the text is. As a reward, `row` has the columns of `generate` except those
        of the question: `question`, `short`, `level` and media.
        """
        ...


class Chance(Protocol):
    """Tells how well guessing does."""

    def __call__(self, level: int, /) -> float:
        """The expected score of `guess` at a level."""
        ...


class Guess(Protocol):
    """Answers without solving the problem."""

    def __call__(self, random_: random.Random, row: TaskRow, /) -> str:
        """An answer of the right format, drawn from `random_`."""
        ...


class Task(NamedTuple):
    """One family of problems, as plain functions."""

    name: str
    generate: Generate
    verify: Verify
    chance: Chance
    guess: Guess


def row_random(name: str, seed: int, index: int, level: int) -> random.Random:
    """The random generator of one row.

    Raises ValueError for a level outside of [1, 1000].
    """
    if not 1 <= level <= _HARDEST:
        raise ValueError(f"level: expected an integer in [1, {_HARDEST}], got {level}")
    return random.Random(rng.fold_in(seed, name, level, index))


def random_word(random_: random.Random, symbols: str, length: int) -> str:
    """`length` symbols, independent and uniform."""
    return "".join(random_.choice(symbols) for _ in range(length))


def exact(text: str, row: TaskRow) -> float:
    """1 if the answer is the row's, character by character; else 0."""
    return float(text.strip() == row["answer"])
