"""Ranked lists: two or more responses to one prompt, from the best to the worst.

A list is drawn like a prompt: `data.draw(data.load(..., kind=data.LISTS), n, step, seed)`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rft_fn.data import tasks
from rft_fn.data.chat import Chat
from rft_fn.data.dataset import Dataset, make_dataset
from rft_fn.data.drawing import task_rows
from rft_fn.data.messages import turns_of
from rft_fn.data.responses import Reading, cells_of, number, reading
from rft_fn.data.rows import Endless, Row, Table
from rft_fn.data.spans import Lesson
from rft_fn.data.unfit import Unfit
from rft_fn.data.wrong_answers import wrong_answer

__all__ = ["Ranked", "lists_from_rows", "lists_from_task"]

_LONGEST = 5  # responses, at most, in a list of a built-in task


@dataclass(frozen=True)
class Ranked:
    """A prompt with each of its responses, and their ranks."""

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
    """A data set of the ranked lists of rows.

    The column `completions` holds two or more responses of text to the prompt that `template` makes. Their
    ranks are in the column `ranks`, the lowest is the best; where a row has none they come from `scores`, the
    highest is the best. Equal numbers are ties. With `messages` (prompt, completions) the prompt is a
    conversation, and each response a list of messages. The other options are those of `pairs_from_rows`; all
    responses of a list have to fit into a pack of `max_tokens` together.

    ValueError for rows that cannot be used, as from `pairs_from_rows`: also for a number of ranks other than
    that of the responses, for two responses that are the same, and for a list in which all are equally good.
    """
    recipe = ListRecipe(reading(tokenizer, **options), completions, ranks, scores)
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
    """A built-in task as an endless data set of lists.

    A list has the right answer and one to four wrong ones, in a drawn order, and the verifier's scores of
    them as `scores`. `negatives` are the kinds of wrong answers, as in `pairs_from_task`.
    """
    how: dict[str, Any] = {"level": level, "seed": seed, "negatives": negatives}
    rows = task_rows(task, _list_of_answers, purpose="list", **how)
    return lists_from_rows(rows, tokenizer, name=f"{task}:{level}", **options)


def _list_of_answers(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """The right answer and one to four wrong ones, in a drawn order, with their scores."""
    texts = [row["answer"]]
    for _ in range(random_.randint(1, _LONGEST - 1)):
        text = wrong_answer(task, row, random_, mixture)
        if text not in texts:
            texts.append(text)
    random_.shuffle(texts)
    scores = [task.verify(text, row) for text in texts]
    return {"completions": texts, "scores": scores}


@dataclass(frozen=True)
class ListRecipe:
    """How a list is made of a row; the fields are options of `lists_from_rows`."""

    what: ClassVar[str] = "list"
    limit: ClassVar[str] = "max_length"

    reading: Reading
    completions: str
    ranks: str
    scores: str

    @property
    def most(self) -> int:
        return self.reading.max_length

    @property
    def chat(self) -> Chat:
        return self.reading.chat

    @property
    def reads(self) -> set[str]:
        """The columns that a list is made of."""
        return {self.completions, self.ranks, self.scores} | self.reading.reads()

    def check(self) -> None:
        """ValueError for options that no row could be used with."""
        self.reading.check((2,), "the columns of the prompt and of the completions")

    def make(self, row: Row, place: str, index: int) -> Ranked:
        """The list of a row.

        Unfit for one that cannot be used, TooLong for one above max_length.
        """
        ranks = self._ranks(row, place)
        found = self._responses(row, place)
        if len(found) < 2 or len(found) != len(ranks):
            counts = f"{len(found)} responses and {len(ranks)} ranks"
            raise Unfit(place, f"expected two responses or more with a rank for each, got {counts}")
        if len({tuple(lesson.ids) for lesson in found}) < len(found):
            raise Unfit(place, "two responses are the same")
        if len(set(ranks)) == 1:
            raise Unfit(place, "all responses have the same rank")
        self.reading.check_fit(place, found, "list")
        return Ranked(tuple(found), ranks, row, index)

    def _responses(self, row: Row, place: str) -> list[Lesson]:
        """The responses of a row, text or messages."""
        if not self.reading.messages:
            texts = cells_of(row, self.completions, place)
            for text in texts:
                if not isinstance(text, str):
                    reason = f"column {self.completions!r}: expected texts, got {type(text).__name__}"
                    raise Unfit(place, f"{reason}; --messages prompt {self.completions} reads messages")
            return self.reading.of_texts(row, place, texts)
        asked, answered = self.reading.messages
        cells = cells_of(row, answered, place)
        try:
            prompt = turns_of(row, asked, media=True)
            responses = [turns_of({answered: cell}, answered) for cell in cells]
        except ValueError as error:
            raise Unfit(place, str(error)) from None
        return self.reading.of_turns(row, place, prompt, responses)

    def _ranks(self, row: Row, place: str) -> tuple[int, ...]:
        """The rank of each response: how many different numbers are better than its own."""
        there = [name for name, cell in row.items() if cell is not None]  # a table has None in other rows
        column, sign = self.ranks, 1
        if self.ranks not in there:
            column, sign = self.scores, -1
        if column not in there:
            known = ", ".join(map(repr, there))
            raise Unfit(
                place, f"the row has neither column {self.ranks!r} nor {self.scores!r}; it has {known}"
            )
        cells = cells_of(row, column, place)
        found = [sign * number(x, place, f"column {column!r}") for x in cells]
        order = sorted(set(found))
        return tuple(order.index(x) for x in found)
