"""Prompts that are held once, and attention that reads them once for all of their samples.

Attention of one new token does little else than read keys and values. The samples of a prompt have the same
ones there, so their queries are put side by side: what was one product a row becomes one a prompt. The keys
and values of a row's own tokens are in the model's cache, as always.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from rft_fn.model.attention import keeps_scores, unfit_model, use
from rft_fn.model.parts import text_config

__all__ = ["OPTION", "Prompts", "can_share", "reading"]

NAME = "rft_prompts"  # of the attention function, in transformers' table
OPTION = "rft_prompts"  # by which a model hands prompts on to it


class Layer(NamedTuple):
    """Keys and values of P prompts in one layer, with zeros before the shorter ones."""

    keys: Tensor  # [P, H, W, D]
    values: Tensor  # [P, H, W, D']


class Prompts:
    """P prompts of W tokens, and which of them each of R rows continues."""

    def __init__(self, layers: Sequence[Layer], seen: Tensor, of: Tensor):
        self.layers = list(layers)
        self.seen = seen  # [P, W] bool, False on the padding
        self.of = of  # [R], the prompt of each row
        self._group()

    def _group(self) -> None:
        """Find the rows of each prompt, and the padding."""
        rows = torch.arange(len(self.of), device=self.of.device)
        counts = self.of.bincount(minlength=len(self.seen))
        by_prompt = self.of.argsort(stable=True)
        first = counts.cumsum(0) - counts
        rank = torch.empty_like(rows)
        rank[by_prompt] = rows - first[self.of[by_prompt]]

        # [P, G]: a prompt with fewer rows than another one is asked by row 0 too, and nobody reads the answer
        self.groups = rows.new_zeros(len(counts), int(counts.max()))
        self.groups[self.of, rank] = rows
        self.places = self.of * self.groups.shape[1] + rank  # [R], of each row in `groups`
        self.bias: Tensor | None = None  # [P, 1, 1, W]
        if not self.seen.all():
            bias = torch.zeros_like(self.seen, dtype=self.layers[0].keys.dtype)
            self.bias = bias.masked_fill_(~self.seen, -torch.inf)[:, None, None]

    def take(self, index: Tensor) -> None:
        """Keep the rows `index` [R'], and let go of prompts without rows once half of them have none."""
        self.of = self.of[index]
        left, of = self.of.unique(return_inverse=True)
        if 2 * len(left) <= len(self.seen):
            self.of = of
            self._keep(left)
        self._group()

    def _keep(self, left: Tensor) -> None:
        """Hold the prompts `left` alone, without columns that are padding in all of them."""
        self.seen = self.seen[left]
        empty = int(self.seen.any(0).int().argmax())
        self.seen = self.seen[:, empty:]
        self.layers = [Layer(k[left, :, empty:], v[left, :, empty:]) for k, v in self.layers]

    def join(self, other: "Prompts") -> None:
        """Add other prompts and their rows behind these."""
        width = max(self.seen.shape[1], other.seen.shape[1])
        self.of = torch.cat([self.of, other.of + len(self.seen)])
        self.seen = torch.cat([_padded(x, width, dim=1) for x in (self.seen, other.seen)])
        pairs = zip(self.layers, other.layers, strict=True)
        self.layers = [
            Layer(*(torch.cat([_padded(x, width, dim=2) for x in both]) for both in zip(*layers)))
            for layers in pairs
        ]
        self._group()

    def attend(self, layer: int, query: Tensor) -> "Attended":
        """What rows [R, H, N, D] of queries get from their prompts, N heads to one of keys."""
        keys, values = self.layers[layer]
        count = self.groups.shape[1]
        asked = rearrange(query[self.groups.flatten()], "(p g) h n d -> p h (g n) d", g=count)
        scores = asked @ keys.mT
        if self.bias is not None:
            scores += self.bias
        found = _attended(scores, values)
        return Attended(*(rearrange(x, "p h (g n) d -> (p g) h n d", g=count)[self.places] for x in found))


class Attended(NamedTuple):
    """Attention to some of the tokens, which can be added to that to others."""

    sum: Tensor  # [R, H, N, D'] of values times exp(score - largest)
    mass: Tensor  # [R, H, N, 1] of exp(score - largest)
    largest: Tensor  # [R, H, N, 1] score


def _attended(scores: Tensor, values: Tensor) -> Attended:
    """Attention by scores [R, H, N, W], which are overwritten, to values [R, H, W, D]."""
    largest = scores.amax(-1, keepdim=True)
    p = scores.sub_(largest).exp_()
    mass = p.sum(-1, keepdim=True)
    if values.stride(-1) == 1:
        return Attended(p @ values, mass, largest)
    return Attended((values.mT @ p.mT).mT, mass, largest)  # twice as fast for values column by column


def _both(one: Attended, two: Attended) -> Tensor:
    """[R, H, N, D'], attention to the tokens of both."""
    largest = torch.maximum(one.largest, two.largest)
    x = (one.largest - largest).exp_()
    y = (two.largest - largest).exp_()
    return (one.sum * x + two.sum * y) / (one.mass * x + two.mass * y)


def _padded(x: Tensor, width: int, dim: int) -> Tensor:
    """`x` with zeros in front of a dimension, which then is `width` long."""
    shape = list(x.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([x.new_zeros(shape), x], dim)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [R, H, 1, D] -> [R, 1, H, D'].

    It attends to key [R, H', S, D] and value [R, H', S, D'] of each row's own tokens, and to those of its
    prompt. ValueError for a layer that asks for more than that.
    """
    prompts: Prompts = options[OPTION]
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "dropout"):
        given = options.get(name)
        if given is not None and not (name == "dropout" and given == 0):
            raise ValueError(f"attention of shared prompts: expected no {name}, got {given}")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    rows = rearrange(query * scale, "r (h n) 1 d -> r h n d", h=key.shape[1])
    scores = rows @ key.mT
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    layer: Any = module.layer_idx
    out = _both(prompts.attend(layer, rows), _attended(scores, value))
    return rearrange(out, "r h n d -> r 1 (h n) d"), None


def can_share(lm: nn.Module) -> bool:
    """Whether it is worth a try: on a CPU, where it gains, and where attention is looked up by name."""
    parameter = next(lm.parameters())
    if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.float64):
        return False
    return unfit_model(lm) is None and not keeps_scores(lm)


@contextmanager
def reading(lm: nn.Module) -> Iterator[None]:
    """Have a text model use this attention meanwhile."""
    _register()
    config = text_config(lm)
    usual = config._attn_implementation
    use(lm, NAME)
    try:
        yield
    finally:
        use(lm, usual)


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
