"""Scalar reward models as rewards: prompts and responses in the form that a model was trained on.

apply, params = st.bind(rm)
score_rows = partial(st.score, apply, params, fields=("score",))
helpful = rft.reward.scalar(score_rows, rm.heads, reading=rft.reward.Reading(own), head="helpful")
score = rft.reward.weighted(helpful=(helpful, 1.0))
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rft_fn import packing, reward_shaping, tree
from rft_fn.data.chat import Chat
from rft_fn.data.messages import opened
from rft_fn.data.processing import Processing
from rft_fn.data.prompts import Prompt
from rft_fn.data.responses import render
from rft_fn.model import Head, calibrated
from rft_fn.reward.reward_record import Reward
from rft_fn.types import Experience, Rollout, TokenOut

__all__ = ["Reading", "ScalarReward", "check_budget", "reads_alike", "scalar", "steps_of"]

_STEPS = {
    "last": reward_shaping.steps_last,
    "min": reward_shaping.steps_min,
    "product": reward_shaping.steps_product,
}


ScoreRows = Callable[[Experience, int], TokenOut]
"""Scores rows, at most a budget of tokens at once, on all ranks together; `Strategy.score` makes one.

Returns `score` [B, S, H], the same on every rank.
"""


@dataclass(frozen=True)
class Reading:
    """How a reward model reads a prompt and a response.

    Where `tokenizer` makes the same ids of a text as the rollout's, it reads the prompt as the policy saw it,
    then the sampled tokens. Otherwise the prompt is made anew by this tokenizer's chat template, and the text
    of the response follows, with the end of a turn unless the response was truncated. Text in a response is
    never a special token.

    With `separator`, for a process reward model, the response is always made anew: each step is encoded
    separately, as `data.steps_from_rows` does it, and scored at its last token.
    """

    tokenizer: Any
    system: str | None = None  # the system prompt of questions, as data.from_rows has it
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    processing: Processing | None = None  # of a model that sees or hears; without it media are left out
    window: int | None = None  # most tokens of a row
    separator: str | None = None  # between steps; "": each character is one; None: no steps

    def rows(self, rollout: Rollout, prompts: Sequence[Prompt], tokenizer: Any) -> Experience:
        """Return the rows [B, S] to be scored. ValueError for one that does not fit into the window."""
        shown = any(p.sources for p in prompts)
        alike = reads_alike(self.tokenizer, tokenizer) and (self.processing is not None or not shown)
        if alike and self.separator is None:
            ids = self._sampled(rollout)
            self._check(ids)
            return tree.replace(packing.scored(ids), media=rollout.media)
        rows, ends = self._rendered(rollout, prompts, tokenizer)
        self._check([ids for ids, _ in rows])
        return packing.scored(rows, ends=ends)

    def _sampled(self, rollout: Rollout) -> list[list[int]]:
        """Return the ids of each row of a rollout.

        A placeholder of an image or a sound ends a response that samples it, but here it would ask for one
        more: such a response has the end of a turn in its place, as it has in training.
        """
        special = {*self.tokenizer.all_special_ids}
        end = self._end()
        rows = []
        for tokens, mask, n in zip(rollout.tokens, rollout.mask, rollout.length.tolist(), strict=True):
            ids = tokens[:n].tolist()
            if mask[n - 1] and ids[-1] in special:
                ids[-1] = end[-1]
            rows.append(ids)
        return rows

    def _rendered(
        self, rollout: Rollout, prompts: Sequence[Prompt], tokenizer: Any
    ) -> tuple[list[tuple[list[int], Any]], list[list[int]]]:
        """Return (ids by the model's tokenizer with media or None, the scored positions) of each row."""
        owners = rollout.group.tolist()
        asked = {i: self._prompt(prompts[i]) for i in dict.fromkeys(owners)}
        rows = []
        ends = []
        pairs = zip(owners, rollout.tokens, rollout.mask, rollout.truncated.tolist(), strict=True)
        for i, tokens, mask, truncated in pairs:
            text = tokenizer.decode(tokens[mask], skip_special_tokens=True)
            before, media = asked[i]
            ids = list(before)
            at = []
            for step in self._steps(text, truncated):
                ids += step
                at.append(len(ids) - 1)
            rows.append((ids, media))
            ends.append(at or [len(ids) - 1])  # a response of no tokens
        return rows, ends

    def _steps(self, text: str, truncated: bool) -> list[list[int]]:
        """Return the ids of each step of a response, which is one without a separator; none is empty."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
        steps = [encode(part) for part in steps_of(text, self.separator)]
        if not truncated:
            steps[-1] = [*steps[-1], *self._end()]
        return [ids for ids in steps if ids]

    def _end(self) -> list[int]:
        """Return the ids that end a response in training."""
        return Chat(self.tokenizer, self.chat_template_kwargs).turn_end()

    def _prompt(self, prompt: Prompt) -> tuple[list[int], Any]:
        """Return (ids, tensors of media or None) of a prompt that is to be answered."""
        seen = bool(prompt.sources) and self.processing is not None
        if prompt.messages is None and not seen:
            return render(
                self.tokenizer,
                prompt.text,
                system=self.system,
                chat_template_kwargs=self.chat_template_kwargs,
            ), None

        turns = [dict(turn) for turn in prompt.messages or ()]
        if not turns:
            content: list[dict[str, Any]] = [{"type": x.kind, x.kind: x} for x in prompt.sources]
            content.append({"type": "text", "text": prompt.text})
            turns = list(opened([{"role": "user", "content": content}], self.system))
        chat = Chat(self.tokenizer, self.chat_template_kwargs, self.processing)
        if not seen:
            return chat.ids(turns, ask=True), None
        made = chat.encoded(turns, ask=True)
        return list(made.ids), made.media

    def _check(self, rows: Sequence[Sequence[int]]) -> None:
        for row, ids in enumerate(rows):
            if self.window is not None and len(ids) > self.window:
                raise ValueError(
                    f"reward model: expected at most {self.window} tokens, its window, got {len(ids)} of row "
                    f"{row}; shorten prompts or max_new"
                )


def steps_of(text: str, separator: str | None) -> list[str]:
    """Split a text into steps, at least one, with their trailing separators; joined they are the text.

    Each character is a step with the separator "", and the whole text with None.
    """
    if separator is None:
        return [text]
    if not separator:
        return list(text) or [text]
    steps = [""]
    begun = False  # the last step has text that is no separator
    for number, part in enumerate(text.split(separator)):
        if number:
            steps[-1] += separator
        if part and begun:
            steps.append("")
        steps[-1] += part
        begun = begun or bool(part)
    return steps


def reads_alike(a: Any, b: Any) -> bool:
    """Return whether two tokenizers make the same ids: their vocabulary, template and end are equal."""
    if a is b:
        return True
    if a.eos_token_id != b.eos_token_id or a.chat_template != b.chat_template:
        return False
    return a.get_vocab() == b.get_vocab()


class _Model:
    """The calibrated scores [B, H] of the heads of a model, of the last rollout that it was asked about."""

    def __init__(self, score: ScoreRows, reading: Reading, budget: int, steps: str):
        self.score = score
        self.reading = reading
        self.budget = budget
        self.steps = steps
        self.last: weakref.ref[Rollout] | None = None
        self.rows: Experience | None = None
        self.cached: Tensor | None = None

    def read(self, rollout: Rollout, prompts: Sequence[Prompt], tokenizer: Any) -> Experience:
        """Return the rows of a rollout."""
        if self.rows is None or self.last is None or self.last() is not rollout:
            self.cached = None
            self.rows = self.reading.rows(rollout, prompts, tokenizer)
            self.last = weakref.ref(rollout)
        return self.rows

    def scores(
        self, rollout: Rollout, prompts: Sequence[Prompt], tokenizer: Any, heads: Sequence[Head]
    ) -> Tensor:
        """Return the scores [B, H] of a rollout; one forward pass serves all heads."""
        rows = self.read(rollout, prompts, tokenizer)
        if self.cached is None:
            out = self.score(rows, self.budget)
            if out.score is None:
                raise ValueError("score: expected the outputs of a reward model, got one without scores")
            self.cached = self._of_rows(out.score, rows.mask, heads)
        return self.cached

    def _of_rows(self, score: Tensor, mask: Tensor, heads: Sequence[Head]) -> Tensor:
        """Return the scores [B, H] of whole rows by those of their steps, [B, S, H] in mask."""
        if self.steps != "product":  # of probabilities, which raw scores give
            score = calibrated(score, heads)
        together = _STEPS[self.steps]
        return torch.stack([together(own, mask) for own in score.unbind(-1)], -1)


@dataclass(frozen=True, eq=False)
class ScalarReward(Reward):
    """One head of a scalar reward model: a joint reward, made by `scalar`."""

    model: "_Model | None" = None
    heads: tuple[Head, ...] = ()  # of the model

    def head(self, name: str) -> "ScalarReward":
        """Return another head of the same model: both together need one forward pass."""
        assert self.model is not None
        return _of_head(self.model, self.heads, name)


def _of_head(model: _Model, heads: tuple[Head, ...], name: str) -> ScalarReward:
    """Return the reward of one head of a model."""
    index = head_index(heads, name)

    def reward(rollout: Rollout, prompts: Sequence[Prompt], tokenizer: Any, /) -> Tensor:
        return model.scores(rollout, prompts, tokenizer, heads)[:, index].float()

    return ScalarReward(
        fn=reward, name=heads[index].name, joint=True, prepare=model.read, model=model, heads=heads
    )


def scalar(
    score: ScoreRows,
    heads: Sequence[Head],
    *,
    reading: Reading,
    head: str = "",
    budget: int = 4096,
    steps: str = "last",
) -> ScalarReward:
    """Return the reward of a scalar reward model: (raw score - shift) / scale of one of its heads.

    `score` is a function (rows, budget) of `Strategy.score`, which shares the rows out to the ranks. `heads`
    are the model's. `head` names one, and may be left out of a model with one. `reading` says how prompts and
    responses become rows. At most `budget` tokens go through the model at once.

    The reward of a process reward model is the score of the `last` step, the `min` over all steps, or the
    `product` of the probabilities that they are right, sigmoid(raw score); see `reward_shaping.steps_min`.
    `reading.separator` says what a step is. ValueError for an unknown head, for a budget that is no whole
    number above 0, and for steps without a separator.
    """
    check_budget(budget)
    separator = reading.separator
    if steps not in _STEPS:
        raise ValueError(f"steps: expected one of {', '.join(_STEPS)}, got {steps!r}")
    if separator is None and steps != "last":
        raise ValueError(f"steps: expected a separator of the steps beside {steps!r}, got none")
    if separator is not None and not isinstance(separator, str):
        raise ValueError(f"separator: expected text, got {separator!r}")
    return _of_head(_Model(score, reading, budget, steps), tuple(heads), head)


def check_budget(budget: Any) -> None:
    """Raise ValueError for a budget that is no whole number above 0."""
    if not isinstance(budget, int) or budget < 1:
        raise ValueError(f"budget: expected a whole number above 0, got {budget!r}")


def head_index(heads: Sequence[Head], name: str) -> int:
    """Return the index of a head by its name, which may be "" for the only one. ValueError without it."""
    names = [head.name for head in heads]
    if not name and len(names) == 1:
        return 0
    if name not in names:
        raise ValueError(f"head: expected one of {', '.join(names)}, got {name!r}")
    return names.index(name)
