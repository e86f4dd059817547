"""Steps: a response in parts with a number for each, to learn a process reward from.

They are drawn like prompts: `data.draw(data.load(..., kind=data.STEPS), n, step, seed)`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rft_fn import rng
from rft_fn.data import tasks
from rft_fn.data.dataset import Dataset, make_dataset
from rft_fn.data.responses import Reading, cells_of, number, prompt_of_text, reading
from rft_fn.data.rows import Endless, Row, Table
from rft_fn.data.spans import Lesson
from rft_fn.data.text_template import fill, is_empty
from rft_fn.data.unfit import Unfit
from rft_fn.data.wrong_answers import mixture_of, wrong_answer

__all__ = ["Steps", "steps_from_rows", "steps_from_task"]


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
    last step ends with the end of sequence in its place. The other options, and the errors, are those of
    `pairs_from_rows`, without `messages`.
    """
    if separator is None:
        separator = "\n"
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
    found = tasks.get_task(task)
    mixture = None
    if negatives:
        mixture = mixture_of(negatives)

    def row(index: int) -> Row:
        made = found.generate(seed, index, level)
        random_ = random.Random(rng.fold_in(seed, "steps", task, level, index))
        text = made["answer"]
        if random_.random() < 0.5:
            text = wrong_answer(found, made, random_, mixture)
        good = [made["answer"].startswith(text[: i + 1]) for i in range(len(text))]
        good[-1] = text == made["answer"]  # the last step ends the response
        return {**made, "prompt": made["short"], "completions": list(text), "labels": good}

    options["separator"] = separator or ""
    return steps_from_rows(Endless(task, row), tokenizer, name=f"{task}:{level}", **options)


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
        texts = cells_of(row, self.completions, place)
        labels = [
            number(x, place, f"column {self.labels!r}", share=self.shares)
            for x in cells_of(row, self.labels, place)
        ]
        if len(texts) != len(labels):
            raise Unfit(
                place, f"expected a label for each step, got {len(labels)} labels of {len(texts)} steps"
            )
        for i, text in enumerate(texts, 1):
            if not isinstance(text, str) or is_empty(text):
                raise Unfit(place, f"step {i}: expected text, got {text!r:.40}")

        prompt = fill(self.reading.template, row, place)
        self.reading.check_size(prompt, ["".join(texts)])
        ids, media = prompt_of_text(self.reading.chat, prompt, row, place, self.reading.system)
        steps = self._steps(texts, place)
        ends = []
        for step in steps:
            ids = [*ids, *step]
            ends.append(len(ids) - 1)
        mask = [False] * (ends[0] + 1 - len(steps[0])) + [True] * sum(map(len, steps))
        lesson = Lesson(ids, mask, media)
        self.reading.check_fit(place, [lesson], "response")
        return Steps(lesson, tuple(ends), tuple(labels), row, index)

    def _steps(self, texts: Sequence[str], place: str) -> list[list[int]]:
        """The ids of each step, with the separator or the end of sequence behind it."""
        end = self.reading.chat.tokenizer.eos_token_id
        steps = [self._encode(text + self.separator) for text in texts[:-1]]
        steps.append([*self._encode(texts[-1]), end])
        for i, step in enumerate(steps, 1):
            if not step:
                raise Unfit(place, f"step {i} has no tokens")
        return steps

    def _encode(self, text: str) -> list[int]:
        return list(self.reading.chat.tokenizer.encode(text, add_special_tokens=False))
