"""Points: responses with a number for each head of a reward model.

They are drawn like prompts: `data.draw(data.load(..., kind=data.POINTS), n, step, seed)`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rft_fn.data import tasks
from rft_fn.data.dataset import Dataset
from rft_fn.data.lesson import Lesson
from rft_fn.data.messages import Turn, turns_of
from rft_fn.data.recipe import make_dataset
from rft_fn.data.responses import Reading, labels_at, reading
from rft_fn.data.table import Endless, Row, Table
from rft_fn.data.templates import fill
from rft_fn.data.wrong_answers import right_or_wrong, task_rows

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
    """Make the data set of the points of rows.

    `completion` makes the response to the prompt that `template` makes. `labels` are the columns of numbers,
    one for each head; with `shares` each must be in [0, 1], and true is 1. With `messages` the columns of
    that name hold conversations: (prompt, completion), or one that ends with the response. The other options,
    and the errors, are as in `pairs_from_rows`.
    """
    read = reading(tokenizer, **options)
    if not labels:
        raise ValueError("labels: expected at least one column, got none")
    read.check(
        (1, 2), "the columns of prompt and completion, or one conversation that ends with the response"
    )
    make = partial(_point, read, completion=completion, labels=tuple(labels), shares=shares)
    return make_dataset(rows, read.recipe("point", make, labels, completion), name, workers=workers)


def points_from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    negatives: Sequence[str] = (),
    **options: Any,
) -> Dataset[Point]:
    """Make an endless data set of points of a built-in task.

    Half of the responses are right, the others a `wrong_answer`; `score` is the verifier's, and `label`, if
    it is among the labels, is whether the response is the right one. `negatives` are the kinds of wrong
    answers, as in `pairs_from_task`.
    """
    answer = _labelled_answer if "label" in options.get("labels", ()) else _one_answer
    rows = task_rows(task, answer, "point", level, seed, negatives)
    return points_from_rows(rows, tokenizer, name=f"{task}:{level}", **options)


def _one_answer(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """Return the right answer or a wrong one, with its score."""
    text = right_or_wrong(task, row, random_, mixture)
    return {"completion": text, "score": task.verify(text, row)}


def _labelled_answer(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """Return the right answer or a wrong one, with its score and whether it is right."""
    answer = _one_answer(task, row, random_, mixture)
    return {**answer, "label": answer["score"] == 1}


def _point(
    read: Reading,
    row: Row,
    place: str,
    index: int,
    *,
    completion: str,
    labels: Sequence[str],
    shares: bool,
) -> Point:
    """Return the point of a row. ValueError for one that cannot be used, TooLong for one above max_length."""
    numbers = labels_at(row, labels, share=shares)
    if read.messages:
        prompt, response = _prompt_and_response(read.messages, row)
        lessons = read.of_turns(row, place, prompt, [response])
    else:
        text = fill(completion, row, place)
        lessons = read.of_texts(row, place, fill(read.template, row, place), [text])
    read.check_fit(lessons, "response")
    return Point(lessons[0], numbers, row, index)


def _prompt_and_response(messages: Sequence[str], row: Row) -> tuple[list[Turn], list[Turn]]:
    """Return (prompt, response) of a row of messages; in one column the response is the last turns."""
    columns = [turns_of(row, name, media=True) for name in messages]
    if len(columns) == 2:
        return columns[0], columns[1]
    (turns,) = columns
    start = len(turns)
    while start and turns[start - 1]["role"] in ("assistant", "tool"):
        start -= 1
    if start in (0, len(turns)):
        raise ValueError("expected a conversation that ends with the assistant's response to a prompt")
    return turns[:start], turns[start:]
