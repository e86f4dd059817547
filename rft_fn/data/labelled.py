"""Ranked lists, points and steps: responses with labels, to learn rewards from."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rft_fn.data import tasks
from rft_fn.data.chat import Chat
from rft_fn.data.dataset import Dataset
from rft_fn.data.masks import Lesson, span
from rft_fn.data.messages import Turn, turns_of
from rft_fn.data.recipe import make_dataset
from rft_fn.data.responses import Reading, cells_of, labels_at, number, prompt_of_text, reading
from rft_fn.data.rows import Endless, Row, Table, Unfit
from rft_fn.data.text_template import fill, is_empty
from rft_fn.data.wrong_answers import right_or_wrong, task_rows, wrong_answer

__all__ = [
    "NEW_LINE", "Point", "Ranked", "Steps", "lists_from_rows", "lists_from_task", "points_from_rows",
    "points_from_task", "steps_from_rows", "steps_from_task",
]  # fmt: skip


# ---------- ranked lists: two or more responses to one prompt, from the best to the worst


# ---------- ranked lists: two or more responses to one prompt, from the best to the worst


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


# ---------- steps: a response in parts with a number for each, to learn a process reward from


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
