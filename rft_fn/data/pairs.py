"""Preference pairs: a chosen and a rejected response to one prompt.

A pair is drawn like a prompt: `data.draw(data.load(..., kind=data.PAIRS), n, step, seed)`.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rft_fn.data import tasks
from rft_fn.data.chat import Chat
from rft_fn.data.dataset import Dataset
from rft_fn.data.lesson import Lesson, shared_prefix
from rft_fn.data.medium import columns_of
from rft_fn.data.messages import Turn, are_messages, turns_of
from rft_fn.data.processing import Processing
from rft_fn.data.recipe import make_dataset
from rft_fn.data.responses import Reading, labels_at, number, prompt_ids
from rft_fn.data.table import Endless, InvalidRow, Row, Table
from rft_fn.data.templates import fill, is_empty
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
    """Make the data set of the pairs of rows.

    `template`, `chosen` and `rejected` make their texts of a row's columns. With an empty template chosen and
    rejected are whole texts, and the prompt is the words that both begin with. With `messages` the columns of
    that name hold conversations: (prompt, chosen, rejected), or (chosen, rejected) where both begin with the
    turns of the prompt; the response is the assistant's turns after them, by the tokenizer's chat template,
    which gets `chat_template_kwargs` and the row's `tools`.

    `margin` names a column of numbers, by which the chosen response is better at least; rows without it have
    0. `preferences` names columns of numbers above 0 where the chosen response is the better one in that
    respect, below 0 where the rejected one is, and 0 where neither is: one for each head of a reward model.
    `unfinished` names a column that is true where the rejected response of text was cut off, and gets no end
    of sequence.

    Every row is looked at now: the columns must be there and hold something, the responses must differ, and
    both, each with the prompt, must fit into a pack of `max_tokens`, and each into `window`, the most tokens
    that the model reads. Pairs with more than `max_length` tokens in prompt and response are left out, with
    one warning.

    ValueError for no rows, with the count and the places of the first rows that cannot be used, or when no
    pair fits.
    """
    reading = Reading(
        chat=Chat(tokenizer, chat_template_kwargs or {}, processing),
        template=template,
        system=system,
        messages=messages,
        max_length=max_length,
        max_tokens=max_tokens,
        window=window,
    )
    reading.check(
        (2, 3),
        "the columns of prompt, chosen and rejected, or chosen and rejected where these begin with the "
        "prompt",
    )
    make = partial(
        _pair,
        reading,
        chosen=chosen,
        rejected=rejected,
        margin=margin,
        preferences=preferences,
        unfinished=unfinished,
    )
    recipe = reading.recipe("pair", make, {margin, unfinished, *preferences}, chosen, rejected)
    return make_dataset(rows, recipe, name, workers=workers)


def pairs_from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    negatives: Sequence[str] = (),
    unfinished: str = "unfinished",
    **options: Any,
) -> Dataset[Pair]:
    """Make an endless data set of pairs of a built-in task.

    The options are options of `pairs_from_rows`. Its rows have the columns of the task, and `prompt`, the
    terse form of the question, `chosen`, the right answer, and `rejected`, a `wrong_answer` drawn by seed and
    index, of the kind in `negative`. `negatives` are these kinds, each NAME or NAME=SHARE of
    `wrong_answers.NEGATIVES`: without them those that a policy is likely to emit, `wrong_answers.COVERING`
    for all that it may.

    ValueError for a task, a level or a kind that does not exist, and, when it is drawn, for a pair that
    cannot be used.
    """
    rows = task_rows(task, _both_answers, "rejected", level, seed, negatives)
    return pairs_from_rows(rows, tokenizer, name=f"{task}:{level}", unfinished=unfinished, **options)


def _both_answers(
    task: tasks.Task, row: tasks.TaskRow, random_: random.Random, mixture: Mapping[str, float] | None
) -> Row:
    """Return the right answer and a wrong one, and which kind of mistake that is."""
    rejected, kind = wrong_answer_of_kind(task, row, random_, mixture)
    return {"chosen": row["answer"], "rejected": rejected, "unfinished": kind == "cut", "negative": kind}


# ---------- the pair of a row


def _pair(
    reading: Reading,
    row: Row,
    place: str,
    index: int,
    *,
    chosen: str,
    rejected: str,
    margin: str,
    preferences: Sequence[str],
    unfinished: str,
) -> Pair:
    """Return the pair of a row. ValueError for one that cannot be used, TooLong for one above max_length."""
    if reading.messages:
        prompt, *responses = _turns(reading.messages, row)
        good, bad = reading.of_turns(
            row, place, prompt, responses, learned="all", names=("the chosen", "the rejected")
        )
    else:
        good, bad = _of_text(reading, row, place, chosen, rejected)
        if unfinished and row.get(unfinished):
            bad = bad._replace(ids=bad.ids[:-1], mask=bad.mask[:-1])
    if good[:2] == bad[:2]:
        raise ValueError("the chosen and the rejected response are the same")
    reading.check_fit([good, bad], "pair", targets=2, holds="both sides")

    # a table has None where a row has no number
    least = number(row[margin], margin) if margin and row.get(margin) is not None else 0.0
    preferred = labels_at(row, preferences) if preferences else (1.0,)
    if not any(preferred):
        raise ValueError(f"columns {', '.join(preferences)}: neither response is preferred in any")
    return Pair(good, bad, row, index, least, preferred)


def _of_text(reading: Reading, row: Row, place: str, chosen: str, rejected: str) -> list[Lesson]:
    """Return both sides of a row of text."""
    messages = [name for name in ("prompt", "chosen", "rejected") if name in row and are_messages(row[name])]
    if {"chosen", "rejected"} <= set(messages):
        raise ValueError(f"{messages[-1]!r} holds messages: --messages {' '.join(messages)}")
    if not reading.template and reading.chat.processing is not None and columns_of(row):
        raise ValueError("the row has media, for which the empty template has no place")

    names = ("the chosen response", "the rejected response")
    texts = [fill(chosen, row, place), fill(rejected, row, place)]
    if reading.template:
        try:
            prompt = fill(reading.template, row, place)
        except InvalidRow as error:
            if "no column" not in error.reason:
                raise
            remedy = "--template '' where both responses begin with the prompt"
            raise ValueError(f"{error.reason}; {remedy}") from None
        return reading.of_texts(row, place, prompt, texts, names)

    # the prompt of whole texts is no turn of a chat
    prompt, *texts = shared_start(*texts)
    if is_empty(prompt):
        raise ValueError("the template is empty, and both responses begin with no word in common")
    reading.check_texts(prompt, texts, names)
    reading.chat.check_text(f"{prompt}{texts[0]}{texts[1]}")
    ids = prompt_ids(reading.chat.tokenizer, prompt)
    end = [reading.chat.tokenizer.eos_token_id]
    return [reading.chat.verbatim(ids, text, end=end) for text in texts]


def _turns(messages: Sequence[str], row: Row) -> list[list[Turn]]:
    """Return prompt, chosen and rejected; of two columns the prompt is the turns that both begin with."""
    columns = [turns_of(row, name, media=True) for name in messages]
    if len(columns) == 3:
        return columns
    chosen, rejected = columns
    if chosen == rejected:
        raise ValueError("the chosen and the rejected response are the same")
    same = shared_prefix(chosen, rejected)
    if same == 0:
        raise ValueError(
            f"columns {messages[0]!r} and {messages[1]!r} begin with different turns: expected "
            "the prompt in both, or its column named before them"
        )
    return [chosen[:same], chosen[same:], rejected[same:]]


def shared_start(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return (prompt, chosen, rejected) of two whole texts.

    The prompt is the words that both begin with. Each response keeps at least its last word, and the space
    before its first.
    """
    same = shared_prefix(chosen, rejected)

    # a word that both have begun, or that ends one of them, belongs to the responses
    prompt = re.sub(r"\s*\S*$", "", chosen[:same])
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
