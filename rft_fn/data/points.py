"""Points: a response to a prompt with a number for each head of a reward model.

A point is drawn like a prompt: `data.draw(data.load(..., kind=data.POINTS), n, step, seed)`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rft_fn.data import tasks
from rft_fn.data.chat import Chat
from rft_fn.data.dataset import Dataset, make_dataset
from rft_fn.data.drawing import task_rows
from rft_fn.data.messages import Turn, turns_of
from rft_fn.data.responses import Reading, labels_at, reading
from rft_fn.data.rows import Endless, Row, Table
from rft_fn.data.spans import Lesson
from rft_fn.data.text_template import fill
from rft_fn.data.unfit import Unfit
from rft_fn.data.wrong_answers import right_or_wrong

__all__ = ["Point", "points_from_rows", "points_from_task"]


@dataclass(frozen=True)
class Point:
    """A prompt with a response, and what each head shall say of it."""

    response: Lesson
    labels: tuple[float, ...]  # one for each head
    columns: Row  # the row that it was made of
    index: int  # in its data set


def points_from_rows(
    rows: Table | Endless,
    tokenizer: Any,
    *,
    completion: str = "{completion}",
    labels: Sequence[str] = ("score",),
    shares: bool = False,
    workers: int = 0,
    name: str = "rows",
    **options: Any,
) -> Dataset[Point]:
    """A data set of the points of rows.

    `completion` makes the response to the prompt that `template` makes. `labels` are the columns of numbers,
    one for each head; with `shares` each has to be in [0, 1], and true is 1. With `messages` the columns of
    that name hold conversations: (prompt, completion), or one that ends with the response. The other options,
    and the errors, are those of `pairs_from_rows`.
    """
    recipe = PointRecipe(reading(tokenizer, **options), completion, tuple(labels), shares)
    return make_dataset(rows, recipe, name, workers=workers)


def points_from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    negatives: Sequence[str] = (),
    **options: Any,
) -> Dataset[Point]:
    """A built-in task as an endless data set of points.

    Half of the responses are right, the others a `wrong_answer`; `score` is the verifier's. `negatives` are
    the kinds of wrong answers, as in `pairs_from_task`.
    """
    how: dict[str, Any] = {"level": level, "seed": seed, "negatives": negatives}
    rows = task_rows(task, _one_answer, purpose="point", **how)
    return points_from_rows(rows, tokenizer, name=f"{task}:{level}", **options)


def _one_answer(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """The right answer or a wrong one, with its score."""
    text = right_or_wrong(task, row, random_, mixture)
    score = task.verify(text, row)
    return {"completion": text, "score": score}


@dataclass(frozen=True)
class PointRecipe:
    """How a point is made of a row; the fields are options of `points_from_rows`."""

    what: ClassVar[str] = "point"
    limit: ClassVar[str] = "max_length"

    reading: Reading
    completion: str
    labels: Sequence[str]
    shares: bool

    @property
    def most(self) -> int:
        return self.reading.max_length

    @property
    def chat(self) -> Chat:
        return self.reading.chat

    @property
    def reads(self) -> set[str]:
        """The columns that a point is made of."""
        return {*self.labels} | self.reading.reads(self.completion)

    def check(self) -> None:
        """ValueError for options that no row could be used with."""
        if not self.labels:
            raise ValueError("labels: expected at least one column, got none")
        what = "the columns of prompt and completion, or one conversation that ends with the response"
        self.reading.check((1, 2), what)

    def make(self, row: Row, place: str, index: int) -> Point:
        """The point of a row.

        Unfit for one that cannot be used, TooLong for one above max_length.
        """
        labels = labels_at(row, self.labels, place, share=self.shares)
        if self.reading.messages:
            try:
                prompt, response = self._turns(row)
            except ValueError as error:
                raise Unfit(place, str(error)) from None
            found = self.reading.of_turns(row, place, prompt, [response])
        else:
            found = self.reading.of_texts(row, place, [fill(self.completion, row, place)])
        self.reading.check_fit(place, found, "response")
        return Point(found[0], labels, row, index)

    def _turns(self, row: Row) -> tuple[list[Turn], list[Turn]]:
        """(prompt, response) of a row of messages; of one column the response is the turns at its end."""
        columns = [turns_of(row, name, media=True) for name in self.reading.messages]
        if len(columns) == 2:
            return columns[0], columns[1]
        (turns,) = columns
        start = len(turns)
        while start and turns[start - 1]["role"] in ("assistant", "tool"):
            start -= 1
        if start in (0, len(turns)):
            raise ValueError("expected a conversation that ends with the assistant's response to a prompt")
        return turns[:start], turns[start:]
