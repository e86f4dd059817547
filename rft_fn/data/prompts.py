"""Prompts made of rows of text or of conversations."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from rft_fn.data import tasks
from rft_fn.data.chat import LOSS_ON, Chat, learned_turns
from rft_fn.data.dataset import Dataset
from rft_fn.data.masks import Lesson
from rft_fn.data.medium import Medium, media_of_turns, shown_turns
from rft_fn.data.messages import Conversation, Turn, conversation, text_of, tools_of, turns_of
from rft_fn.data.processing import Encoded, Processing
from rft_fn.data.recipe import make_dataset
from rft_fn.data.responses import answer_of_text, prompt_of_text
from rft_fn.data.rows import Endless, Row, Table, TooLong, Unfit, check_window, value_at
from rft_fn.data.text_template import columns_in, fill, is_empty

__all__ = ["Prompt", "from_rows", "from_task", "lessons"]


# ---------- prompts made of rows of text or of conversations


@dataclass(frozen=True)
class Prompt:
    """One prompt: the tokens for the engine, and the row for the rewards."""

    ids: list[int]
    text: str
    columns: Row  # the row that it was made of
    index: int  # in its data set
    messages: Sequence[Mapping[str, Any]] | None = None  # the conversation that it was made of, if any
    media: Mapping[str, Tensor] | None = None  # the processor's tensors of its images, audio and videos
    media_names: tuple[str, ...] = ()  # of its media, in their order
    media_notes: tuple[str, ...] = ()  # which of them were shrunk or resampled
    sources: tuple[Medium, ...] = ()  # its media as the row has them
    learned: tuple[Lesson, ...] = ()  # what `lessons` gives of it


def from_rows(
    rows: Table | Endless,
    tokenizer: Any,
    *,
    template: str = "{question}",
    system: str | None = None,
    max_prompt: int = 512,
    columns: Sequence[str] = (),
    values: Mapping[str, Collection[str]] | None = None,
    response: str | None = None,
    max_tokens: int | None = None,
    messages: Sequence[str] = (),
    loss_on: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    processing: Processing | None = None,
    window: int | None = None,
    max_new: int = 0,
    workers: int = 0,
    name: str = "rows",
) -> Dataset[Prompt]:
    """A data set of rows.

    `template` makes the question of a row's columns of text. With `messages` the prompt is the conversation
    in these columns, one after the other, by the tokenizer's chat template, which gets `chat_template_kwargs`
    and the tools in the row's column `tools`; `template` and `response` are not read. It is to be answered,
    and must end with a user or a tool; with `loss_on` "all" or "last" it is to be learned (see `lessons`),
    and must have turns of the assistant.

    With `processing` a row may have images, audio and videos: in columns of these names, or in the parts of
    its messages; `docs/data.md` has the forms. Without it they are an error. `workers` processes make the
    prompts of rows with media, and leave them in the cache of `processing`.

    Every row is looked at now, so that none stops a run later: the columns of the template and those of
    `columns` must be there and hold something (`reward.columns(score)` are those that a reward reads), those
    of `values` hold, as text, one of the values there (`reward.label_values(score)` are the labels that have
    a reward);
    `response`, a template, must fill in, and prompt, response and its end fit into `max_tokens`. Prompts
    longer than `max_prompt` tokens are left out, with one warning; one that is not, and does not fit into
    `window`, the most tokens that the model reads, with its response or `max_new` tokens is an error. Of rows
    of a file only their places are kept in memory.

    ValueError for no rows, with the count and the places of the first rows that cannot be used, when no
    prompt fits, and for keywords that the chat template does not read.
    """
    recipe = PromptRecipe(
        chat=Chat(tokenizer, chat_template_kwargs or {}, processing),
        template=template,
        system=system,
        max_prompt=max_prompt,
        columns=columns,
        values=values or {},
        response=response,
        max_tokens=max_tokens,
        messages=messages,
        loss_on=loss_on,
        window=window,
        max_new=max_new,
    )
    return make_dataset(rows, recipe, name, workers=workers)


def from_task(task: str, tokenizer: Any, *, level: int = 1, seed: int = 0, **options: Any) -> Dataset[Prompt]:
    """A built-in task as an endless data set.

    The options are those of `from_rows`. The template "{short}" is the terse form of a question. ValueError
    for a task, a level or a column that does not exist, and, when it is drawn, for a row that cannot be used
    or a prompt longer than `max_prompt` tokens.
    """
    generate = tasks.get_task(task).generate
    rows = Endless(task, lambda index: generate(seed, index, level), seed)
    return from_rows(rows, tokenizer, name=f"{task}:{level}", **options)


@dataclass(frozen=True)
class PromptRecipe:
    """Makes prompts of rows; the fields are options of `from_rows`."""

    what: ClassVar[str] = "prompt"
    limit: ClassVar[str] = "max_prompt"

    chat: Chat
    template: str
    system: str | None
    max_prompt: int
    columns: Sequence[str]
    values: Mapping[str, Collection[str]]
    response: str | None
    max_tokens: int | None
    messages: Sequence[str]
    loss_on: str | None
    window: int | None = None
    max_new: int = 0

    @property
    def most(self) -> int:
        return self.max_prompt

    @cached_property
    def widest(self) -> int:
        """The characters of the longest token.

        A text above `widest` times a limit is not tokenised.
        """
        return self.chat.longest_token()

    @property
    def reads(self) -> set[str]:
        """The columns that a prompt is made of, and those that rewards read."""
        read = {*self.columns, *self.values}
        if self.messages:
            return read | self.chat.reads(self.messages)
        return read | self.chat.reads(()) | columns_in(self.template, self.response)

    def check(self) -> None:
        """ValueError for options that no row could be used with."""
        if self.loss_on is not None and self.loss_on not in LOSS_ON:
            raise ValueError(f"loss_on: expected one of {', '.join(LOSS_ON)}, or None, got {self.loss_on!r}")
        self.chat.check(messages=self.messages)

    def make(self, row: Row, place: str, index: int) -> Prompt:
        """The prompt of a row.

        Unfit for one that cannot be used, TooLong for one above max_prompt.
        """
        self._check_columns(row, place)
        if self.messages:
            return self._of_messages(row, place, index)
        return self._of_text(row, place, index)

    def _check_columns(self, row: Row, place: str) -> None:
        """Unfit for a column of `columns` that is missing or empty, and for a value not among `values`."""
        for path in self.columns:
            try:
                value = value_at(row, path)
            except KeyError:
                known = ", ".join(map(repr, row))
                raise Unfit(place, f"the row has no column {path!r}; it has {known}") from None
            if is_empty(value):
                raise Unfit(place, f"column {path!r} is empty")
        for name, known in self.values.items():
            value = str(row.get(name))
            if value not in known:
                expected = ", ".join(map(repr, known))
                raise Unfit(place, f"column {name!r}: expected one of {expected}, got {value!r:.80}")

    # ------------------------------------------------------------------------------------------ rows of text

    def _of_text(self, row: Row, place: str, index: int) -> Prompt:
        text = fill(self.template, row, place)
        if len(text) > self.max_prompt * self.widest:
            raise TooLong(f"{len(text)} characters")
        if self.chat.processing is None:
            try:
                self.chat.placed([{"role": "user", "content": text}], row, place)
            except ValueError as error:  # media that a model of text would not be shown
                raise Unfit(place, str(error)) from None
        turns, ids, made = prompt_of_text(self.chat, text, row, place, self.system)
        if len(ids) > self.max_prompt:
            of_media = ", those of its media among them" if made is not None else ""
            raise TooLong(f"{len(ids)} tokens{of_media}")
        learned = self._answered(turns, ids, made, row, place)
        if made is None:
            return Prompt(ids, text, row, index, learned=learned)
        return Prompt(ids, text, row, index, **self._media(made, turns), learned=learned)

    def _media(self, made: Encoded, turns: Sequence[Turn]) -> dict[str, Any]:
        """The fields of a prompt that are about its media."""
        assert self.chat.processing is not None
        sources = [self.chat.processing.rooted(medium) for medium in media_of_turns(turns)]
        return {
            "media": made.media,
            "media_names": made.names,
            "media_notes": made.notes,
            "sources": tuple(sources),
        }

    def _answered(
        self,
        turns: list[Turn],
        ids: Sequence[int],
        made: Encoded | None,
        row: Row,
        place: str,
    ) -> tuple[Lesson, ...]:
        """Return the lesson of a prompt with its response, none where no response is asked for.

        Unfit for an empty response, and for more than max_tokens or the window in all: the prompt, the
        response and its end.
        """
        learned: tuple[Lesson, ...] = ()
        count = len(ids)
        subject = "the prompt has"
        if self.response is not None:
            text = self._response(self.response, row, place)
            learned = (answer_of_text(self.chat, turns, ids, text, made, place),)
            count = len(learned[0].ids)
            subject = "prompt and response have"
        if self.max_tokens is not None and count > self.max_tokens:
            raise Unfit(place, f"{subject} {count} tokens, above {self.max_tokens}")
        check_window(place, count, self.max_new, self.window)
        return learned

    def _response(self, template: str, row: Row, place: str) -> str:
        """Return the text of the response. Unfit for an empty one, and one that could not fit."""
        answer = fill(template, row, place)
        if is_empty(answer):
            raise Unfit(place, "the response is empty")
        if self.max_tokens is not None and len(answer) > self.max_tokens * self.widest:
            raise Unfit(place, f"the response has {len(answer)} characters, above {self.max_tokens} tokens")
        return answer

    # -------------------------------------------------------------------------------------- rows of messages

    def _of_messages(self, row: Row, place: str, index: int) -> Prompt:
        """The prompt of a conversation: its tokens up to the first learned one.

        All tokens of one to be answered. Its text is that of the last user's turn, or of the last turn where
        no user speaks.
        """
        try:
            talk = conversation(row, self.messages, self.system, media=True)
            talk = talk._replace(turns=self.chat.placed(talk.turns, row, place))
            self._check_size(talk)
            ids, learned = self._ids(talk)
            made = self._media_before(talk, learned)
        except ValueError as error:
            raise Unfit(place, str(error)) from None
        if len(ids) > self.max_prompt:
            raise TooLong(f"{len(ids)} tokens")
        longest = max([len(ids), *(len(lesson.ids) for lesson in learned)])
        check_window(place, longest, self.max_new, self.window)
        asked = [turn for turn in talk.turns if turn["role"] == "user"] or talk.turns
        text = text_of(asked[-1])
        if made is None:
            return Prompt(ids, text, row, index, talk.turns)
        turns = shown_turns(talk.turns, made.names)
        return Prompt(ids, text, row, index, turns, **self._media(made, talk.turns), learned=tuple(learned))

    def _media_before(self, talk: Conversation, learned: Sequence[Lesson]) -> Encoded | None:
        """The media of a conversation before its first learned token; None for one without any."""
        if not media_of_turns(talk.turns):
            return None
        turns = talk.turns
        if learned:
            turns = turns[: learned_turns(talk, self.loss_on)[0]]
        return self.chat.encoded(turns, talk.tools, ask=True)

    def _check_size(self, talk: Conversation) -> None:
        """Raise TooLong or ValueError for a conversation that cannot fit.

        It is then not tokenised. Turns of the assistant are not counted: a chat template may drop text of
        theirs.
        """
        size = sum(len(text_of(turn)) for turn in talk.turns if turn["role"] != "assistant")
        if self.loss_on is None and size > self.max_prompt * self.widest:
            raise TooLong(f"{size} characters")
        if self.loss_on is not None and self.max_tokens is not None and size > self.max_tokens * self.widest:
            raise ValueError(f"the conversation has {size} characters, above {self.max_tokens} tokens")

    def _ids(self, talk: Conversation) -> tuple[list[int], list[Lesson]]:
        """(the tokens to answer, no lessons), or (those before the first learned token, the lessons)."""
        if self.loss_on is None:
            return self.chat.prompt(talk), []
        found = self.chat.lessons(talk, self.loss_on)
        for lesson in found:
            if self.max_tokens is not None and len(lesson.ids) > self.max_tokens:
                raise ValueError(f"the conversation has {len(lesson.ids)} tokens, above {self.max_tokens}")
        first = found[0]
        return first.ids[: first.mask.index(True)], found


# ---------- the sequences of a row to learn from


def lessons(
    prompt: Prompt,
    tokenizer: Any,
    *,
    response: str = "{answer}",
    messages: Sequence[str] = (),
    loss_on: str = "all",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Lesson]:
    """The sequences of a prompt's row to learn from.

    The data set has to be loaded with the same options. Of text it is the prompt, then the filled-in
    `response` and its end, which are learned: a chat template makes the same ids of it as of a conversation,
    without one the end of sequence ends it. Of a conversation it is turns of the assistant: see
    `Chat.lessons`. Each has the media that stand before its end. ValueError for a row that cannot be used.
    """
    if prompt.learned:
        return list(prompt.learned)
    chat = Chat(tokenizer, chat_template_kwargs or {})
    if prompt.messages is None:
        text = fill(response, prompt.columns, f"row {prompt.index + 1}")
        return [chat.verbatim(prompt.ids, text, prompt.media)]

    # the learned turns are those of the last column; the ones before it are context
    turns = [dict(turn) for turn in prompt.messages]
    last = turns_of(prompt.columns, messages[-1])
    talk = Conversation(turns, len(turns) - len(last), tools_of(prompt.columns))
    return chat.lessons(talk, loss_on)
