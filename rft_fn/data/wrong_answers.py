"""Wrong answers to built-in problems, as the rejected responses of pairs."""

import random

from rft_fn.data import tasks

__all__ = ["wrong_answer"]


def wrong_answer(task: tasks.Task, row: tasks.TaskRow, random_: random.Random) -> str:
    """An answer that is not right.

    Half the time it is a guess, else the right one with one mistake. A preference teaches only by the
    responses that it shows: a policy may learn to emit any text that no rejected response resembles. So
    mistakes are of several kinds, and some are no longer of the answer's form.
    """
    while True:
        if random_.random() < 0.5:
            text = task.guess(random_, row)
        else:
            mistake = random_.choice(_MISTAKES)
            text = mistake(row["answer"], random_)
        if text and task.verify(text, row) < 1:
            return text


def _change(text: str, random_: random.Random) -> str:
    """The text with one character replaced by another."""
    at = random_.randrange(len(text))
    return text[:at] + random_.choice(tasks.ALPHABET) + text[at + 1 :]


def _lose(text: str, random_: random.Random) -> str:
    """The text without one of its characters."""
    at = random_.randrange(len(text))
    return text[:at] + text[at + 1 :]


def _repeat(text: str, random_: random.Random) -> str:
    """The text with one of its characters doubled."""
    at = random_.randrange(len(text))
    return text[: at + 1] + text[at:]


def _swap(text: str, random_: random.Random) -> str:
    """The text with two neighbouring characters swapped."""
    at = random_.randrange(len(text))
    return text[:at] + text[at : at + 2][::-1] + text[at + 2 :]


_MISTAKES = (_change, _lose, _repeat, _swap)
