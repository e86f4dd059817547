"""Preference pairs: a chosen and a rejected response to one prompt.

A pair is drawn like a prompt: `data.draw(data.load(..., kind=data.PAIRS), n, step, seed)`.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rft_fn.data import tasks
from rft_fn.data.chat import Chat
from rft_fn.data.dataset import Dataset
from rft_fn.data.masks import Lesson, shared_prefix
from rft_fn.data.medium import columns_of
from rft_fn.data.messages import Turn, are_messages, opened, system_of, tools_of, turns_of
from rft_fn.data.processing import Processing
from rft_fn.data.recipe import make_dataset
from rft_fn.data.responses import answer_of_text, labels_at, number, prompt_of_text, response_of_turns
from rft_fn.data.rows import Endless, Row, Table, TooLong, Unfit, check_window
from rft_fn.data.text_template import columns_in, fill, is_empty, prompt_ids
from rft_fn.data.wrong_answers import task_rows, wrong_answer_of_kind

__all__ = ["Pair", "pairs_from_rows", "pairs_from_task", "shared_start"]


@dataclass(frozen=True)
class Pair:
    """A prompt with a chosen and with a rejected response, which are learned."""

    chosen: Lesson
    rejected: Lesson
    columns: Row  # the row that it was made of
    index: int  # in its data set
    margin: float = 0.0  # by which the chosen response shall be better, at least
    preferences: tuple[float, ...] = (1.0,)  # of each head: above 0 for the chosen, below 0 for the rejected


def pairs_from_rows(
    rows: Table | Endless,
    tokenizer: Any,
    *,
    template: str = "{prompt}",
    chosen: str = "{chosen}",
    rejected: str = "{rejected}",
    system: str | None = None,
    max_length: int = 512,
    max_tokens: int | None = None,
    messages: Sequence[str] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    processing: Processing | None = None,
    window: int | None = None,
    margin: str = "",
    preferences: Sequence[str] = (),
    unfinished: str = "",
    workers: int = 0,
    name: str = "rows",
) -> Dataset[Pair]:
    """A data set of the pairs of rows.

    `template`, `chosen` and `rejected` make their texts of a row's columns. With an empty template chosen and
    rejected are whole texts, and the prompt is the words that both begin with. With `messages` the columns of
    that name hold conversations: (prompt, chosen, rejected), or (chosen, rejected) where both begin with the
    turns of the prompt; the response is the assistant's turns behind them, by the tokenizer's chat template,
    which gets `chat_template_kwargs` and the row's `tools`.

    `margin` names a column of numbers, by which the chosen response is better at least; rows without it have
    0. `preferences` names columns of numbers above 0 where the chosen response is the better one in that
    respect, below 0 where the rejected one is, and 0 where neither is: one for each head of a reward model.
    `unfinished` names a column that is true where the rejected response of text was cut off, and gets no end
    of sequence.

    Every row is looked at now: the columns must be there and hold something, the responses must differ, and
    both, each with the prompt, must fit into a pack of `max_tokens`, and each into `window`, the most tokens
    that the model reads. Pairs with more than `max_length` tokens
    in prompt and response are left out, with one warning.

    ValueError for no rows, with the count and the places of the first rows that cannot be used, or when no
    pair fits.
    """
    recipe = PairRecipe(
        chat=Chat(tokenizer, chat_template_kwargs or {}, processing),
        template=template,
        chosen=chosen,
        rejected=rejected,
        system=system,
        max_length=max_length,
        max_tokens=max_tokens,
        messages=messages,
        window=window,
        margin=margin,
        preferences=preferences,
        unfinished=unfinished,
    )
    return make_dataset(rows, recipe, name, workers=workers)


def pairs_from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    negatives: Sequence[str] = (),
    **options: Any,
) -> Dataset[Pair]:
    """A built-in task as an endless data set of pairs.

    The options are those of `pairs_from_rows`. Its rows have the columns of the task, and `prompt`, the terse
    form of the question, `chosen`, the right answer, and `rejected`, a `wrong_answer` drawn by seed and
    index, of the kind in `negative`. `negatives` are these kinds, each NAME or NAME=SHARE of
    `wrong_answers.NEGATIVES`: without them those that a policy is likely to emit, `wrong_answers.COVERING`
    for all that it may.

    ValueError for a task, a level or a kind that does not exist, and, when it is drawn, for a pair that
    cannot be used.
    """
    how: dict[str, Any] = {"level": level, "seed": seed, "negatives": negatives}
    rows = task_rows(task, _both_answers, purpose="rejected", **how)
    options = {"unfinished": "unfinished", **options}
    return pairs_from_rows(rows, tokenizer, name=f"{task}:{level}", **options)


def _both_answers(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """The right answer and a wrong one, and which kind of mistake that is."""
    rejected, kind = wrong_answer_of_kind(task, row, random_, mixture)
    sides = {"chosen": row["answer"], "rejected": rejected, "unfinished": kind == "cut"}
    return {**sides, "negative": kind}


@dataclass(frozen=True)
class PairRecipe:
    """How a pair is made of a row, and its limits.

    The fields are options of `pairs_from_rows`.
    """

    what: ClassVar[str] = "pair"
    limit: ClassVar[str] = "max_length"

    chat: Chat
    template: str
    chosen: str
    rejected: str
    system: str | None
    max_length: int
    max_tokens: int | None
    messages: Sequence[str]
    window: int | None = None
    margin: str = ""
    preferences: Sequence[str] = ()
    unfinished: str = ""

    @property
    def most(self) -> int:
        return self.max_length

    @cached_property
    def widest(self) -> int:
        """The characters of the longest token.

        A text above `widest` times a limit is not tokenised.
        """
        return self.chat.longest_token()

    @property
    def reads(self) -> set[str]:
        """The columns that a pair is made of."""
        read = {self.margin, self.unfinished, *self.preferences}
        if self.messages:
            return read | self.chat.reads(self.messages)
        return read | self.chat.reads(()) | columns_in(self.template, self.chosen, self.rejected)

    def check(self) -> None:
        """ValueError for options that no row could be used with."""
        if self.messages and len(self.messages) not in (2, 3):
            raise ValueError(
                "messages: expected the columns of prompt, chosen and rejected, or chosen and rejected where "
                f"these begin with the prompt, got {', '.join(self.messages)}"
            )
        self.chat.check(messages=self.messages)

    def make(self, row: Row, place: str, index: int) -> Pair:
        """The pair of a row.

        Unfit for one that cannot be used, TooLong for one above max_length.
        """
        if self.messages:
            chosen, rejected = self._of_messages(row, place)
        else:
            chosen, rejected = self._of_text(row, place)
        if chosen[:2] == rejected[:2]:
            raise Unfit(place, "the chosen and the rejected response are the same")

        # each side has its own limit, and both together have to fit into one pack
        longest = max(len(chosen.ids), len(rejected.ids))
        if longest > self.max_length:
            raise TooLong(f"{longest} tokens")
        check_window(place, longest, 0, self.window, limit="max_length")
        inputs = len(chosen.ids) + len(rejected.ids) - 2  # the last token of each is only a target
        if self.max_tokens is not None and inputs > self.max_tokens:
            raise Unfit(
                place, f"the pair has {inputs} tokens, above {self.max_tokens}: a pack holds both sides"
            )
        margin, preferences = self._labels(row, place)
        return Pair(chosen, rejected, row, index, margin, preferences)

    def _labels(self, row: Row, place: str) -> tuple[float, tuple[float, ...]]:
        """(the margin, the preference of each head)."""
        margin = 0.0
        if self.margin and row.get(self.margin) is not None:  # a table has None where a row has no number
            margin = number(row[self.margin], place, f"column {self.margin!r}")
        if not self.preferences:
            return margin, (1.0,)
        found = labels_at(row, self.preferences, place)
        if not any(found):
            raise Unfit(place, f"columns {', '.join(self.preferences)}: neither response is preferred in any")
        return margin, found

    # ------------------------------------------------------------------------------------------ rows of text

    def _of_text(self, row: Row, place: str) -> tuple[Lesson, Lesson]:
        """Both sides of a row of text."""
        self._refuse_messages(row, place)
        with_media = self.chat.processing is not None and columns_of(row)
        if with_media and not self.template:
            raise Unfit(place, "the row has media, for which the empty template has no place")
        prompt, chosen, rejected = self._texts(row, place)
        _refuse_empty(place, {"chosen response": chosen, "rejected response": rejected})

        # a text that could not fit whatever its tokens are is not tokenised
        size = len(prompt) + max(len(chosen), len(rejected))
        if size > self.max_length * self.widest:
            raise TooLong(f"{size} characters")

        # the prompt of whole texts is no turn of a chat
        if self.template:
            turns, ids, made = prompt_of_text(self.chat, prompt, row, place, self.system)
            chosen_side = answer_of_text(self.chat, turns, ids, chosen, made, place)
            rejected_side = answer_of_text(self.chat, turns, ids, rejected, made, place)
        else:
            self.chat.check_text(f"{prompt}{chosen}{rejected}", place)
            ids = prompt_ids(self.chat.tokenizer, prompt)
            end = [self.chat.tokenizer.eos_token_id]
            chosen_side = self.chat.verbatim(ids, chosen, end=end)
            rejected_side = self.chat.verbatim(ids, rejected, end=end)
        if self.unfinished and row.get(self.unfinished):
            rejected_side = rejected_side._replace(ids=rejected_side.ids[:-1], mask=rejected_side.mask[:-1])
        return chosen_side, rejected_side

    def _refuse_messages(self, row: Row, place: str) -> None:
        """Raise Unfit for messages in the columns of TRL's names.

        The error has the option to use.
        """
        found = [name for name in ("prompt", "chosen", "rejected") if name in row and are_messages(row[name])]
        if {"chosen", "rejected"} <= set(found):
            raise Unfit(place, f"{found[-1]!r} holds messages: --messages {' '.join(found)}")

    def _texts(self, row: Row, place: str) -> tuple[str, str, str]:
        """(prompt, chosen, rejected)."""
        chosen = fill(self.chosen, row, place)
        rejected = fill(self.rejected, row, place)
        if not self.template:
            texts = shared_start(chosen, rejected)
            if is_empty(texts[0]):
                raise Unfit(place, "the template is empty, and both responses begin with no word in common")
            return texts
        try:
            return fill(self.template, row, place), chosen, rejected
        except Unfit as error:
            if "no column" not in error.reason:
                raise
            remedy = "--template '' where both responses begin with the prompt"
            raise Unfit(place, f"{error.reason}; {remedy}") from None

    # -------------------------------------------------------------------------------------- rows of messages

    def _of_messages(self, row: Row, place: str) -> tuple[Lesson, Lesson]:
        """Both sides of a row of messages."""
        try:
            prompt, chosen, rejected = self._turns(row)
            prompt = self.chat.placed(prompt, row, place)
            tools = tools_of(row)
            return (
                response_of_turns(self.chat, prompt, chosen, tools, "all", "the chosen"),
                response_of_turns(self.chat, prompt, rejected, tools, "all", "the rejected"),
            )
        except ValueError as error:
            raise Unfit(place, str(error)) from None

    def _turns(self, row: Row) -> tuple[list[Turn], list[Turn], list[Turn]]:
        """(prompt, chosen, rejected) of a row of messages.

        Of two columns the prompt is the turns that both begin with.
        """
        columns = [turns_of(row, name, media=True) for name in self.messages]
        if len(columns) == 3:
            prompt, chosen, rejected = columns
            return opened(prompt, system_of(row, prompt, self.system)), chosen, rejected

        chosen, rejected = columns
        if chosen == rejected:
            raise ValueError("the chosen and the rejected response are the same")
        same = shared_prefix(chosen, rejected)
        if same == 0:
            raise ValueError(
                f"columns {self.messages[0]!r} and {self.messages[1]!r} begin with different turns: expected "
                "the prompt in both, or its column named before them"
            )
        prompt = opened(chosen[:same], system_of(row, chosen, self.system))
        return prompt, chosen[same:], rejected[same:]


def _refuse_empty(place: str, texts: Mapping[str, str]) -> None:
    """Raise Unfit for the first text that is empty, by its name."""
    for name, text in texts.items():
        if is_empty(text):
            raise Unfit(place, f"the {name} is empty")


def shared_start(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two whole texts.

    The prompt is the words that both begin with. Each response keeps at least its last word, and the space
    before its first.
    """
    same = shared_prefix(chosen, rejected)

    # a word that both have begun, or that ends one of them, belongs to the responses
    prompt = re.sub(r"\s*\S*$", "", chosen[:same])
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
