"""Scalar reward models on a server: texts that came over HTTP, as a rollout for `JointReward`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rft_fn.data import Prompt
from rft_fn.data.media import Medium
from rft_fn.reward import text
from rft_fn.reward.calling import noted
from rft_fn.reward.combine import Weighted, joint_names
from rft_fn.reward.convention import Messages
from rft_fn.reward.remote.protocol import Batch
from rft_fn.types import Rollout

__all__ = ["as_rollout", "joint_values"]


class Texts:
    """A tokenizer whose tokens are the numbers of whole texts.

    A reward model sees that it is not its own, and makes ids of the texts by its own.
    """

    eos_token_id = None
    chat_template = None

    def __init__(self, texts: list[str]):
        self.texts = texts

    def get_vocab(self) -> dict[str, int]:
        """The texts and their numbers."""
        return {x: i for i, x in enumerate(self.texts)}

    def decode(self, ids: Tensor, skip_special_tokens: bool = False) -> str:
        """The text of a row: it has one token."""
        return self.texts[int(ids[0])]


def joint_values(score: Weighted, batch: Batch) -> dict[str, Tensor]:
    """The values [B] of the joint rewards of a score, by name."""
    found: dict[str, Tensor] = {}
    rollout, prompts, tokenizer = as_rollout(batch)
    for name in joint_names(score):
        score.running = name
        fn: Any = score.components[name][0]
        with noted(name):
            found[name] = fn(rollout, prompts, tokenizer)
    return found


def as_rollout(batch: Batch) -> tuple[Rollout, list[Prompt], Texts]:
    """(a rollout whose row b is completion b in one token, the prompt of each row, its tokenizer)."""
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
    """The prompt of a row, with its media as files."""
    sources = tuple(Medium(x["kind"], x.get("bytes", x.get("url"))) for x in media)
    if isinstance(asked, str):
        return Prompt([], asked, {}, index, sources=sources)
    return Prompt([], text(asked), {}, index, messages=asked, sources=sources)
