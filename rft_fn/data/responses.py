"""Responses to the prompt of a row as sequences: what pairs, lists, points and steps have in common."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft_fn import border
from rft_fn.data.chat import Chat
from rft_fn.data.dataset import ItemT
from rft_fn.data.invalid_rows import TooLong, check_window
from rft_fn.data.lesson import Lesson
from rft_fn.data.medium import media_of_turns
from rft_fn.data.messages import Conversation, Turn, opened, system_of, tools_of
from rft_fn.data.processing import Encoded, Processing
from rft_fn.data.recipe import Recipe
from rft_fn.data.row_paths import column_of
from rft_fn.data.table import Row
from rft_fn.data.templates import columns_in, is_empty

__all__ = [
    "Reading", "answer_of_text", "cells_of", "labels_at", "number", "prompt_ids", "prompt_of_text", "reading",
    "render",
]  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How the prompt of a row and its responses become sequences, and their limits.

    The fields are options of `reading`. Methods raise ValueError for a row that cannot be used, TooLong for
    one above max_length.
    """

    chat: Chat
    template: str
    system: str | None
    messages: Sequence[str]
    max_length: int
    max_tokens: int | None
    window: int | None

    def recipe(
        self, what: str, make: Callable[..., ItemT], columns: Collection[str], *templates: str
    ) -> Recipe[ItemT]:
        """Return the recipe of items that `make` makes of these columns and those that templates name."""
        reads = {*columns} | self.chat.reads(self.messages)
        if not self.messages:
            reads |= columns_in(self.template, *templates)
        return Recipe(
            what=what, limit="max_length", most=self.max_length, chat=self.chat, reads=reads, make=make
        )

    def check(self, counts: Sequence[int], what: str) -> None:
        """Raise ValueError for options that no row could be used with.

        `counts` are the possible numbers of columns of messages, `what` tells which columns are expected.
        """
        if self.messages and len(self.messages) not in counts:
            raise ValueError(f"messages: expected {what}, got {', '.join(self.messages)}")
        self.chat.check(messages=self.messages)

    def of_texts(
        self, row: Row, place: str, prompt: str, texts: Sequence[str], names: Sequence[str] = ()
    ) -> list[Lesson]:
        """Return the sequences of a prompt with each response; `names` are the responses' in errors."""
        self.check_texts(prompt, texts, names)
        turns, ids, encoded = prompt_of_text(self.chat, prompt, row, place, self.system)
        return [answer_of_text(self.chat, turns, ids, text, encoded) for text in texts]

    def of_turns(
        self,
        row: Row,
        place: str,
        prompt: list[Turn],
        responses: Sequence[list[Turn]],
        *,
        learned: str = "last",
        names: Sequence[str] = (),
    ) -> list[Lesson]:
        """Return the sequences of a prompt of turns with the turns of each response.

        `learned` are the assistant's turns that are learned, "all" or "last". ValueError for a response
        without turns or that another role begins, and where the chat template renders it as several
        sequences.
        """
        prompt = self.chat.placed(opened(prompt, system_of(row, prompt, self.system)), row, place)
        tools = tools_of(row)
        lessons = []
        for name, response in zip(names or ["the"] * len(responses), responses):
            if not response:
                raise ValueError(f"{name} response is missing: the other column begins with all of its turns")
            role = response[0]["role"]
            if role != "assistant":
                raise ValueError(f"{name} response: expected it to begin with the assistant, got {role}")
            sequences = self.chat.lessons(Conversation([*prompt, *response], len(prompt), tools), learned)
            if len(sequences) > 1:
                raise ValueError(
                    f"{name} response: expected one sequence, but the chat template renders earlier turns in "
                    f"other ways once later ones follow, got {len(sequences)}"
                )
            lessons += sequences
        return lessons

    def check_texts(self, prompt: str, texts: Sequence[str], names: Sequence[str] = ()) -> None:
        """Refuse empty responses, and texts that could not fit, however many characters their tokens have."""
        for name, text in zip(names or ["a response"] * len(texts), texts):
            if is_empty(text):
                raise ValueError(f"{name} is empty")
        size = len(prompt) + max(map(len, texts))
        if size > self.max_length * self.chat.longest_token:
            raise TooLong(f"{size} characters")

    def check_fit(
        self, lessons: Sequence[Lesson], what: str, *, targets: int = 0, holds: str = "all"
    ) -> None:
        """Refuse sequences above a limit.

        Each has to fit into max_length and the model's window, and all of them together, without `targets`
        tokens that are only targets, into a pack.
        """
        longest = max(len(lesson.ids) for lesson in lessons)
        if longest > self.max_length:
            raise TooLong(f"{longest} tokens")
        check_window(longest, 0, self.window, limit="max_length")
        total = sum(len(lesson.ids) for lesson in lessons) - targets
        if self.max_tokens is not None and total > self.max_tokens:
            raise ValueError(f"the {what} has {total} tokens, above {self.max_tokens}: a pack holds {holds}")


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
    """Return the `Reading` of these options of `pairs_from_rows`."""
    chat = Chat(tokenizer, chat_template_kwargs or {}, processing)
    return Reading(chat, template, system, messages, max_length, max_tokens, window)


# ---------- prompts and answers of text


def render(
    tokenizer: Any,
    question: str,
    *,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    processing: Processing | None = None,
) -> list[int]:
    """Return the ids of a question as a chat's first turn, ready for the answer.

    They are made by the tokenizer's own template. The bare text where a tokenizer has no template. An empty
    `system` leaves out a default of the template's; one that the template refuses is put before the question.
    ValueError for a template that fails, and with `processing` for text that has the place of a medium.
    """
    if tokenizer.chat_template:
        turns = opened([{"role": "user", "content": question}], system)
        return Chat(tokenizer, chat_template_kwargs or {}, processing).ids(turns, ask=True)
    text = f"{system}\n{question}" if system else question
    if processing is not None:
        processing.check_places(text, ())
    return prompt_ids(tokenizer, text)


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a prompt that no chat template renders, with the tokenizer's own beginning.

    Some tokenizers put their end of sequence, or other special tokens, after every text. They are left out,
    as nothing is to be said after them.
    """
    ids = list(tokenizer.encode(text))
    own = list(tokenizer.encode(text, add_special_tokens=False))
    ends = (end for end in range(len(own), len(ids) + 1) if ids[end - len(own) : end] == own)
    return ids[: next(ends, len(ids))]


def prompt_of_text(
    chat: Chat, text: str, row: Row, place: str, system: str | None
) -> tuple[list[Turn], list[int], Encoded | None]:
    """Return (turns, ids, what the processor made of its media or None) of a prompt of text.

    It is ready for the response. A model of text reads none of the row's media. ValueError for an empty
    prompt without media, for media that do not fit, and for a chat template that fails.
    """
    turns: list[Turn] = [{"role": "user", "content": text}]
    if chat.processing is not None:
        turns = chat.placed(turns, row, place)
    if is_empty(text) and not media_of_turns(turns):
        raise ValueError("the prompt is empty")
    turns = opened(turns, system)
    if media_of_turns(turns):
        encoded = chat.encoded(turns, ask=True)
        return turns, encoded.ids, encoded
    ids = render(
        chat.tokenizer, text, system=system, chat_template_kwargs=chat.kwargs, processing=chat.processing
    )
    return turns, ids, None


def answer_of_text(
    chat: Chat, turns: Sequence[Turn], ids: Sequence[int], text: str, encoded: Encoded | None
) -> Lesson:
    """Return the lesson of a response to a prompt of `prompt_of_text`. ValueError for a medium's place."""
    chat.check_text(text)
    return chat.answered(turns, ids, text, encoded.media if encoded is not None else None)


# ---------- cells


def cells_of(row: Row, column: str) -> list[Any]:
    """Return the entries of a column. ValueError for one that holds no list, and for an empty list."""
    cell = column_of(row, column)
    if hasattr(cell, "tolist"):  # an array of a table
        cell = cell.tolist()
    if not isinstance(cell, (list, tuple)):
        raise ValueError(f"column {column!r}: expected a list, got {type(cell).__name__}")
    if not cell:
        raise ValueError(f"column {column!r} has no entries")
    return list(cell)


def number(value: Any, column: str, *, share: bool = False) -> float:
    """Return a label as a number, finite as a float32; with `share` in [0, 1]. ValueError for others."""
    limits = "a number in [0, 1]" if share else "a number"
    if hasattr(value, "item"):  # a number of a table
        value = value.item()
    if not isinstance(value, (bool, int, float)) or not border.is_finite(value):
        raise ValueError(f"column {column!r}: expected {limits}, got {border.quoted(value)}")
    if share and not 0 <= value <= 1:
        raise ValueError(f"column {column!r}: expected {limits}, got {value!r}")
    return float(value)


def labels_at(row: Row, columns: Sequence[str], *, share: bool = False) -> tuple[float, ...]:
    """Return the numbers in these columns of a row. ValueError for one that is missing or no number."""
    return tuple(number(column_of(row, column), column, share=share) for column in columns)
