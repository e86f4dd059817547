"""Prompts made of rows of text or of conversations."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rft_fn.data import tasks
from rft_fn.data.chat import LOSS_ON, Chat, learned_turns
from rft_fn.data.dataset import Dataset
from rft_fn.data.invalid_rows import TooLong, check_window
from rft_fn.data.lesson import Lesson
from rft_fn.data.medium import Medium, media_of_turns, shown_turns
from rft_fn.data.messages import Conversation, Turn, conversation, text_of, tools_of, turns_of
from rft_fn.data.processing import Encoded, Processing
from rft_fn.data.recipe import Recipe, make_dataset
from rft_fn.data.responses import answer_of_text, prompt_of_text
from rft_fn.data.row_paths import column_of, value_at
from rft_fn.data.table import Endless, Row, Table
from rft_fn.data.templates import columns_in, fill, is_empty

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
    survey: Callable[[Row, str], None] | None = None,
    name: str = "rows",
) -> Dataset[Prompt]:
    """Make the data set of the prompts of rows.

    `template` makes the question of a row's columns of text. With `messages` the prompt is the conversation
    in these columns, one after the other, by the tokenizer's chat template, which gets `chat_template_kwargs`
    and the tools in the row's column `tools`; `template` and `response` are not read. It is to be answered,
    and must end with a user or a tool; with `loss_on` "all" or "last" it is to be learned (see `lessons`),
    and must have turns of the assistant.

    With `processing` a row may have images, audio and videos: in columns of these names, or in the parts of
    its messages; `docs/data.md` has the forms. Without it they are an error. `workers` processes make the
    prompts of rows with media, and leave them in the cache of `processing`.

    Every row is looked at now, so that none stops a run later: the columns of the template and of `columns`
    must be there and hold something (`reward.columns(score)` are those that a reward reads), those of
    `values` hold, as text, one of the values there (`reward.label_values(score)` are the labels that have a
    reward); `response`, a template, must fill in, and prompt, response and its end fit into `max_tokens`.
    Prompts longer than `max_prompt` tokens are left out, with one warning; one that is not, and does not fit
    into `window`, the most tokens that the model reads, with its response or `max_new` tokens is an error. Of
    rows of a file only their places are kept in memory. `survey` gets each row of a file with its place.

    ValueError for no rows, with the count and the places of the first rows that cannot be used, when no
    prompt fits, and for keywords that the chat template does not read.
    """
    chat = Chat(tokenizer, chat_template_kwargs or {}, processing)
    reader = _PromptReader(
        chat=chat,
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
    if loss_on is not None and loss_on not in LOSS_ON:
        raise ValueError(f"loss_on: expected one of {', '.join(LOSS_ON)}, or None, got {loss_on!r}")
    chat.check(messages=messages)
    reads = {*columns, *reader.values} | chat.reads(messages)
    if not messages:
        reads |= columns_in(template, response)
    recipe = Recipe(
        what="prompt", limit="max_prompt", most=max_prompt, chat=chat, reads=reads, make=reader.make
    )
    if not messages and response is None and processing is None and not columns_in(template):
        warnings.warn(
            f"data: the template {template!r} names no column, so that all prompts of {name} are the same; "
            "name columns as {question}",
            stacklevel=2,
        )
    return make_dataset(rows, recipe, name, workers=workers, survey=survey)


def from_task(task: str, tokenizer: Any, *, level: int = 1, seed: int = 0, **options: Any) -> Dataset[Prompt]:
    """Make an endless data set of prompts of a built-in task.

    The options are options of `from_rows`. The template "{short}" is the terse form of a question. ValueError
    for a task, a level or a column that does not exist, and, when it is drawn, for a row that cannot be used
    or a prompt longer than `max_prompt` tokens.
    """
    generate = tasks.get_task(task).generate
    rows = Endless(task, lambda index: generate(seed, index, level), seed)
    return from_rows(rows, tokenizer, name=f"{task}:{level}", **options)


@dataclass(frozen=True)
class _PromptReader:
    """Makes prompts of rows; the fields are options of `from_rows`."""

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
    window: int | None
    max_new: int

    def make(self, row: Row, place: str, index: int) -> Prompt:
        """Return the prompt of a row. ValueError for one that cannot be used, TooLong above max_prompt."""
        for path in self.columns:
            try:
                value = value_at(row, path)
            except KeyError:
                value = column_of(row, path)  # raises, with the columns that there are
            if is_empty(value):
                raise ValueError(f"column {path!r} is empty")
        for name, known in self.values.items():
            value = str(row.get(name))
            if value not in known:
                expected = ", ".join(map(repr, known))
                raise ValueError(f"column {name!r}: expected one of {expected}, got {value!r:.80}")
        return self._of_messages(row, place, index) if self.messages else self._of_text(row, place, index)

    def _of_text(self, row: Row, place: str, index: int) -> Prompt:
        text = fill(self.template, row, place)
        if len(text) > self.max_prompt * self.chat.longest_token:
            raise TooLong(f"{len(text)} characters")
        if self.chat.processing is None:
            self.chat.placed([{"role": "user", "content": text}], row, place)  # refuses media
        turns, ids, encoded = prompt_of_text(self.chat, text, row, place, self.system)
        if len(ids) > self.max_prompt:
            of_media = ", those of its media among them" if encoded is not None else ""
            raise TooLong(f"{len(ids)} tokens{of_media}")

        # the prompt, the response if one is asked for, and its end fit into the limits
        learned: tuple[Lesson, ...] = ()
        count, subject = len(ids), "the prompt has"
        if self.response is not None:
            answer = fill(self.response, row, place)
            if is_empty(answer):
                raise ValueError("the response is empty")
            if self.max_tokens is not None and len(answer) > self.max_tokens * self.chat.longest_token:
                raise ValueError(f"the response has {len(answer)} characters, above {self.max_tokens} tokens")
            learned = (answer_of_text(self.chat, turns, ids, answer, encoded),)
            count, subject = len(learned[0].ids), "prompt and response have"
        if self.max_tokens is not None and count > self.max_tokens:
            raise ValueError(f"{subject} {count} tokens, above {self.max_tokens}")
        check_window(count, self.max_new, self.window)
        prompt = Prompt(ids, text, row, index, learned=learned)
        return prompt if encoded is None else self._with_media(prompt, encoded, turns)

    def _with_media(self, prompt: Prompt, encoded: Encoded, turns: Sequence[Turn]) -> Prompt:
        """Return the prompt with the fields about its media."""
        assert self.chat.processing is not None
        return replace(
            prompt,
            media=encoded.media,
            media_names=encoded.names,
            media_notes=encoded.notes,
            sources=tuple(self.chat.processing.rooted(medium) for medium in media_of_turns(turns)),
        )

    def _of_messages(self, row: Row, place: str, index: int) -> Prompt:
        """Return the prompt of a conversation: its tokens up to the first learned one.

        All tokens of one to be answered. Its text is that of the last user's turn, or of the last turn where
        no user speaks.
        """
        talk = conversation(row, self.messages, self.system, media=True)
        talk = talk._replace(turns=self.chat.placed(talk.turns, row, place))
        self._check_size(talk)
        learned: list[Lesson] = []
        asked = talk.turns  # the turns before the first learned token
        if self.loss_on is None:
            ids = self.chat.prompt(talk)
        else:
            learned = self.chat.lessons(talk, self.loss_on)
            for lesson in learned:
                if self.max_tokens is not None and len(lesson.ids) > self.max_tokens:
                    raise ValueError(
                        f"the conversation has {len(lesson.ids)} tokens, above {self.max_tokens}"
                    )
            ids = learned[0].ids[: learned[0].mask.index(True)]
            asked = talk.turns[: learned_turns(talk, self.loss_on)[0]]
        encoded = self.chat.encoded(asked, talk.tools, ask=True) if media_of_turns(talk.turns) else None
        if len(ids) > self.max_prompt:
            raise TooLong(f"{len(ids)} tokens")
        longest = max([len(ids), *(len(lesson.ids) for lesson in learned)])
        check_window(longest, self.max_new, self.window)
        said = [turn for turn in talk.turns if turn["role"] == "user"] or talk.turns
        prompt = Prompt(ids, text_of(said[-1]), row, index, talk.turns)
        if encoded is None:
            return prompt
        prompt = replace(prompt, messages=shown_turns(talk.turns, encoded.names), learned=tuple(learned))
        return self._with_media(prompt, encoded, talk.turns)

    def _check_size(self, talk: Conversation) -> None:
        """Refuse a conversation that cannot fit, which is then not tokenised.

        Turns of the assistant are not counted: a chat template may drop text of theirs.
        """
        size = sum(len(text_of(turn)) for turn in talk.turns if turn["role"] != "assistant")
        if self.loss_on is None and size > self.max_prompt * self.chat.longest_token:
            raise TooLong(f"{size} characters")
        most = self.max_tokens
        if self.loss_on is not None and most is not None and size > most * self.chat.longest_token:
            raise ValueError(f"the conversation has {size} characters, above {most} tokens")


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
    """Return the sequences of a prompt's row to learn from.

    The data set must be loaded with the same options. Of text it is the prompt, then the filled-in
    `response` and its end, which are learned: a chat template makes the same ids of it as of a conversation,
    without one the end of sequence ends it. Of a conversation it is turns of the assistant: see
    `Chat.lessons`. Each has the media before its end. ValueError for a row that cannot be used.
    """
    if prompt.learned:
        return list(prompt.learned)
    chat = Chat(tokenizer, chat_template_kwargs or {})
    if prompt.messages is None:
        text = fill(response, prompt.columns, f"row {prompt.index + 1}")
        return [chat.verbatim(prompt.ids, text, prompt.media)]

    # the turns of the last column are learned; the ones before it are context
    turns = [dict(turn) for turn in prompt.messages]
    last = turns_of(prompt.columns, messages[-1])
    talk = Conversation(turns, len(turns) - len(last), tools_of(prompt.columns))
    return chat.lessons(talk, loss_on)
