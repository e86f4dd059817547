"""Rows of tokens that grow together, and a model's logits for the next token of each."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_fn.engine.hf import prompts as kv
from rft_fn.engine.hf import prompts as media
from rft_fn.engine.hf.prompts import OPTION, Layer, Prompts
from rft_fn.engine.hf.prompts import reading as prompts_read
from rft_fn.engine.prompt_media import Shown, text

__all__ = ["Batch", "Batching", "draw", "numbers_per_draw", "start"]


# ---------- draws from a categorical distribution that hardly change when its probabilities hardly do


def numbers_per_draw(vocab: int) -> int:
    """The uniform numbers that one draw from `vocab` tokens takes: ceil(log2(vocab))."""
    return (vocab - 1).bit_length()


def draw(p: Tensor, u: Tensor) -> Tensor:
    """p [B, V], u [B, D] -> token [B]: one of V tokens with the probabilities p / p.sum(-1).

    u are uniform numbers in [0, 1), float64, of which the first `numbers_per_draw(V)` are read. A token of
    probability 0 is never drawn. Sums are formed element by element, so that a row gives the same token in
    any batch.
    """
    # the nodes of a level are those below it, folded in the middle: y[j] = x[j] + x[j + half]
    levels = [p]
    while levels[-1].shape[-1] > 1:
        below = levels[-1]
        half = (below.shape[-1] + 1) // 2
        pairs = below.shape[-1] - half
        above = below[:, :pairs] + below[:, half:]
        if pairs < half:  # the node in the middle has none
            above = torch.cat([above, below[:, pairs:half]], -1)
        levels.append(above)

    # from the root, which is one node, to a token
    node = torch.zeros(len(p), 1, dtype=torch.long, device=p.device)
    for depth, level in enumerate(reversed(levels[:-1])):
        half = (level.shape[-1] + 1) // 2
        other = node + half
        exists = other < level.shape[-1]
        first = level.gather(-1, node).double()
        second = level.gather(-1, other.clamp(max=level.shape[-1] - 1)).double() * exists
        node = torch.where(u[:, depth : depth + 1] * (first + second) < first, node, other)
    return node.squeeze(-1)


# ---------- rows of tokens that grow together, and a model's logits for the next token of each


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Batching(NamedTuple):
    """How the rows of a batch are given to a model."""

    rows: kv.Rows | None  # the dimension of rows in its cache; None: no cache, all tokens are read again
    padded: bool = False  # rows of different lengths together, padded on the left
    grows: bool = True  # whether the cache has a place for each token, padding too
    single: bool = False  # one row at a time
    room: bool = False  # whether plain keys and values are kept in buffers with room for more
    joins: bool = False  # whether all of the cache is (needs `room`), so that rows may join longer ones
    shares: bool = False  # whether the samples of a prompt read it in one place (needs `joins`)
    switch: int | None = None  # tokens behind which all are read anew, by other rotary factors (not `padded`)


@dataclass
class Batch:
    """R rows of W tokens, as far as the next forward needs them."""

    batching: Batching
    tokens: Tensor  # [R, w] not read yet: the last of W with a cache, else all
    seen: Tensor  # [R, W] bool, False on the padding
    before: Tensor  # [R], tokens of each that stand before those W
    beyond: Tensor  # [axes, R], by how much positions are more than the number of tokens before them
    shown: list[Shown]  # R, what is seen and heard of them
    logits: Tensor  # [R, V] of the next token
    name: str = ""  # by which the model takes its cache
    cache: Any = None
    ragged: bool = True  # whether some row has padding
    most: int = 64  # tokens that a row may still be given, for the room of buffers
    prompts: Prompts | None = None  # which the rows share: `seen` and the cache are of their own tokens then
    every: Tensor | None = None  # [R, W] all tokens, where a switch is ahead

    def repeat(self, counts: Tensor) -> None:
        """Have `counts` [R] rows, side by side, in place of each; shares the prompts where the model can."""
        of = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        if not self.batching.shares:
            if len(of) > len(counts):
                self.take(of)
            return
        layers = [Layer(*part.lift(len(of))) for part in kv.own(self.cache)]
        self.prompts = Prompts(layers, self.seen, of)
        self.before = self.seen.sum(-1)
        self._pick(of)
        self.seen = self.seen.new_empty(len(of), 0)
        self.ragged = False

    def take(self, index: Tensor) -> None:
        """Keep only the rows `index` [R'], which may repeat."""
        self._pick(index)
        self.seen = self.seen[index]
        if self.batching.rows is not None:
            self.cache = kv.select(self.cache, self.batching.rows, index)
        if self.prompts is not None:
            self.prompts.take(index)
        self._trim()

    def _pick(self, index: Tensor) -> None:
        """Keep the rows `index` of all that has no columns."""
        self.tokens = self.tokens[index]
        if self.every is not None:
            self.every = self.every[index]
        self.before = self.before[index]
        self.beyond = self.beyond[:, index]
        self.shown = [self.shown[r] for r in index.tolist()]
        self.logits = self.logits[index]

    def join(self, other: "Batch") -> None:
        """Add the rows of another batch behind its prompts; both have to be of a model that `joins`."""
        width = max(self.seen.shape[1], other.seen.shape[1])
        self.seen = torch.cat([F.pad(x, (width - x.shape[1], 0)) for x in (self.seen, other.seen)])
        self.tokens = torch.cat([self.tokens[:, -1:], other.tokens[:, -1:]])
        self.before = torch.cat([self.before, other.before])
        self.beyond = torch.cat([self.beyond, other.beyond], 1)
        self.shown = [*self.shown, *other.shown]
        self.logits = torch.cat([self.logits, other.logits])
        kv.join(self.cache, other.cache)
        if self.prompts is not None and other.prompts is not None:
            self.prompts.join(other.prompts)
        self._trim()

    def _trim(self) -> None:
        """Drop the first columns where they are padding in every row."""
        if not self.batching.joins or not self.seen.shape[1]:
            return
        empty = int(self.seen.any(0).int().argmax())
        if empty:
            self.seen = self.seen[:, empty:]
            for part in kv.own(self.cache):
                part.crop_left(empty)
        self.ragged = not bool(self.seen.all())

    def append(self, lm: "PreTrainedModel", token: Tensor) -> None:
        """Read one more token [R] of each row."""
        new = token[:, None]
        if self.batching.rows is None:
            new = self._with_all(self.tokens, new)
        elif self.every is not None:
            self.every = self._with_all(self.every, new)
            if self.every.shape[1] > (self.batching.switch or 0):
                # keys in the cache have the factors of short sequences
                new, self.cache, self.every = self.every, None, None
        self.tokens = new
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(self.seen), 1)], -1)
        self.read(lm)

    def _with_all(self, known: Tensor, new: Tensor) -> Tensor:
        """All tokens [R, W + 1], to be read once more."""
        self.shown = [own._replace(sampled=[*own.sampled, True]) for own in self.shown]
        return torch.cat([known, new], -1)

    def read(self, lm: "PreTrainedModel") -> None:
        """Run the model over the tokens: sets the logits, and the cache where it is used."""
        width = self.tokens.shape[1]
        options: dict[str, Any] = {"use_cache": self.batching.rows is not None}
        if self.cache is not None:
            options[self.name] = self.cache

        # the mask covers what the cache holds beside the new tokens; without padding there is none
        if self.batching.padded and self.ragged:
            mask = self.seen.long()
            if not self.batching.grows:
                mask = mask[:, -width:]
            options["attention_mask"] = mask
        if _can_keep_last(type(lm)):
            options["logits_to_keep"] = 1

        # with a cache media are read once: what became of them is in it
        options["position_ids"] = self.position()
        if self.cache is None:
            options |= media.inputs(lm, self.tokens, self.seen, self.shown)
            if options["position_ids"].dim() == 3:
                self.beyond = media.beyond(options["position_ids"], self.seen)
        if self.prompts is None:
            out = lm(input_ids=self.tokens, **options)
        else:
            with prompts_read(lm):
                out = lm(input_ids=self.tokens, **options, **{OPTION: self.prompts})
        self.logits = out.logits[:, -1]
        if self.batching.rows is not None:
            first = self.cache is None
            self.name, self.cache = kv.found_in(out) or ("", None)
            if first and self.batching.room:
                from rft_fn.engine.hf.buffers import make_room  # with transformers

                make_room(self.cache, self.most)

    def position(self) -> Tensor:
        """The positions of `tokens` where no media are among them: [R, w], or [axes, R, w] behind media."""
        # they count the tokens of a row, so padding on the left does not shift them
        width = self.tokens.shape[1]
        left = torch.arange(width, 0, -1, device=self.seen.device)
        count = self.before + self.seen.sum(-1)
        found = (count.unsqueeze(-1) - left).clamp(min=0)
        if len(self.beyond):
            found = found + self.beyond.unsqueeze(-1)
        return found


@cache
def _can_keep_last(model: type[nn.Module]) -> bool:
    """Whether a model can leave out the logits of all tokens but the last."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def start(
    lm: "PreTrainedModel",
    batching: Batching,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    pad: int,
    shown: Sequence[Shown] | None = None,
    most: int = 64,
) -> Batch:
    """The batch of `counts` rows of each prompt, side by side; prompts and their media are read once.

    Prompts have to be of one length unless `batching.padded`. Buffers have room for `most` tokens of a row
    at the start, and grow where more come.
    """
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=lm.device)
    seen = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=lm.device)
    before = tokens.new_zeros(len(prompts))
    beyond = tokens.new_empty(0, len(prompts))  # without axes of their own
    batch = Batch(
        batching, tokens, seen, before, beyond, list(shown or text(prompts)), torch.empty(0), most=most
    )
    if batching.joins:
        batch.ragged = min(len(p) for p in prompts) < width
    if batching.switch is not None and width <= batching.switch:
        batch.every = tokens
    batch.read(lm)
    batch.repeat(torch.tensor(counts, device=lm.device))
    return batch
