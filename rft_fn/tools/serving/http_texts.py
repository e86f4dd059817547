"""Texts that came over HTTP, as the rollout that a scalar reward model scores."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rft_fn.data import Prompt
from rft_fn.data.medium import Medium
from rft_fn.reward import text
from rft_fn.reward.calling import noted
from rft_fn.reward.combine import Weighted, joint_names
from rft_fn.reward.signature import Messages
from rft_fn.reward.wire import Batch
from rft_fn.types import Rollout

__all__ = ["as_rollout", "joint_values"]


class Texts:
    """A tokenizer with whole texts as tokens; the id of a token is the number of its text.

    A reward model sees that this is not its own tokenizer, and makes ids of the texts with its own.
    """

    eos_token_id = None
    chat_template = None

    def __init__(self, texts: list[str]):
        self.texts = texts

    def get_vocab(self) -> dict[str, int]:
        """Return the texts and their numbers."""
        return {x: i for i, x in enumerate(self.texts)}

    def decode(self, ids: Tensor, skip_special_tokens: bool = False) -> str:
        """Return the text of a row, which has one token."""
        return self.texts[int(ids[0])]


def joint_values(score: Weighted, batch: Batch) -> dict[str, Tensor]:
    """Return the values [B] of the joint rewards of a score, by name."""
    found: dict[str, Tensor] = {}
    rollout, prompts, tokenizer = as_rollout(batch)
    for name in joint_names(score):
        score.running = name
        with noted(name):
            found[name] = score.components[name][0].fn(rollout, prompts, tokenizer)
    return found


def as_rollout(batch: Batch) -> tuple[Rollout, list[Prompt], Texts]:
    """Return (rollout with completion b as the one token of row b, the prompt of each row, tokenizer)."""
    count = len(batch.completions)
    truncated = [bool(x) for x in batch.given.get("truncated") or [False] * count]
    media = batch.given.get("media") or [()] * count
    rows = torch.arange(count)
    rollout = Rollout(
        tokens=rows[:, None],
        mask=torch.ones(count, 1, dtype=torch.bool),
        logp=torch.zeros(count, 1),
        length=torch.ones(count, dtype=torch.long),
        truncated=torch.tensor(truncated),
        group=rows,
        version=torch.zeros(count, dtype=torch.long),
    )
    pairs = enumerate(zip(batch.prompts, media, strict=True))
    prompts = [_prompt(x, i, records) for i, (x, records) in pairs]
    return rollout, prompts, Texts([text(x) for x in batch.completions])


def _prompt(asked: str | Messages, index: int, media: list[Mapping[str, Any]]) -> Prompt:
    """Return the prompt of a row, with its media as files."""
    sources = tuple(Medium(x["kind"], x.get("bytes", x.get("url"))) for x in media)
    if isinstance(asked, str):
        return Prompt([], asked, {}, index, sources=sources)
    return Prompt([], text(asked), {}, index, messages=asked, sources=sources)
