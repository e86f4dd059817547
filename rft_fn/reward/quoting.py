"""Quotes the texts that a judge is shown, so that none of them can end its own quotation.

A policy that is rewarded by a judge learns whatever moves it. What the policy wrote is data: it may hold the
delimiters of the question, a verdict, or the special tokens of the judge's chat template. A quote takes the
first two out of reach; `asking` sees to the tokens.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rft_fn import rng
from rft_fn.data.media import Medium
from rft_fn.reward.convention import Messages, text
from rft_fn.reward.verdicts import Match

__all__ = [
    "Answers", "Batch", "Quote", "as_json", "first_said", "flat", "key_of", "make_batch", "markup",
    "read_flags", "row_of",
]  # fmt: skip


# ---------- what a judge is asked about, and what it answered: records, and functions of them


_KEPT = 2000  # characters of an answer that are kept for trajectories.jsonl


class Batch(NamedTuple):
    """What is judged; every sequence has B entries."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    groups: Sequence[Hashable]  # equal for completions of one prompt
    keys: Sequence[int]
    media: Sequence[Sequence[Medium]]


class Answers(NamedTuple):
    """The answers of a judge to Q questions, K to each."""

    verdicts: Tensor  # [Q, K] float64; NaN where there is none
    said: list[list[str]]  # Q lists of K texts; none for a question that was not asked
    cut_off: int
    too_long: int


def make_batch(
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    groups: Sequence[int] | None,
    keys: Sequence[int] | None,
    columns: Mapping[str, Any],
    media: Sequence[Sequence[Medium]],
) -> Batch:
    """A batch as texts; without keys they are made of the texts, without groups equal prompts are one."""
    asked = [_transcript(prompt) for prompt in prompts]
    answered = [text(completion) for completion in completions]
    if keys is None:
        keys = [rng.fold_in(0, *both) for both in zip(asked, answered, strict=True)]
    return Batch(asked, answered, columns, groups or asked, keys, media)


def _transcript(prompt: str | Messages) -> str:
    """A prompt as text; a conversation of several turns has the role in front of each."""
    if isinstance(prompt, str) or len(prompt) == 1:
        return text(prompt)
    return "\n\n".join(f"{turn.get('role', '')}: {text([turn])}" for turn in prompt)


def key_of(match: Match, keys: Sequence[int]) -> int:
    """The key of a question: of the responses in it, and of their places."""
    names: list[int | str] = []
    for side in match:
        if side is None:
            names.append("none")
        else:
            names.append(keys[side])
    return rng.fold_in(0, "judge", *names)


def row_of(match: Match) -> int:
    """The completion whose prompt and columns a question has."""
    for side in match:
        if side is not None:
            return side
    raise ValueError("match: expected a completion, got none")


def read_flags(answers: Answers) -> list[bool]:
    """Of each answer whether it has a verdict, in the order of `said`."""
    found = []
    for row, said in zip(answers.verdicts.tolist(), answers.said, strict=True):
        found += [x == x for x in row[: len(said)]]
    return found


def first_said(answers: Answers, matches: Sequence[Match], count: int) -> list[str]:
    """The first answer about each completion; "" where there is none."""
    found = [""] * count
    for match, said in zip(matches, answers.said, strict=True):
        for side in match:
            if side is not None and said and not found[side]:
                found[side] = said[0][:_KEPT]
    return found


# ---------- quotes the texts that a judge is shown, so that none of them can end its own quotation


class Quote(Protocol):
    """Quotes a text."""

    def __call__(self, text: str, /) -> str:
        """The text with none of the characters that delimit it in a form's template."""
        ...


def markup(text: str) -> str:
    """The text as XML writes it, with &amp; for & and &lt; for <, so that it has no tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def as_json(text: str) -> str:
    r"""The text as a JSON string, in quotation marks, with \u003c for <."""
    return json.dumps(text, ensure_ascii=False).replace("<", "\\u003c")


def flat(text: str) -> str:
    """The text with "," for ":", which ends each part of a terse question."""
    return text.replace(":", ",")
