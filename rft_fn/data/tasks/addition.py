"""Addition of two numbers."""

import random

from rft_fn.data.tasks.task import Task, TaskRow, exact, row_random

__all__ = ["ADDITION"]


def _addition(seed: int, index: int, level: int) -> dict[str, str]:
    """The sum of two numbers, both uniform in [0, 10**level)."""
    random_ = row_random("addition", seed, index, level)
    a = random_.randrange(10**level)
    b = random_.randrange(10**level)
    return {
        "question": f"What is {a} + {b}?",
        "short": f"{a}+{b}=",
        "answer": str(a + b),
        "level": str(level),
    }


def _addition_chance(level: int) -> float:
    """1 / (2 10**level - 1), by a guesser uniform over the possible sums.

    The best constant answer, 10**level - 1, scores 10**-level: a curve that stops there ignores the question.
    """
    return 1 / (2 * 10**level - 1)


def _addition_guess(random_: random.Random, row: TaskRow) -> str:
    return str(random_.randrange(2 * 10 ** int(row["level"]) - 1))


ADDITION = Task("addition", _addition, exact, _addition_chance, _addition_guess)
