"""Responses in steps with a number for each, to learn a process reward model.

They are drawn like prompts: `data.draw(data.load(..., kind=data.STEPS), n, step, seed)`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rft_fn.data import tasks
from rft_fn.data.dataset import Dataset
from rft_fn.data.lesson import Lesson, span
from rft_fn.data.recipe import make_dataset
from rft_fn.data.responses import Reading, cells_of, number, prompt_of_text, reading
from rft_fn.data.table import Endless, Row, Table
from rft_fn.data.templates import fill, is_empty
from rft_fn.data.wrong_answers import right_or_wrong, task_rows

__all__ = ["NEW_LINE", "Steps", "steps_from_rows", "steps_from_task"]


NEW_LINE = "\n"
"""What separates steps where nothing else is said."""


@dataclass(frozen=True)
class Steps:
    """A prompt with a response of several steps, and which of them are good."""

    response: Lesson
    ends: tuple[int, ...]  # the position of the last token of each step
    labels: tuple[float, ...]  # one for each step
    columns: Row  # the row that it was made of
    index: int  # in its data set


def steps_from_rows(
    rows: Table | Endless,
    tokenizer: Any,
    *,
    completions: str = "completions",
    labels: str = "labels",
    separator: str | None = None,
    shares: bool = False,
    workers: int = 0,
    name: str = "rows",
    **options: Any,
) -> Dataset[Steps]:
    """Make the data set of the steps of rows, in TRL's form of stepwise supervision.

    The column `completions` holds the texts of the steps, `labels` a boolean or a number for each; with
    `shares` it must be in [0, 1], and true is 1. The prompt is the text that `template` makes. Each step is
    encoded by itself, with `separator` after it (None is a new line), and ends at the last token of that; the
    last step ends with the end of the turn in its place. The other options, and the errors, are as in
    `pairs_from_rows`, without `messages`.
    """
    read = reading(tokenizer, **options)
    separator = NEW_LINE if separator is None else separator
    if read.messages:
        given = " ".join(read.messages)
        raise ValueError(f"messages: expected none for steps, whose texts are in columns, got {given}")
    read.check((), "none")
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in tokenizer.encode(separator, add_special_tokens=False):
        raise ValueError(
            f"separator: expected text that the tokenizer knows, got {separator!r}; an empty one "
            "puts nothing between steps"
        )
    make = partial(_steps, read, completions=completions, labels=labels, separator=separator, shares=shares)
    return make_dataset(rows, read.recipe("row of steps", make, {completions, labels}), name, workers=workers)


def steps_from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    negatives: Sequence[str] = (),
    separator: str | None = None,
    **options: Any,
) -> Dataset[Steps]:
    """Make an endless data set of steps of a built-in task.

    Each character of a response is a step, and good as long as the right answer begins like that; half of the
    responses are right, the others a `wrong_answer`. Without `separator` nothing separates the characters.
    `negatives` are the kinds of wrong answers, as in `pairs_from_task`.
    """
    rows = task_rows(task, _answer_in_steps, "steps", level, seed, negatives)
    return steps_from_rows(rows, tokenizer, separator=separator or "", name=f"{task}:{level}", **options)


def _answer_in_steps(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """Return the characters of the right answer or of a wrong one, and whether each is good."""
    text = right_or_wrong(task, row, random_, mixture)
    good = [row["answer"].startswith(text[: i + 1]) for i in range(len(text))]
    good[-1] = text == row["answer"]  # the last step ends the response
    return {"completions": list(text), "labels": good}


def _steps(
    read: Reading,
    row: Row,
    place: str,
    index: int,
    *,
    completions: str,
    labels: str,
    separator: str,
    shares: bool,
) -> Steps:
    """Return the steps of a row. ValueError for one that cannot be used, TooLong for one above max_length."""
    texts = cells_of(row, completions)
    cells = cells_of(row, labels)
    if len(texts) != len(cells):
        raise ValueError(f"expected a label for each step, got {len(cells)} labels of {len(texts)} steps")
    for i, text in enumerate(texts, 1):
        if not isinstance(text, str) or is_empty(text):
            raise ValueError(f"step {i}: expected text, got {text!r:.40}")
    numbers = tuple(number(x, labels, share=shares) for x in cells)
    prompt = fill(read.template, row, place)
    read.check_texts(prompt, ["".join(texts)])
    _, ids, encoded = prompt_of_text(read.chat, prompt, row, place, read.system)

    # the prompt, then each step with the separator or the end of the turn
    read.chat.check_text(separator.join(texts))
    start = len(ids)
    ends = []
    for i, text in enumerate(texts, 1):
        last = i == len(texts)
        step = read.chat.tokenizer.encode(text if last else text + separator, add_special_tokens=False)
        step = [*step, *read.chat.turn_end()] if last else step
        if not step:
            raise ValueError(f"step {i} has no tokens")
        ids = [*ids, *step]
        ends.append(len(ids) - 1)
    media = encoded.media if encoded is not None else None
    lesson = Lesson(ids, span(len(ids), start, len(ids)), media)
    read.check_fit([lesson], "response")
    return Steps(lesson, tuple(ends), numbers, row, index)
