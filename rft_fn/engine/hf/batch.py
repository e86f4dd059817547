"""Rows of tokens that grow together, and a model's logits for the next token of each."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import repeat
from torch import Tensor, nn

from rft_fn.engine.hf import cache as caches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Batch", "Batching", "start"]


class Batching(NamedTuple):
    """How the rows of a batch are given to a model."""

    rows: caches.Rows | None  # the dimension of rows in its cache; None: no cache, all tokens are read again
    padded: bool = False  # rows of different lengths together, padded on the left
    grows: bool = True  # whether the cache has a place for each token, padding too
    single: bool = False  # one row at a time


@dataclass
class Batch:
    """R rows of W tokens, as far as the next forward needs them."""

    batching: Batching
    tokens: Tensor  # [R, w] not read yet: the last of W with a cache, else all
    seen: Tensor  # [R, W] bool, False on the padding
    logits: Tensor  # [R, V] of the next token
    name: str = ""  # by which the model takes its cache
    cache: Any = None

    def take(self, index: Tensor) -> None:
        """Keep only the rows `index` [R'], which may repeat."""
        self.tokens = self.tokens[index]
        self.seen = self.seen[index]
        self.logits = self.logits[index]
        if self.batching.rows is not None:
            self.cache = caches.select(self.cache, self.batching.rows, index)

    def append(self, lm: "PreTrainedModel", token: Tensor) -> None:
        """Read one more token [R] of each row."""
        new = token[:, None]
        if self.batching.rows is None:
            new = torch.cat([self.tokens, new], -1)
        self.tokens = new
        self.seen = torch.cat([self.seen, torch.ones_like(self.seen[:, :1])], -1)
        self.read(lm)

    def read(self, lm: "PreTrainedModel") -> None:
        """Run the model over the tokens: sets the logits, and the cache where it is used."""
        width = self.tokens.shape[1]
        options: dict[str, Any] = {"use_cache": self.batching.rows is not None}
        if self.cache is not None:
            options[self.name] = self.cache

        # the mask covers what the cache holds beside the new tokens
        if self.batching.padded:
            mask = self.seen.long()
            if not self.batching.grows:
                mask = mask[:, -width:]
            options["attention_mask"] = mask
        if _can_keep_last(type(lm)):
            options["logits_to_keep"] = 1

        # positions count the tokens of a row, so padding on the left does not shift them
        left = torch.arange(width, 0, -1, device=self.seen.device)
        position = (self.seen.sum(-1, keepdim=True) - left).clamp(min=0)
        out = lm(input_ids=self.tokens, position_ids=position, **options)
        self.logits = out.logits[:, -1]
        if self.batching.rows is not None:
            self.name, self.cache = caches.found_in(out) or ("", None)


@cache
def _can_keep_last(model: type[nn.Module]) -> bool:
    """Whether a model can leave out the logits of all tokens but the last."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def start(
    lm: "PreTrainedModel", batching: Batching, prompts: Sequence[Sequence[int]], n: int, pad: int
) -> Batch:
    """The batch of n rows of each prompt, side by side; each prompt is read once.

    Prompts have to be of one length unless `batching.padded`.
    """
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=lm.device)
    seen = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=lm.device)
    batch = Batch(batching, tokens, seen, logits=torch.empty(0))
    batch.read(lm)
    if n > 1:
        batch.take(repeat(torch.arange(len(prompts), device=lm.device), "p -> (p n)", n=n))
    return batch
