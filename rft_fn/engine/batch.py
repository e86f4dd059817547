"""Rows of tokens that grow together, and what a model says of the next token of each."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
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
    """R rows of W tokens, and what the model knows of them."""

    way: Way
    tokens: Tensor  # [R, W]
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
        self.tokens = torch.cat([self.tokens, token[:, None]], -1)
        self.seen = torch.cat([self.seen, torch.ones_like(self.seen[:, :1])], -1)
        self.read(lm)

    def read(self, lm: nn.Module) -> None:
        """The logits after the tokens, of which a model with a state reads those that it has not read."""
        options: dict[str, Any] = {"use_cache": self.way.rows is not None}
        new = slice(None)
        if self.state is not None:
            options[self.name] = self.state
            new = slice(-1, None)
        if self.way.padded:
            mask = self.seen.long()
            options["attention_mask"] = mask if self.way.grows else mask[:, new]
        if "logits_to_keep" in inspect.signature(lm.forward).parameters:
            options["logits_to_keep"] = 1
        position = (self.seen.long().cumsum(-1) - 1).clamp(min=0)
        out = lm(input_ids=self.tokens[:, new], position_ids=position[:, new], **options)
        self.logits = out.logits[:, -1]
        if self.way.rows is not None:
            self.name, self.state = states.found_in(out) or ("", None)


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
