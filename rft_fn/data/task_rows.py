"""Rows of built-in tasks with responses to learn from, right ones and wrong ones."""

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from rft_fn import rng
from rft_fn.data import tasks
from rft_fn.data.rows import Endless, Row
from rft_fn.data.wrong_answers import mixture_of

__all__ = ["Answer", "task_rows"]


class Answer(Protocol):
    """Makes the responses to one problem."""

    def __call__(
        self,
        task: tasks.Task,
        row: tasks.TaskRow,
        random_: random.Random,
        mixture: Mapping[str, float] | None,
        /,
    ) -> Row:
        """The columns of a row beside those of the task. `mixture` is that of `wrong_answer`."""
        ...


def task_rows(
    task: str, answer: Answer, *, purpose: str, level: int, seed: int, negatives: Sequence[str]
) -> Endless:
    """The rows of a built-in task without end, with the terse question as `prompt` and those of `answer`.

    All is drawn by (seed, purpose, task, level, index). `negatives` are the kinds of wrong answers, as
    `mixture_of` reads them; none is the usual mixture. ValueError for a task or a kind that does not exist.
    """
    found = tasks.get_task(task)
    mixture = None
    if negatives:
        mixture = mixture_of(negatives)

    def row(index: int) -> Row:
        made = found.generate(seed, index, level)
        random_ = random.Random(rng.fold_in(seed, purpose, task, level, index))
        return {**made, "prompt": made["short"], **answer(found, made, random_, mixture)}

    return Endless(task, row, seed)
