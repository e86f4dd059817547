"""Preference pairs: a chosen and a rejected response to a prompt, from files, the hub or built-in tasks.

A pair is drawn like a prompt: `data.draw(data.load(..., kind=data.PAIRS), n, step, seed)`.
"""

import random
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rft_fn import rng
from rft_fn.data import tasks
from rft_fn.data.chat import Chat, Lesson
from rft_fn.data.messages import Conversation, are_messages, opened, tools_of, turns_of
from rft_fn.data.prompts import Dataset, checked, longest_token
from rft_fn.data.report import TooLong
from rft_fn.data.rows import Unfit, place_of
from rft_fn.data.template import fill, is_empty, render

__all__ = ["Pair", "pairs_from_rows", "pairs_from_task", "wrong_answer"]


class Pair(NamedTuple):
    """A prompt with the chosen and with the rejected response: their tokens, and which are the response."""

    chosen: Lesson
    rejected: Lesson
    columns: Mapping[str, Any]  # the row that it was made of
    index: int  # in its data set


class _Recipe(NamedTuple):
    """How a pair is made of a row, and what limits it."""

    tokenizer: Any
    template: str
    chosen: str
    rejected: str
    system: str | None
    max_length: int
    max_tokens: int | None
    messages: Sequence[str] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})

    def check(self) -> None:
        """ValueError for what no row could be used with."""
        if self.messages and len(self.messages) not in (2, 3):
            raise ValueError(
                "messages: expected the columns of prompt, chosen and rejected, or chosen and rejected where "
                f"these begin with the prompt, got {', '.join(self.messages)}"
            )
        if self.messages and not self.tokenizer.chat_template:
            raise ValueError(
                "messages: expected a tokenizer with a chat template, got one without; take a model that has "
                "one, or text by --template"
            )
        Chat(self.tokenizer, self.kwargs).check()

    def make(self, row: Mapping[str, Any], place: str, index: int, widest: int) -> Pair:
        """The pair of a row. Unfit for one that cannot be used, TooLong for one above max_length.

        `widest` is the length of the longest token [characters]: a text that could not fit whatever its
        tokens are is not tokenised.
        """
        if self.messages:
            chosen, rejected = self._of_messages(row, place)
        else:
            chosen, rejected = self._of_text(row, place, widest)
        if chosen == rejected:
            raise Unfit(place, "the chosen and the rejected response are the same")
        longest = max(len(chosen.ids), len(rejected.ids))
        if longest > self.max_length:
            raise TooLong(f"{longest} tokens")
        inputs = len(chosen.ids) + len(rejected.ids) - 2  # the last token of each is only a target
        if self.max_tokens is not None and inputs > self.max_tokens:
            raise Unfit(
                place, f"the pair has {inputs} tokens, above {self.max_tokens}: a pack holds both sides"
            )
        return Pair(chosen, rejected, row, index)

    def _of_text(self, row: Mapping[str, Any], place: str, widest: int) -> tuple[Lesson, Lesson]:
        """Both sides of a row of text."""
        self._refuse_messages(row, place)
        prompt, chosen, rejected = self._texts(row, place)
        for name, text in (("prompt", prompt), ("chosen response", chosen), ("rejected response", rejected)):
            if is_empty(text):
                raise Unfit(place, f"the {name} is empty")
        size = len(prompt) + max(len(chosen), len(rejected))
        if size > self.max_length * widest:
            raise TooLong(f"{size} characters")
        if self.template:
            ids = render(self.tokenizer, prompt, system=self.system, chat_template_kwargs=self.kwargs)
        else:
            ids = list(self.tokenizer.encode(prompt))
        return self._lesson(ids, chosen), self._lesson(ids, rejected)

    def _texts(self, row: Mapping[str, Any], place: str) -> tuple[str, str, str]:
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

    def _lesson(self, prompt: list[int], response: str) -> Lesson:
        answer = [*self.tokenizer.encode(response, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Lesson([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))

    def _refuse_messages(self, row: Mapping[str, Any], place: str) -> None:
        """Unfit, with what to type, for columns of messages under the names that TRL gives them."""
        found = [name for name in ("prompt", "chosen", "rejected") if name in row and are_messages(row[name])]
        if {"chosen", "rejected"} <= set(found):
            raise Unfit(place, f"{found[-1]!r} holds messages: --messages {' '.join(found)}")

    def _of_messages(self, row: Mapping[str, Any], place: str) -> tuple[Lesson, Lesson]:
        """Both sides of a row of messages."""
        try:
            prompt, chosen, rejected = self._turns(row)
            tools = tools_of(row)
            talks = [Conversation([*prompt, *turns], len(prompt), tools) for turns in (chosen, rejected)]
            return self._spoken(talks[0], "chosen"), self._spoken(talks[1], "rejected")
        except ValueError as error:
            raise Unfit(place, str(error)) from None

    def _turns(self, row: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """(prompt, chosen, rejected): of two columns the prompt is the turns that both begin with."""
        columns = [turns_of(row, name) for name in self.messages]
        if len(columns) == 3:
            prompt, chosen, rejected = columns
            return opened(prompt, self.system), chosen, rejected
        chosen, rejected = columns
        if chosen == rejected:
            raise ValueError("the chosen and the rejected response are the same")
        same = 0
        while chosen[same : same + 1] == rejected[same : same + 1]:
            same += 1
        if same == 0:
            raise ValueError(
                f"columns {self.messages[0]!r} and {self.messages[1]!r} begin with different turns: expected "
                "the prompt in both, or its column named before them"
            )
        return opened(chosen[:same], self.system), chosen[same:], rejected[same:]

    def _spoken(self, talk: Conversation, side: str) -> Lesson:
        """What the assistant says behind the prompt. ValueError where the template renders that in pieces."""
        if talk.start == len(talk.turns):
            raise ValueError(f"the {side} response is missing: the other column begins with all of its turns")
        role = talk.turns[talk.start]["role"]
        if role != "assistant":
            raise ValueError(f"the {side} response: expected it to begin with the assistant, got {role}")
        found = Chat(self.tokenizer, self.kwargs).lessons(talk, "all")
        if len(found) > 1:
            raise ValueError(
                f"the {side} response: expected one sequence, but the chat template renders earlier turns in "
                f"other ways once later ones follow, got {len(found)}"
            )
        return found[0]


def shared_start(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two whole texts: the prompt is the words that both begin with.

    Each response keeps at least its last word, and the space before its first.
    """
    same = 0
    while chosen[same : same + 1] == rejected[same : same + 1] != "":
        same += 1
    # a word that both have begun, or that ends one of them, belongs to the responses
    cut = re.search(r"\s*\S*$", chosen[:same]).start()  # type: ignore[union-attr]
    return chosen[:cut], chosen[cut:], rejected[cut:]


def pairs_from_rows(
    rows: Sequence[Mapping[str, Any]],
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
    name: str = "rows",
) -> Dataset:
    """The pairs of rows: `template`, `chosen` and `rejected` make their texts of a row's columns.

    With an empty template chosen and rejected are whole texts, and the prompt is the words that both begin
    with. With `messages` the columns of that name hold conversations: (prompt, chosen, rejected), or (chosen,
    rejected) where both begin with the turns of the prompt; the response is what the assistant says behind
    them, by the tokenizer's chat template, which gets `chat_template_kwargs` and the row's `tools`.

    Every row is looked at now: the columns must be there and hold something, the responses must differ, and
    both, each with the prompt, must fit into a pack of `max_tokens`. Pairs with more than `max_length` tokens
    in prompt and response are left out, with one warning.

    ValueError for no rows, with the count and the places of the first rows that cannot be used, or when no
    pair fits.
    """
    recipe = _Recipe(tokenizer, template, chosen, rejected, system, max_length, max_tokens)
    recipe = recipe._replace(messages=messages, kwargs=chat_template_kwargs or {})
    recipe.check()
    widest = longest_token(tokenizer)

    def pair(i: int) -> Pair:
        return recipe.make(dict(rows[i]), place_of(rows, i, name), i, widest)

    return checked(rows, pair, name, option="max_length", most=max_length, what="pair")


# ---------------------------------------------------------------------------------------- the built-in tasks


def wrong_answer(task: tasks.Task, row: Mapping[str, str], random_: random.Random) -> str:
    """An answer that is not right: half the time a guess, else the right one with one mistake.

    A preference teaches only by what it shows: what a policy may emit and no rejected response resembles, it
    may learn to emit. So mistakes are of several kinds, and some are no longer of the answer's form.
    """
    while True:
        if random_.random() < 0.5:
            text = task.guess(random_, row)
        else:
            text = random_.choice(_MISTAKES)(row["answer"], random_)
        if text and task.verify(text, row) < 1:
            return text


def _change(text: str, random_: random.Random) -> str:
    """One character of the text is another."""
    at = random_.randrange(len(text))
    return text[:at] + random_.choice(tasks.ALPHABET) + text[at + 1 :]


def _lose(text: str, random_: random.Random) -> str:
    """One character of the text is missing."""
    at = random_.randrange(len(text))
    return text[:at] + text[at + 1 :]


def _repeat(text: str, random_: random.Random) -> str:
    """One character of the text is there twice."""
    at = random_.randrange(len(text))
    return text[: at + 1] + text[at:]


def _swap(text: str, random_: random.Random) -> str:
    """Two neighbours have changed places."""
    at = random_.randrange(len(text))
    return text[:at] + text[at : at + 2][::-1] + text[at + 2 :]


_MISTAKES = (_change, _lose, _repeat, _swap)


def pairs_from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    template: str = "{prompt}",
    chosen: str = "{chosen}",
    rejected: str = "{rejected}",
    system: str | None = None,
    max_length: int = 512,
    max_tokens: int | None = None,
    messages: Sequence[str] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Dataset:
    """A built-in task as an endless data set of pairs; the options are those of `pairs_from_rows`.

    Its rows have the columns of the task, and `prompt`, the terse form of the question, `chosen`, the right
    answer, and `rejected`, a `wrong_answer` drawn by seed and index. ValueError for a task or a level that
    does not exist, and, when it is drawn, for a pair that cannot be used.
    """
    found = tasks.get_task(task)
    recipe = _Recipe(tokenizer, template, chosen, rejected, system, max_length, max_tokens)
    recipe = recipe._replace(messages=messages, kwargs=chat_template_kwargs or {})
    recipe.check()
    widest = longest_token(tokenizer)

    def pair(index: int) -> Pair:
        row = found.generate(seed, index, level)
        random_ = random.Random(rng.fold_in(seed, "rejected", task, level, index))
        sides = {"chosen": row["answer"], "rejected": wrong_answer(found, row, random_)}
        place = f"{task}, pair {index}"
        try:
            return recipe.make({**row, "prompt": row["short"], **sides}, place, index, widest)
        except TooLong as long:
            raise ValueError(f"max_length: {place} has {long}, above {max_length} tokens; raise it") from None

    pair(0)  # what is wrong with the arguments is said now
    return Dataset(f"{task}:{level}", None, pair)
