"""Prompts as a pure function of the step: no loader, no cursor, no state to lose.

A `Dataset` is rows and a way to make a prompt of one. `draw(dataset, n, step, seed)` is the same on every
rank and in every resumed run.
"""

import hashlib
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import rng
from rft_fn.data import tasks
from rft_fn.data.chat import LOSS_ON, Chat
from rft_fn.data.mixture import Mixture
from rft_fn.data.paths import value_at
from rft_fn.data.report import First, TooLong, unfit_line
from rft_fn.data.rows import Unfit, place_of
from rft_fn.data.talk import Talk
from rft_fn.data.template import fill, is_empty, render

__all__ = ["Dataset", "Prompt", "checked", "draw", "from_rows", "from_task", "longest_token", "take"]

_ROUND = 1 << 40  # rows of a generator between one round of a step and the next: none is drawn twice


class Prompt(NamedTuple):
    """One prompt: what the engine reads, and what a reward is told."""

    ids: list[int]
    text: str
    columns: Mapping[str, Any]  # the row that it was made of
    index: int  # in its data set
    messages: Sequence[Mapping[str, Any]] | None = None  # the conversation that it was made of, if any


@dataclass(frozen=True)
class Dataset:
    """Prompts by index. `size` None is a generator without end: index i is row i."""

    name: str
    size: int | None
    prompt: Callable[[int], Prompt]
    digest: str = ""  # of all rows of a file, and of what is made of them
    parts: tuple["Dataset", ...] = ()  # the sources that it is a mixture of
    mixture: Mixture | None = None  # which of the parts each place is drawn from
    note: str = ""  # which rows of its source these are, for the line that says so


class _Recipe(NamedTuple):
    """How a prompt is made of a row, and what the row must have for it."""

    tokenizer: Any
    template: str
    system: str | None
    max_prompt: int
    columns: Sequence[str]
    response: str | None
    max_tokens: int | None
    messages: Sequence[str] = ()
    loss_on: str | None = None
    kwargs: Mapping[str, Any] = MappingProxyType({})

    def check(self) -> None:
        """ValueError for what no row could be used with."""
        if self.messages and not self.tokenizer.chat_template:
            raise ValueError(
                "messages: expected a tokenizer with a chat template, got one without; take a model that has "
                "one, or text by --template"
            )
        if self.loss_on is not None and self.loss_on not in LOSS_ON:
            raise ValueError(f"loss_on: expected one of {', '.join(LOSS_ON)}, or None, got {self.loss_on!r}")
        Chat(self.tokenizer, self.kwargs).check()

    def make(self, row: Mapping[str, Any], place: str, index: int, widest: int) -> Prompt:
        """The prompt of a row. Unfit for one that cannot be used, TooLong for one above max_prompt.

        `widest` is the length of the longest token [characters]: a text that could not fit whatever its
        tokens are is not tokenised.
        """
        for path in self.columns:
            try:
                value = value_at(row, path)
            except KeyError:
                known = ", ".join(map(repr, row))
                raise Unfit(place, f"the row has no column {path!r}; it has {known}") from None
            if is_empty(value):
                raise Unfit(place, f"column {path!r} is empty")
        if self.messages:
            return self._of_messages(row, place, index, widest)
        text = fill(self.template, row, place)
        if is_empty(text):
            raise Unfit(place, "the prompt is empty")
        if len(text) > self.max_prompt * widest:
            raise TooLong(f"{len(text)} characters")
        ids = render(self.tokenizer, text, system=self.system, chat_template_kwargs=self.kwargs)
        if len(ids) > self.max_prompt:
            raise TooLong(f"{len(ids)} tokens")
        self._check_tokens(row, place, ids, widest)
        return Prompt(ids, text, row, index)

    def _of_messages(self, row: Mapping[str, Any], place: str, index: int, widest: int) -> Prompt:
        """The prompt of a row of messages; of one to be learned, what stands before the first learned token.

        Its text is that of the last user's turn, or of the last turn where no user speaks.
        """
        chat = Chat(self.tokenizer, self.kwargs)
        talk = Talk(chat, self.messages, self.system, self.loss_on, self.max_prompt, self.max_tokens)
        try:
            ids, turns = talk.read(row, widest)
        except ValueError as error:
            raise Unfit(place, str(error)) from None
        asked = [turn for turn in turns if turn["role"] == "user"] or turns
        return Prompt(ids, asked[-1]["content"], row, index, turns)

    def _check_tokens(self, row: Mapping[str, Any], place: str, ids: Sequence[int], widest: int) -> None:
        """Unfit for an empty response, and for more than max_tokens of prompt, response and its end."""
        count, what = len(ids), "the prompt has"
        if self.response is not None:
            answer = fill(self.response, row, place)
            if is_empty(answer):
                raise Unfit(place, "the response is empty")
            what = "prompt and response have"
            if self.max_tokens is not None and len(answer) > self.max_tokens * widest:
                raise Unfit(
                    place, f"the response has {len(answer)} characters, above {self.max_tokens} tokens"
                )
            count += len(self.tokenizer.encode(answer, add_special_tokens=False)) + 1
        if self.max_tokens is not None and count > self.max_tokens:
            raise Unfit(place, f"{what} {count} tokens, above {self.max_tokens}")


def longest_token(tokenizer: Any) -> int:
    """The characters of the longest token of a vocabulary."""
    return max(map(len, tokenizer.get_vocab()))


def from_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    template: str = "{question}",
    system: str | None = None,
    max_prompt: int = 512,
    columns: Sequence[str] = (),
    response: str | None = None,
    max_tokens: int | None = None,
    messages: Sequence[str] = (),
    loss_on: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    name: str = "rows",
) -> Dataset:
    """A data set of rows; `template` makes the question of a row's columns of text.

    With `messages` the prompt is the conversation in these columns, one after the other, by the tokenizer's
    chat template, which gets `chat_template_kwargs` and the tools in the row's column `tools`; `template` and
    `response` are not read. It is to be answered, and must end with a user or a tool; with `loss_on` "all" or
    "last" it is to be learned (see `lessons`), and must have turns of the assistant.

    Every row is looked at now, so that none stops a run later: the columns of the template and those of
    `columns` must be there and hold something (`reward.columns(score)` are those that a reward reads);
    `response`, a template, must fill in, and prompt, response and its end fit into `max_tokens`. Prompts
    longer than `max_prompt` tokens are left out, with one warning. Of rows of a file only their places are
    kept in memory.

    ValueError for no rows, with the count and the places of the first rows that cannot be used, when no
    prompt fits, and for keywords that the chat template does not read.
    """
    recipe = _Recipe(tokenizer, template, system, max_prompt, columns, response, max_tokens)
    recipe = recipe._replace(messages=messages, loss_on=loss_on, kwargs=chat_template_kwargs or {})
    recipe.check()
    widest = longest_token(tokenizer)

    def prompt(i: int) -> Prompt:
        return recipe.make(dict(rows[i]), place_of(rows, i, name), i, widest)

    return checked(rows, prompt, name, option="max_prompt", most=max_prompt)


def checked(
    rows: Sequence[Mapping[str, Any]],
    make: Callable[[int], Any],
    name: str,
    *,
    option: str,
    most: int,
    what: str = "prompt",
) -> Dataset:
    """The data set of what `make(i)` makes of row i; every row is made once now.

    `make` raises Unfit for a row that cannot be used, and TooLong for one above `most` tokens, the limit that
    `option` sets: these are left out, with one warning. ValueError without rows, with the count and the
    places of the first unfit ones, or when all are too long.
    """
    if not len(rows):
        raise ValueError(f"data: expected at least one row, got none in {name!r}")
    kept, long, unfit = array("q"), First(), First()
    content = hashlib.blake2b(digest_size=16)
    for i in range(len(rows)):
        try:
            content.update(repr((i, *make(i))).encode())
            kept.append(i)
        except Unfit as error:
            unfit.add((error.place, error.reason))
        except TooLong as error:
            long.add(f"{place_of(rows, i, name)} with {error}")
    if unfit.count:
        raise ValueError(unfit_line(unfit, len(rows)))
    if not kept:
        raise ValueError(f"{option}: every {what} of {name!r} is longer than {most} tokens; raise it")
    if long.count:
        warnings.warn(
            f"data: {long.count} of {len(rows)} {what}s are longer than {option}, {most} tokens, and are "
            f"left out: {'; '.join(long.shown)}{long.more()}",
            stacklevel=3,
        )
    return Dataset(name, len(kept), lambda i: make(kept[i]), content.hexdigest())


def from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    template: str = "{question}",
    system: str | None = None,
    max_prompt: int = 512,
    columns: Sequence[str] = (),
    response: str | None = None,
    max_tokens: int | None = None,
    messages: Sequence[str] = (),
    loss_on: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Dataset:
    """A built-in task as an endless data set; the options are those of `from_rows`.

    The template "{short}" is the terse form of a question. ValueError for a task, a level or a column that
    does not exist, and, when it is drawn, for a row that cannot be used or a prompt longer than `max_prompt`
    tokens.
    """
    generate = tasks.get_task(task).generate
    recipe = _Recipe(tokenizer, template, system, max_prompt, columns, response, max_tokens)
    recipe = recipe._replace(messages=messages, loss_on=loss_on, kwargs=chat_template_kwargs or {})
    recipe.check()
    widest = longest_token(tokenizer)

    def prompt(index: int) -> Prompt:
        try:
            return recipe.make(generate(seed, index, level), f"{task}, prompt {index}", index, widest)
        except TooLong as long:
            raise ValueError(
                f"max_prompt: prompt {index} of {task} has {long}, above {max_prompt} tokens; raise it"
            ) from None

    prompt(0)  # what is wrong with the arguments is said now
    return Dataset(f"{task}:{level}", None, prompt)


def _order(size: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(size, generator=rng.generator(rng.fold_in(seed, "order", epoch)))


def _rows_at(dataset: Dataset, at: Sequence[int], seed: int, round: int) -> list[int]:
    """The rows that stand at these places."""
    if dataset.mixture is not None:
        return _mixed(dataset, dataset.mixture, at, seed, round)
    if dataset.size is None:
        return [i + round * _ROUND for i in at]
    orders = {epoch: _order(dataset.size, seed, epoch) for epoch in {i // dataset.size for i in at}}
    return [int(orders[i // dataset.size][i % dataset.size]) for i in at]


def _mixed(dataset: Dataset, mixture: Mixture, at: Sequence[int], seed: int, round: int) -> list[int]:
    """The rows at these places of a mixture, where each part is drawn in an order of its own."""
    found = [mixture.source(place) for place in at]
    rows = []
    for k, part in enumerate(dataset.parts):
        mine = [j for source, j in found if source == k]
        rows.append(iter(_rows_at(part, mine, rng.fold_in(seed, "source", k), round)))
    return [mixture.place(k, next(rows[k])) for k, _ in found]


def draw(
    dataset: Dataset, n: int, step: int, seed: int, *, round: int = 0, start: int | None = None
) -> tuple[list[Prompt], list[int]]:
    """(n prompts, a key for each) of step `step`, a function of its arguments alone.

    Places `start` to `start + n` in an endless sequence of prompts: the rows of a generator in order, or the
    data set over and over, each pass in an order drawn from (seed, pass). `start` is step * n unless it is
    given. So with the same n at every step each pass draws each row once, and a generator none twice. A
    caller whose n changes from step to step keeps the number of prompts drawn before in its state, and gives
    that as `start`: otherwise rows repeat, and others are skipped.

    The key of a prompt is fold_in(seed, step, index): a prompt that comes again is sampled anew, in a later
    step or, where a pass ends within one, in the same. `round` > 0 gives more prompts for the same step, for
    dynamic sampling: places in a sequence of that round, with another order and other keys, that no row of a
    generator shares with another round. ValueError unless n >= 1 and step, round, start >= 0.
    """
    _check_count(n)
    for name, x in (("step", step), ("round", round), ("start", start or 0)):
        if x < 0:
            raise ValueError(f"{name}: expected >= 0, got {x}")
    if start is None:
        start = step * n
    seed = rng.fold_in(seed, "round", round) if round else seed
    index = _rows_at(dataset, range(start, start + n), seed, round)
    prompts = [dataset.prompt(i) for i in index]

    # a row that comes twice in a step has another key the second time
    keys, times = [], Counter()
    for i, p in zip(index, prompts):
        key = rng.fold_in(seed, step, p.index)
        keys.append(rng.fold_in(key, "again", times[i]) if times[i] else key)
        times[i] += 1
    return prompts, keys


def take(dataset: Dataset, n: int, seed: int) -> tuple[list[Prompt], list[int]]:
    """The first n prompts in order, with keys: for evaluation. All of a finite data set if it has fewer.

    Of a mixture the first of each part, by the shares until one has no more.

    ValueError unless n >= 1.
    """
    _check_count(n)
    if dataset.mixture is not None:
        index = dataset.mixture.first(n, [part.size for part in dataset.parts])
    else:
        index = range(n if dataset.size is None else min(n, dataset.size))
    return [dataset.prompt(i) for i in index], [rng.fold_in(seed, "take", i) for i in range(len(index))]


def _check_count(n: int) -> None:
    if n < 1:
        raise ValueError(f"prompts: expected to take at least 1, got {n}")
