"""Strings to be written anew, scored position by position: reverse and sort_digits."""

import functools
import operator
import random
import string

from rft_fn.data.tasks.task import Generate, Task, TaskRow, random_word, row_random

__all__ = ["REVERSE", "SORT_DIGITS"]


def _aligned(text: str, row: TaskRow) -> float:
    """1 if exact, else half the share of right positions, in [0, 0.5].

    A position is right if it holds the right character. The share is of the longer of the two strings, so
    that neither padding nor truncation pays. Partial credit gives the samples of a group different scores
    long before one of them is exact, as a group-relative advantage needs it; the factor of a half keeps a gap
    above "all but one", so that the last character is worth more than any other.
    """
    text = text.strip()
    answer = row["answer"]
    if text == answer:
        return 1.0
    right = sum(map(operator.eq, text, answer))
    return 0.5 * right / max(len(text), len(answer))


def _aligned_chance(symbols: str, level: int) -> float:
    """0.5 / V + 0.5 V**-n, for n = level + 2.

    The guesser draws n symbols, independent and uniform over V.
    """
    return 0.5 / len(symbols) + 0.5 * float(len(symbols)) ** -(level + 2)


def _aligned_guess(symbols: str, random_: random.Random, row: TaskRow) -> str:
    return random_word(random_, symbols, int(row["level"]) + 2)


def _reverse(seed: int, index: int, level: int) -> dict[str, str]:
    """A string of level + 2 lower-case letters, to be written backwards.

    Partial credit: see `_aligned`.
    """
    word = random_word(row_random("reverse", seed, index, level), string.ascii_lowercase, level + 2)
    question = f'Write the string "{word}" backwards, character by character.'
    return {"question": question, "short": f"reverse:{word}=", "answer": word[::-1], "level": str(level)}


def _sort_digits(seed: int, index: int, level: int) -> dict[str, str]:
    """A string of level + 2 digits, to be sorted in ascending order.

    Partial credit: see `_aligned`.
    """
    digits = random_word(row_random("sort_digits", seed, index, level), string.digits, level + 2)
    question = (
        f"Sort the digits of {digits} in ascending order. Keep repeated digits and write no separators."
    )
    return {
        "question": question,
        "short": f"sort:{digits}=",
        "answer": "".join(sorted(digits)),
        "level": str(level),
    }


def _aligned_task(name: str, generate: Generate, symbols: str) -> Task:
    """A task whose answer is level + 2 symbols, scored by position."""
    chance = functools.partial(_aligned_chance, symbols)
    guess = functools.partial(_aligned_guess, symbols)
    return Task(name, generate, _aligned, chance, guess)


REVERSE = _aligned_task("reverse", _reverse, string.ascii_lowercase)
SORT_DIGITS = _aligned_task("sort_digits", _sort_digits, string.digits)
