"""Responses to the prompt of a row as sequences: what pairs, lists, points and steps have in common."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rft_fn.data.chat import Chat
from rft_fn.data.masks import Lesson
from rft_fn.data.medium import media_of_turns
from rft_fn.data.messages import Conversation, Turn, opened, system_of, tools_of
from rft_fn.data.processing import Encoded, Processing
from rft_fn.data.rows import Row, TooLong, Unfit, check_window
from rft_fn.data.text_template import columns_in, fill, is_empty, render

__all__ = [
    "Reading", "answer_of_text", "cells_of", "labels_at", "number", "prompt_of_text", "reading",
    "response_of_turns",
]  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How the prompt of a row and its responses become sequences, and their limits.

    The fields are options of `reading`.
    """

    chat: Chat
    template: str
    system: str | None
    messages: Sequence[str]
    max_length: int
    max_tokens: int | None
    window: int | None

    @cached_property
    def widest(self) -> int:
        """The characters of the longest token.

        A text above `widest` times a limit is not tokenised.
        """
        return self.chat.longest_token()

    def reads(self, *templates: str) -> set[str]:
        """Return the columns that a prompt is made of, and those that more templates name."""
        if self.messages:
            return self.chat.reads(self.messages)
        return self.chat.reads(()) | columns_in(self.template, *templates)

    def check(self, counts: Sequence[int], what: str) -> None:
        """ValueError for options that no row could be used with.

        `counts` are the possible numbers of columns of messages, `what` tells which columns are expected.
        """
        if self.messages and len(self.messages) not in counts:
            raise ValueError(f"messages: expected {what}, got {', '.join(self.messages)}")
        self.chat.check(messages=self.messages)

    def of_texts(self, row: Row, place: str, texts: Sequence[str]) -> list[Lesson]:
        """The prompt of the template with each of these responses. Unfit for an empty one."""
        prompt = fill(self.template, row, place)
        for text in texts:
            if is_empty(text):
                raise Unfit(place, "a response is empty")
        self.check_size(prompt, texts)
        turns, ids, made = prompt_of_text(self.chat, prompt, row, place, self.system)
        return [answer_of_text(self.chat, turns, ids, text, made, place) for text in texts]

    def of_turns(
        self, row: Row, place: str, prompt: list[Turn], responses: Sequence[list[Turn]]
    ) -> list[Lesson]:
        """The turns of the prompt with those of each response behind them. Unfit for turns out of place."""
        try:
            opening = opened(prompt, system_of(row, prompt, self.system))
            placed = self.chat.placed(opening, row, place)
            tools = tools_of(row)
            return [response_of_turns(self.chat, placed, turns, tools, "last", "the") for turns in responses]
        except ValueError as error:
            raise Unfit(place, str(error)) from None

    def check_size(self, prompt: str, texts: Sequence[str]) -> None:
        """TooLong for a text that could not fit, however many characters its tokens have."""
        size = len(prompt) + max(map(len, texts))
        if size > self.max_length * self.widest:
            raise TooLong(f"{size} characters")

    def check_fit(self, place: str, found: Sequence[Lesson], what: str) -> None:
        """TooLong or Unfit for sequences above a limit.

        Each has to fit into max_length and the model's window, and all of them together into a pack.
        """
        longest = max(len(lesson.ids) for lesson in found)
        if longest > self.max_length:
            raise TooLong(f"{longest} tokens")
        check_window(place, longest, 0, self.window, limit="max_length")
        total = sum(len(lesson.ids) for lesson in found)
        if self.max_tokens is not None and total > self.max_tokens:
            raise Unfit(place, f"the {what} has {total} tokens, above {self.max_tokens}: a pack holds all")


def reading(
    tokenizer: Any,
    *,
    template: str = "{prompt}",
    system: str | None = None,
    max_length: int = 512,
    max_tokens: int | None = None,
    messages: Sequence[str] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    processing: Processing | None = None,
    window: int | None = None,
) -> Reading:
    """The `Reading` of these options, which are those of `pairs_from_rows`."""
    chat = Chat(tokenizer, chat_template_kwargs or {}, processing)
    return Reading(chat, template, system, messages, max_length, max_tokens, window)


def prompt_of_text(
    chat: Chat, text: str, row: Row, place: str, system: str | None
) -> tuple[list[Turn], list[int], Encoded | None]:
    """Return (turns, ids, what the processor made of its media or None) of a prompt of text.

    It is ready for the response. A model of text reads none of the row's media. Unfit for an empty prompt
    without media, for media that do not fit, and for a chat template that fails.
    """
    turns: list[Turn] = [{"role": "user", "content": text}]
    try:
        if chat.processing is not None:
            turns = chat.placed(turns, row, place)
        if is_empty(text) and not media_of_turns(turns):
            raise ValueError("the prompt is empty")
        turns = opened(turns, system)
        if media_of_turns(turns):
            made = chat.encoded(turns, ask=True)
            return turns, made.ids, made
        ids = render(
            chat.tokenizer,
            text,
            system=system,
            chat_template_kwargs=chat.kwargs,
            processing=chat.processing,
        )
        return turns, ids, None
    except ValueError as error:
        raise Unfit(place, str(error)) from None


def answer_of_text(
    chat: Chat, turns: Sequence[Turn], ids: Sequence[int], text: str, made: Encoded | None, place: str
) -> Lesson:
    """Return the lesson of a response to a prompt of `prompt_of_text`. Unfit for the place of a medium."""
    chat.check_text(text, place)
    return chat.answered(turns, ids, text, made.media if made is not None else None)


def response_of_turns(
    chat: Chat, prompt: list[Turn], response: list[Turn], tools: list[Any] | None, learned: str, name: str
) -> Lesson:
    """The prompt and the assistant's turns behind it, as one sequence.

    `learned` are the turns that its mask holds, "all" or "last"; `name` is the response's in errors, such as
    "the chosen". ValueError for a response without turns or that another role begins, and where the chat
    template renders its turns as several sequences.
    """
    if not response:
        raise ValueError(f"{name} response is missing: the other column begins with all of its turns")
    role = response[0]["role"]
    if role != "assistant":
        raise ValueError(f"{name} response: expected it to begin with the assistant, got {role}")
    talk = Conversation([*prompt, *response], len(prompt), tools)
    found = chat.lessons(talk, learned)
    if len(found) > 1:
        raise ValueError(
            f"{name} response: expected one sequence, but the chat template renders earlier turns in "
            f"other ways once later ones follow, got {len(found)}"
        )
    return found[0]


# --------------------------------------------------------------------------------------------- cells


def cells_of(row: Row, column: str, place: str) -> list[Any]:
    """The entries of a column that holds a list. Unfit for any other column, and for an empty list."""
    if column not in row:
        known = ", ".join(map(repr, row))
        raise Unfit(place, f"the row has no column {column!r}; it has {known}")
    cell = row[column]
    if hasattr(cell, "tolist"):  # an array of a table
        cell = cell.tolist()
    if not isinstance(cell, (list, tuple)):
        raise Unfit(place, f"column {column!r}: expected a list, got {type(cell).__name__}")
    if not cell:
        raise Unfit(place, f"column {column!r} has no entries")
    return list(cell)


def number(value: Any, place: str, what: str, *, share: bool = False) -> float:
    """A label as a number. Unfit for text and holes, and with `share` for a number outside [0, 1]."""
    limits = "a number"
    if share:
        limits = "a number in [0, 1]"
    if hasattr(value, "item"):  # a number of a table
        value = value.item()
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise Unfit(place, f"{what}: expected {limits}, got {value!r:.40}")
    if share and not 0 <= value <= 1:
        raise Unfit(place, f"{what}: expected {limits}, got {value!r}")
    return float(value)


def labels_at(row: Row, columns: Sequence[str], place: str, *, share: bool = False) -> tuple[float, ...]:
    """The numbers in these columns of a row. Unfit for a column that is missing or no number."""
    found = []
    for column in columns:
        if column not in row:
            known = ", ".join(map(repr, row))
            raise Unfit(place, f"the row has no column {column!r}; it has {known}")
        found.append(number(row[column], place, f"column {column!r}", share=share))
    return tuple(found)
