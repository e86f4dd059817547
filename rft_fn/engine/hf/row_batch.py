"""Rows of tokens that grow together, and a model's logits for the next token of each.

Where a model's cache allows it, rows of different lengths are padded on the left, and others join them.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_fn.engine.hf import prompt_cache
from rft_fn.engine.hf.prompt_cache import (
    OPTION,
    Layer,
    Prompts,
    media_arguments,
    positions_ahead,
    shared_attention,
)
from rft_fn.engine.prompt_media import PromptMedia, text

__all__ = ["Batch", "Batching", "start"]


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Batching(NamedTuple):
    """The batching that a model is capable of, by a probe."""

    rows: prompt_cache.Rows | None  # the dimension of rows in its cache; None: all tokens are read again
    padded: bool = False  # rows of different lengths together, padded on the left
    grows: bool = True  # whether the cache has a place for each token, padding too
    single: bool = False  # one row at a time
    room: bool = False  # whether plain keys and values are kept in buffers with room for more
    joins: bool = False  # whether all of the cache is (needs `room`), so that rows may join longer ones
    shares: bool = False  # whether the samples of a prompt read it in one place (needs `joins`)
    fixed: bool = False  # whether steps of fixed shapes are right, by attention of ours (needs `joins`)
    switch: int | None = None  # tokens after which all are read anew, by other rotary factors (not `padded`)


@dataclass
class Batch:
    """R rows of W tokens, as far as the next forward needs them."""

    batching: Batching
    tokens: Tensor  # [R, w] not read yet: the last of W with a cache, else all
    seen: Tensor  # [R, W] bool, False on the padding
    before: Tensor  # [R], tokens of each before those W
    beyond: Tensor  # [axes, R], by how much positions are more than the number of tokens before them
    media: list[PromptMedia]  # R
    logits: Tensor  # [R, V] of the next token
    length: list[int]  # R, columns from the first token of each on; the host knows them without the device
    name: str = ""  # by which the model takes its cache
    cache: Any = None
    ragged: bool = True  # whether some row has padding
    most: int = 64  # tokens that a row may still be given, for the room of buffers
    prompts: Prompts | None = None  # shared by the rows: `seen` and the cache then leave them out
    every: Tensor | None = None  # [R, W] all tokens, where a switch is ahead

    def repeat(self, counts: Sequence[int]) -> None:
        """Put `counts` rows, side by side, in place of each; share the prompts where the model can."""
        of = [row for row, count in enumerate(counts) for _ in range(count)]
        if not self.batching.shares:
            if len(of) > len(counts):
                self.take(of)
            return
        layers = [Layer(*part.lift(len(of))) for part in prompt_cache.own(self.cache)]
        self.prompts = Prompts(layers, self.seen, of)
        self.before = self.seen.sum(-1)
        self._pick(of)
        self.length = [0] * len(of)
        self.seen = self.seen.new_empty(len(of), 0)
        self.ragged = False

    def take(self, index: Sequence[int]) -> None:
        """Keep only the rows `index`, which may repeat."""
        picked = self._pick(index)
        self.seen = self.seen[picked]
        if self.batching.rows is not None:
            moved = [place for place, row in enumerate(index) if place != row]
            self.cache = prompt_cache.select(self.cache, self.batching.rows, picked, moved)
        if self.prompts is not None:
            self.prompts.take(index)
        self._trim()

    def _pick(self, rows: Sequence[int]) -> Tensor:
        """Select rows of every per-row field; return them as a tensor."""
        index = torch.tensor(rows, dtype=torch.long, device=self.logits.device)
        self.tokens = self.tokens[index]
        self.every = None if self.every is None else self.every[index]
        self.before = self.before[index]
        self.beyond = self.beyond[:, index]
        self.media = [self.media[r] for r in rows]
        self.length = [self.length[r] for r in rows]
        self.logits = self.logits[index]
        return index

    def join(self, other: "Batch") -> None:
        """Append the rows of another batch after its prompts; both are of a model that `joins`."""
        width = max(self.seen.shape[1], other.seen.shape[1])
        self.seen = torch.cat([F.pad(x, (width - x.shape[1], 0)) for x in (self.seen, other.seen)])
        self.tokens = torch.cat([self.tokens[:, -1:], other.tokens[:, -1:]])
        self.before = torch.cat([self.before, other.before])
        self.beyond = torch.cat([self.beyond, other.beyond], 1)
        self.media = [*self.media, *other.media]
        self.length = [*self.length, *other.length]
        self.logits = torch.cat([self.logits, other.logits])
        prompt_cache.join(self.cache, other.cache)
        if self.prompts is not None and other.prompts is not None:
            self.prompts.join(other.prompts)
        self._trim()

    def _trim(self) -> None:
        """Drop the first columns where they are padding in every row."""
        if not self.batching.joins or not self.seen.shape[1]:
            return
        longest = max(self.length)
        empty = self.seen.shape[1] - longest if longest else 0
        if empty:
            self.seen = self.seen[:, empty:]
            for part in prompt_cache.own(self.cache):
                part.crop_left(empty)
        self.ragged = min(self.length) < self.seen.shape[1]

    def append(self, lm: "PreTrainedModel", token: Tensor) -> None:
        """Read one more token [R] of each row."""
        new = token[:, None]
        if self.batching.rows is None or self.every is not None:  # all tokens are to be read once more
            self.media = [own._replace(sampled=[*own.sampled, True]) for own in self.media]
        if self.batching.rows is None:
            new = torch.cat([self.tokens, new], -1)
        elif self.every is not None:
            self.every = torch.cat([self.every, new], -1)
            if self.every.shape[1] > (self.batching.switch or 0):
                # keys in the cache have the factors of short sequences
                new, self.cache, self.every = self.every, None, None
        self.tokens = new
        self.length = [size + 1 for size in self.length]
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(self.seen), 1)], -1)
        self.read(lm)

    def read(self, lm: "PreTrainedModel") -> None:
        """Run the model over the tokens: set the logits, and the cache where it is used."""
        width = self.tokens.shape[1]
        options: dict[str, Any] = {"use_cache": self.batching.rows is not None}
        if self.cache is not None:
            options[self.name] = self.cache

        # the mask covers what the cache holds and the new tokens; without padding there is none
        if self.batching.padded and self.ragged:
            mask = self.seen.long()
            options["attention_mask"] = mask if self.batching.grows else mask[:, -width:]
        if _can_keep_last(type(lm)):
            options["logits_to_keep"] = 1

        # with a cache media are read once: what became of them is in it
        options["position_ids"] = self.position()
        if self.cache is None:
            options |= media_arguments(lm, self.tokens, self.seen, self.media)
            if options["position_ids"].dim() == 3:
                self.beyond = positions_ahead(options["position_ids"], self.seen)
        if self.prompts is not None:
            options[OPTION] = self.prompts
        with nullcontext() if self.prompts is None else shared_attention(lm):
            out = lm(input_ids=self.tokens, **options)
        self.logits = out.logits[:, -1]
        if self.batching.rows is not None:
            first = self.cache is None
            self.name, self.cache = prompt_cache.cache_of(out)
            if first and self.batching.room:
                from rft_fn.engine.hf.buffers import make_room  # with transformers

                # shared attention is computed in float32 on a CPU, by products of buffers with gaps
                on_cpu = self.tokens.device.type == "cpu"
                make_room(self.cache, self.most, wide=self.batching.shares and on_cpu)

    def position(self) -> Tensor:
        """Return positions of `tokens` without media: [R, w], or [axes, R, w] after media."""
        # they count the tokens of a row, so padding on the left does not shift them
        width = self.tokens.shape[1]
        left = torch.arange(width, 0, -1, device=self.seen.device)
        count = self.before + self.seen.sum(-1)
        position = (count.unsqueeze(-1) - left).clamp(min=0)
        return position + self.beyond.unsqueeze(-1) if len(self.beyond) else position


@cache
def _can_keep_last(model: type[nn.Module]) -> bool:
    """Return whether a model can leave out the logits of all tokens but the last."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def start(
    lm: "PreTrainedModel",
    batching: Batching,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    pad: int,
    media: Sequence[PromptMedia] | None = None,
    most: int = 64,
) -> Batch:
    """Read prompts and their media once, and return a batch of `counts` rows of each, side by side.

    Prompts are of one length unless `batching.padded`. Buffers have room for `most` tokens of a row at the
    start, and grow where more come.
    """
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=lm.device)
    seen = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=lm.device)
    batch = Batch(
        batching=batching,
        tokens=tokens,
        seen=seen,
        before=tokens.new_zeros(len(prompts)),
        beyond=tokens.new_empty(0, len(prompts)),  # no axes
        media=list(media or text(prompts)),
        logits=torch.empty(0),
        length=[len(p) for p in prompts],
        most=most,
    )
    if batching.joins:
        batch.ragged = min(len(p) for p in prompts) < width
    if batching.switch is not None and width <= batching.switch:
        batch.every = tokens
    batch.read(lm)
    batch.repeat(counts)
    return batch
