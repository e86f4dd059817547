"""Ranked lists: two or more responses to one prompt, from the best to the worst.

They are drawn like prompts: `data.draw(data.load(..., kind=data.LISTS), n, step, seed)`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rft_fn.data import tasks
from rft_fn.data.dataset import Dataset
from rft_fn.data.lesson import Lesson
from rft_fn.data.messages import turns_of
from rft_fn.data.recipe import make_dataset
from rft_fn.data.responses import Reading, cells_of, number, reading
from rft_fn.data.table import Endless, Row, Table
from rft_fn.data.templates import fill
from rft_fn.data.wrong_answers import task_rows, wrong_answer

__all__ = ["Ranked", "lists_from_rows", "lists_from_task"]


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
