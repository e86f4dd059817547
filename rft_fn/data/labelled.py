"""Ranked lists, points and steps: responses with labels, to learn rewards from.

They are drawn like prompts: `data.draw(data.load(..., kind=data.LISTS), n, step, seed)`, or `data.POINTS`, or
`data.STEPS`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rft_fn.data import tasks
from rft_fn.data.dataset import Dataset
from rft_fn.data.messages import Turn, turns_of
from rft_fn.data.recipe import make_dataset
from rft_fn.data.responses import Reading, cells_of, labels_at, number, prompt_of_text, reading
from rft_fn.data.table import Endless, Row, Table
from rft_fn.data.templates import Lesson, fill, is_empty, span
from rft_fn.data.wrong_answers import right_or_wrong, task_rows, wrong_answer

__all__ = [
    "NEW_LINE", "Point", "Ranked", "Steps", "lists_from_rows", "lists_from_task", "points_from_rows",
    "points_from_task", "steps_from_rows", "steps_from_task",
]  # fmt: skip


# ---------- ranked lists: two or more responses to one prompt, from the best to the worst


_LONGEST = 5  # responses, at most, in a list of a built-in task


@dataclass(frozen=True)
class Ranked:
    """A prompt with several responses, and their ranks."""

    responses: tuple[Lesson, ...]
    ranks: tuple[int, ...]  # of each response: 0 is the best, and equally good ones have the same
    columns: Row  # the row that it was made of
    index: int  # in its data set


def lists_from_rows(
    rows: Table | Endless,
    tokenizer: Any,
    *,
    completions: str = "completions",
    ranks: str = "ranks",
    scores: str = "scores",
    workers: int = 0,
    name: str = "rows",
    **options: Any,
) -> Dataset[Ranked]:
    """Make the data set of the ranked lists of rows.

    The column `completions` holds two or more responses of text to the prompt that `template` makes. Their
    ranks are in the column `ranks`, the lowest is the best; where a row has none they come from `scores`, the
    highest is the best. Equal numbers are ties. Responses may be objects with "response" and "overall_score",
    as UltraFeedback's. With `messages` (prompt, completions) the prompt is a conversation, and each response
    a list of messages. The other options are options of `pairs_from_rows`; all responses of a list fit into a
    pack of `max_tokens` together.

    ValueError for rows that cannot be used, as from `pairs_from_rows`: also for a number of ranks other than
    that of the responses, for two responses that are the same, and for a list in which all are equally good.
    """
    read = reading(tokenizer, **options)
    read.check((2,), "the columns of the prompt and of the completions")
    make = partial(_list, read, completions=completions, ranks=ranks, scores=scores)
    recipe = read.recipe("list", make, {completions, ranks, scores})
    return make_dataset(rows, recipe, name, workers=workers)


def lists_from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    negatives: Sequence[str] = (),
    **options: Any,
) -> Dataset[Ranked]:
    """Make an endless data set of lists of a built-in task.

    A list has the right answer and one to four wrong ones, in a drawn order, and the verifier's scores of
    them as `scores`. `negatives` are the kinds of wrong answers, as in `pairs_from_task`.
    """
    rows = task_rows(task, _list_of_answers, "list", level, seed, negatives)
    return lists_from_rows(rows, tokenizer, name=f"{task}:{level}", **options)


def _list_of_answers(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """Return the right answer and one to four wrong ones, in a drawn order, with their scores."""
    texts = [row["answer"]]
    for _ in range(random_.randint(1, _LONGEST - 1)):
        text = wrong_answer(task, row, random_, mixture)
        if text not in texts:
            texts.append(text)
    random_.shuffle(texts)
    return {"completions": texts, "scores": [task.verify(text, row) for text in texts]}


def _list(
    read: Reading, row: Row, place: str, index: int, *, completions: str, ranks: str, scores: str
) -> Ranked:
    """Return the list of a row. ValueError for one that cannot be used, TooLong for one above max_length."""
    row = _opened(row, completions, scores)
    ranked = _ranks(row, ranks, scores)
    if read.messages:
        asked, answered = read.messages
        cells = cells_of(row, answered)
        prompt = turns_of(row, asked, media=True)
        turns = [turns_of({answered: cell}, answered) for cell in cells]
        lessons = read.of_turns(row, place, prompt, turns)
    else:
        texts = cells_of(row, completions)
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(
                    f"column {completions!r}: expected texts, got {type(text).__name__}; --messages prompt "
                    f"{completions} reads messages"
                )
        lessons = read.of_texts(row, place, fill(read.template, row, place), texts)
    if len(lessons) < 2 or len(lessons) != len(ranked):
        counts = f"{len(lessons)} responses and {len(ranked)} ranks"
        raise ValueError(f"expected two responses or more with a rank for each, got {counts}")
    if len({tuple(lesson.ids) for lesson in lessons}) < len(lessons):
        raise ValueError("two responses are the same")
    if len(set(ranked)) == 1:
        raise ValueError("all responses have the same rank")
    read.check_fit(lessons, "list")
    return Ranked(tuple(lessons), ranked, row, index)


def _opened(row: Row, completions: str, scores: str) -> Row:
    """Return a row with texts and scores of responses apart, which UltraFeedback has as objects."""
    cells: Any = row.get(completions)
    cells = cells.tolist() if hasattr(cells, "tolist") else cells
    if not isinstance(cells, (list, tuple)) or not all(isinstance(x, Mapping) for x in cells):
        return row
    if not cells or not all(isinstance(x.get("response"), str) for x in cells):
        return row
    found = {completions: [x["response"] for x in cells]}
    if row.get(scores) is None:
        found[scores] = [x.get("overall_score") for x in cells]
    return {**row, **found}


def _ranks(row: Row, ranks: str, scores: str) -> tuple[int, ...]:
    """Return the dense rank of each response, 0 is the best."""
    there = [name for name, cell in row.items() if cell is not None]  # a table has None in other rows
    column, sign = (ranks, 1) if ranks in there else (scores, -1)
    if column not in there:
        known = ", ".join(map(repr, there))
        raise ValueError(f"the row has neither column {ranks!r} nor {scores!r}; it has {known}")
    numbers = [sign * number(x, column) for x in cells_of(row, column)]
    order = sorted(set(numbers))
    return tuple(order.index(x) for x in numbers)


# ---------- points: a response to a prompt with a number for each head of a reward model


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


# ---------- steps: a response in parts with a number for each, to learn a process reward from


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
