"""Rows of tokens that grow together: their prefill, decode steps and place in the KV cache.

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

from rft_fn.engine.hf import cache_rows
from rft_fn.engine.hf.row_media import media_arguments, positions_ahead
from rft_fn.engine.hf.shared_prefix import OPTION, Layer, SharedPrefixes, shared_attention
from rft_fn.engine.prompt_media import PromptMedia, text

__all__ = ["Batch", "CacheSupport", "prefill"]


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CacheSupport(NamedTuple):
    """The batching that a model is capable of, by a probe."""

    rows: cache_rows.Rows | None  # the dimension of rows in its cache; None: all tokens are read again
    padded: bool = False  # rows of different lengths together, padded on the left
    grows: bool = True  # whether the cache has a place for each token, padding too
    single: bool = False  # one row at a time
    room: bool = False  # whether plain keys and values are kept in buffers with room for more
    joins: bool = False  # whether all of the cache is (needs `room`), so that rows may join longer ones
    shares: bool = False  # whether the samples of a prompt read it in one place (needs `joins`)
    fixed: bool = False  # whether steps of fixed shapes are right, by attention of ours (needs `joins`)
    fused: bool = False  # whether these are right by fused kernels (needs `fixed`)
    switch: int | None = None  # tokens after which all are read anew, by other rotary factors (not `padded`)


@dataclass
class Batch:
    """R rows of W tokens, as far as the next forward needs them."""

    batching: CacheSupport
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
    max_tokens: int = 64  # tokens that a row may still be given, for the room of buffers
    prompts: SharedPrefixes | None = None  # shared by the rows: `seen` and the cache then leave them out
    all_tokens: Tensor | None = None  # [R, W] all tokens, where a switch is ahead

    def repeat(self, counts: Sequence[int]) -> None:
        """Put `counts` rows, side by side, in place of each; share the prompts where the model can."""
        of = [row for row, count in enumerate(counts) for _ in range(count)]
        if not self.batching.shares:
            if len(of) > len(counts):
                self.take(of)
            return
        layers = cache_rows.buffered_layers(self.cache)
        prompts = [Layer(*layer.take_prompt_cache(len(of))) for layer in layers]
        self.prompts = SharedPrefixes(prompts, self.seen, of)
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
            self.cache = cache_rows.select(self.cache, self.batching.rows, picked, moved)
        if self.prompts is not None:
            self.prompts.take(index)
        self._trim()

    def _pick(self, rows: Sequence[int]) -> Tensor:
        """Select rows of every per-row field; return them as a tensor."""
        index = torch.tensor(rows, dtype=torch.long, device=self.logits.device)
        self.tokens = self.tokens[index]
        self.all_tokens = None if self.all_tokens is None else self.all_tokens[index]
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
        cache_rows.join(self.cache, other.cache)
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
            for part in cache_rows.buffered_layers(self.cache):
                part.crop_left(empty)
        self.ragged = min(self.length) < self.seen.shape[1]

    def decode_step(self, lm: "PreTrainedModel", token: Tensor) -> None:
        """Run one decode step: read one more token [R] of each row."""
        new = token[:, None]
        if self.batching.rows is None or self.all_tokens is not None:  # all tokens are to be read once more
            self.media = [own._replace(sampled=[*own.sampled, True]) for own in self.media]
        if self.batching.rows is None:
            new = torch.cat([self.tokens, new], -1)
        elif self.all_tokens is not None:
            self.all_tokens = torch.cat([self.all_tokens, new], -1)
            if self.all_tokens.shape[1] > (self.batching.switch or 0):
                # keys in the cache have the factors of short sequences
                new, self.cache, self.all_tokens = self.all_tokens, None, None
        self.tokens = new
        self.length = [size + 1 for size in self.length]
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(self.seen), 1)], -1)
        self.forward(lm)

    def forward(self, lm: "PreTrainedModel") -> None:
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
            self.name, self.cache = cache_rows.cache_of(out)
            if first and self.batching.room:
                from rft_fn.engine.hf.buffers import buffer_cache  # with transformers

                # shared attention is computed in float32 on a CPU, by products of buffers with gaps
                on_cpu = self.tokens.device.type == "cpu"
                buffer_cache(self.cache, self.max_tokens, wide=self.batching.shares and on_cpu)

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


def prefill(
    lm: "PreTrainedModel",
    batching: CacheSupport,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    pad: int,
    media: Sequence[PromptMedia] | None = None,
    max_tokens: int = 64,
) -> Batch:
    """Prefill prompts and their media once; return a batch of `counts` rows of each, side by side.

    Prompts are of one length unless `batching.padded`. Buffers have room for `max_tokens` tokens of a row at
    the start, and grow where more come.
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
        max_tokens=max_tokens,
    )
    if batching.joins:
        batch.ragged = min(len(p) for p in prompts) < width
    if batching.switch is not None and width <= batching.switch:
        batch.all_tokens = tokens
    batch.forward(lm)
    batch.repeat(counts)
    return batch
