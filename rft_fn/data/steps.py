"""Steps: a response in parts with a number for each, to learn a process reward from.

They are drawn like prompts: `data.draw(data.load(..., kind=data.STEPS), n, step, seed)`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rft_fn.data import tasks
from rft_fn.data.chat import Chat
from rft_fn.data.dataset import Dataset, make_dataset
from rft_fn.data.drawing import task_rows
from rft_fn.data.masks import Lesson, Unfit, span
from rft_fn.data.responses import Reading, cells_of, number, prompt_of_text, reading
from rft_fn.data.rows import Endless, Row, Table
from rft_fn.data.text_template import fill, is_empty
from rft_fn.data.wrong_answers import right_or_wrong

__all__ = ["NEW_LINE", "Steps", "steps_from_rows", "steps_from_task"]

NEW_LINE = "\n"
"""What separates steps where nothing else is said."""


@dataclass(frozen=True)
class Steps:
    """A prompt with a response of several steps, and whether each of them is good."""

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
    """A data set of the steps of rows, in TRL's form of stepwise supervision.

    The column `completions` holds the texts of the steps, `labels` a boolean or a number for each; with
    `shares` it has to be in [0, 1], and true is 1. The prompt is the text that `template` makes. Each step is
    encoded alone, with `separator` behind it (None is a new line), and ends at the last token of that; the
    last step ends with the end of the turn in its place. The other options, and the errors, are those of
    `pairs_from_rows`, without `messages`.
    """
    if separator is None:
        separator = NEW_LINE
    recipe = StepsRecipe(reading(tokenizer, **options), completions, labels, separator, shares)
    return make_dataset(rows, recipe, name, workers=workers)


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
    """A built-in task as an endless data set of steps.

    Each character of a response is a step, and good as long as the right answer begins like that; half of the
    responses are right, the others a `wrong_answer`. Without `separator` nothing separates the characters.
    `negatives` are the kinds of wrong answers, as in `pairs_from_task`.
    """
    how: dict[str, Any] = {"level": level, "seed": seed, "negatives": negatives}
    rows = task_rows(task, _answer_in_steps, purpose="steps", **how)
    options["separator"] = separator or ""
    return steps_from_rows(rows, tokenizer, name=f"{task}:{level}", **options)


def _answer_in_steps(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """The characters of the right answer or of a wrong one, and whether each is good."""
    text = right_or_wrong(task, row, random_, mixture)
    good = [row["answer"].startswith(text[: i + 1]) for i in range(len(text))]
    good[-1] = text == row["answer"]  # the last step ends the response
    return {"completions": list(text), "labels": good}


@dataclass(frozen=True)
class StepsRecipe:
    """How steps are made of a row; the fields are options of `steps_from_rows`."""

    what: ClassVar[str] = "row of steps"
    limit: ClassVar[str] = "max_length"

    reading: Reading
    completions: str
    labels: str
    separator: str
    shares: bool

    @property
    def most(self) -> int:
        return self.reading.max_length

    @property
    def chat(self) -> Chat:
        return self.reading.chat

    @property
    def reads(self) -> set[str]:
        """The columns that steps are made of."""
        return {self.completions, self.labels} | self.reading.reads()

    def check(self) -> None:
        """ValueError for options that no row could be used with."""
        if self.reading.messages:
            given = " ".join(self.reading.messages)
            raise ValueError(f"messages: expected none for steps, whose texts are in columns, got {given}")
        self.reading.check((), "none")
        tokenizer = self.reading.chat.tokenizer
        unknown = tokenizer.unk_token_id
        if unknown is not None and unknown in self._encode(self.separator):
            raise ValueError(
                f"separator: expected text that the tokenizer knows, got {self.separator!r}; an empty one "
                "puts nothing between steps"
            )

    def make(self, row: Row, place: str, index: int) -> Steps:
        """The steps of a row.

        Unfit for one that cannot be used, TooLong for one above max_length.
        """
        texts, labels = self._cells(row, place)
        prompt = fill(self.reading.template, row, place)
        self.reading.check_size(prompt, ["".join(texts)])
        _, ids, made = prompt_of_text(self.reading.chat, prompt, row, place, self.reading.system)
        start = len(ids)
        ends = []
        for step in self._steps(texts, place):
            ids = [*ids, *step]
            ends.append(len(ids) - 1)
        media = made.media if made is not None else None
        lesson = Lesson(ids, span(len(ids), start, len(ids)), media)
        self.reading.check_fit(place, [lesson], "response")
        return Steps(lesson, tuple(ends), labels, row, index)

    def _cells(self, row: Row, place: str) -> tuple[list[str], tuple[float, ...]]:
        """(the texts of the steps, their labels)."""
        texts = cells_of(row, self.completions, place)
        cells = cells_of(row, self.labels, place)
        if len(texts) != len(cells):
            counts = f"{len(cells)} labels of {len(texts)} steps"
            raise Unfit(place, f"expected a label for each step, got {counts}")
        for i, text in enumerate(texts, 1):
            if not isinstance(text, str) or is_empty(text):
                raise Unfit(place, f"step {i}: expected text, got {text!r:.40}")
        name = f"column {self.labels!r}"
        return texts, tuple(number(x, place, name, share=self.shares) for x in cells)

    def _steps(self, texts: Sequence[str], place: str) -> list[list[int]]:
        """Return the ids of each step, with the separator or the end of the turn behind it."""
        self.reading.chat.check_text(self.separator.join(texts), place)
        steps = [self._encode(text + self.separator) for text in texts[:-1]]
        steps.append([*self._encode(texts[-1]), *self.reading.chat.turn_end()])
        for i, step in enumerate(steps, 1):
            if not step:
                raise Unfit(place, f"step {i} has no tokens")
        return steps

    def _encode(self, text: str) -> list[int]:
        return list(self.reading.chat.tokenizer.encode(text, add_special_tokens=False))
