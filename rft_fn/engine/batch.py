"""Rows of tokens that grow together, and what a model says of the next token of each."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.engine import state as states

__all__ = ["Batch", "Way", "start"]


class Way(NamedTuple):
    """How a model is given rows."""

    rows: states.Rows | None  # where its state has rows; None: all tokens anew for each new one
    padded: bool = False  # rows of different lengths together, padded on the left
    grows: bool = True  # whether its state has a place for each token, padding too
    single: bool = False  # one row at a time


@dataclass
class Batch:
    """R rows of W tokens, as far as the next forward needs them."""

    way: Way
    tokens: Tensor  # [R, w] that are not read: the last of W with a state, else all
    seen: Tensor  # [R, W] bool, False on the padding
    logits: Tensor  # [R, V] of the next token
    name: str = ""  # by which the model takes its state
    state: Any = None

    def take(self, index: Tensor) -> None:
        """Only the rows `index` [R'], which may repeat, from now on."""
        self.tokens, self.seen, self.logits = (x[index] for x in (self.tokens, self.seen, self.logits))
        if self.way.rows is not None:
            self.state = states.select(self.state, self.way.rows, index)

    def append(self, lm: nn.Module, token: Tensor) -> None:
        """Read one more token [R] of each row."""
        new = token[:, None]
        if self.way.rows is None:
            new = torch.cat([self.tokens, new], -1)
        self.tokens = new
        self.seen = torch.cat([self.seen, torch.ones_like(self.seen[:, :1])], -1)
        self.read(lm)

    def read(self, lm: nn.Module) -> None:
        """The logits after the tokens, and the state of the model if it is used."""
        width = self.tokens.shape[1]
        options: dict[str, Any] = {"use_cache": self.way.rows is not None}
        if self.state is not None:
            options[self.name] = self.state
        if self.way.padded:
            mask = self.seen.long()
            options["attention_mask"] = mask if self.way.grows else mask[:, -width:]
        if _can_keep_last(type(lm)):
            options["logits_to_keep"] = 1
        left = torch.arange(width, 0, -1, device=self.seen.device)
        position = (self.seen.sum(-1, keepdim=True) - left).clamp(min=0)
        out = lm(input_ids=self.tokens, position_ids=position, **options)
        self.logits = out.logits[:, -1]
        if self.way.rows is not None:
            self.name, self.state = states.found_in(out) or ("", None)


@cache
def _can_keep_last(model: type[nn.Module]) -> bool:
    """Whether a model can leave out the logits of all tokens but the last."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def start(lm: nn.Module, way: Way, prompts: Sequence[Sequence[int]], n: int, pad: int) -> Batch:
    """The batch of n rows of each prompt, side by side; each prompt is read once. Without `way.padded` the
    prompts are of one length."""
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=lm.device)
    seen = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=lm.device)
    batch = Batch(way, tokens, seen, logits=torch.empty(0))
    batch.read(lm)
    if n > 1:
        batch.take(torch.arange(len(prompts), device=lm.device).repeat_interleave(n))
    return batch
