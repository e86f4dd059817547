"""Counting a letter in a string."""

import random
import string

from rft_fn.data.tasks.task import Task, TaskRow, exact, random_word, row_random

__all__ = ["LETTER_COUNT"]


def _letter_count(seed: int, index: int, level: int) -> dict[str, str]:
    """The count of a letter in a string of 2 level + 4 letters.

    It is uniform in [0, level + 2]. The count is drawn first and the string is built around it, so that no
    constant answer does better than chance.
    """
    random_ = row_random("letter_count", seed, index, level)
    letter = random_.choice(string.ascii_lowercase)
    count = random_.randrange(level + 3)

    # that many of the letter, the rest from the other letters, in a random order
    others = string.ascii_lowercase.replace(letter, "")
    letters = [letter] * count
    letters += random_word(random_, others, 2 * level + 4 - count)
    random_.shuffle(letters)
    word = "".join(letters)
    question = f'How many times does the letter "{letter}" occur in "{word}"?'
    return {
        "question": question,
        "short": f"count:{letter},{word}=",
        "answer": str(count),
        "level": str(level),
    }


def _letter_count_chance(level: int) -> float:
    """1 / (level + 3): the guesser is uniform over the possible counts.

    A constant count scores the same.
    """
    return 1 / (level + 3)


def _letter_count_guess(random_: random.Random, row: TaskRow) -> str:
    return str(random_.randrange(int(row["level"]) + 3))


LETTER_COUNT = Task("letter_count", _letter_count, exact, _letter_count_chance, _letter_count_guess)
