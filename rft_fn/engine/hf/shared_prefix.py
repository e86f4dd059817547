"""Shares the KV cache of a prompt among its samples, by attention that reads it once for all of them.

Attention of one new token does little else than read keys and values. The samples of a prompt have the same
ones there, so their queries are put side by side: what was one product a row becomes one a prompt. The keys
and values of a row's own tokens are in the model's cache, as always.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from rft_fn.model.attention import keeps_scores, unfit_model, use
from rft_fn.model.parts import text_config

__all__ = ["OPTION", "Layer", "SharedPrefixes", "attention", "can_replace", "shared_attention"]

NAME = "rft_prompts"  # of the attention function, in transformers' table
OPTION = "rft_prompts"  # by which a model hands prompts on to it


class Layer(NamedTuple):
    """Keys and values of P prompts in one layer, with zeros before the shorter ones."""

    keys: Tensor  # [P, H, W, D]
    values: Tensor  # [P, H, W, D']


class SharedPrefixes:
    """P prompts of W tokens, and the prompt that each of R rows continues."""

    def __init__(self, layers: Sequence[Layer], seen: Tensor, of: Sequence[int]):
        self.layers = list(layers)
        self.seen = seen  # [P, W] bool, False on the padding
        self.of = list(of)  # R, the prompt of each row
        self.source: list[Layer] | None = None  # the layers that fixed prompts were copied from
        self._hide()
        self._group()

    def _hide(self) -> None:
        """Find the padding."""
        self.bias: Tensor | None = None  # [P, 1, 1, W]
        if not self.seen.all():
            bias = torch.zeros_like(self.seen, dtype=self.layers[0].keys.dtype)
            self.bias = bias.masked_fill_(~self.seen, -torch.inf)[:, None, None]

    def _group(self) -> None:
        """Find the rows of each prompt, on the host."""
        groups: list[list[int]] = [[] for _ in range(len(self.seen))]
        rank = []
        for row, prompt in enumerate(self.of):
            rank.append(len(groups[prompt]))
            groups[prompt].append(row)

        # [P, G]: a prompt with fewer rows than another one is asked by row 0 too, and nobody reads the answer
        most = max(map(len, groups))
        filled = [group + [0] * (most - len(group)) for group in groups]
        self.groups = torch.tensor(filled, device=self.seen.device)
        self.place = torch.tensor([self.of, rank], device=self.seen.device)  # [2, R] in `groups`, of each row
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # `_places` of so many heads

    def take(self, index: Sequence[int]) -> None:
        """Keep the rows `index`, and let go of prompts without rows once half of them have none."""
        self.of = [self.of[row] for row in index]
        left = sorted(set(self.of))
        if 2 * len(left) <= len(self.seen):
            kept = torch.tensor(left, device=self.seen.device)
            seen = self.seen[kept]
            empty = int(seen.any(0).int().argmax())  # columns that are padding in all of them
            self.of = [left.index(prompt) for prompt in self.of]
            self.seen = seen[:, empty:]
            self.layers = [Layer(k[kept, :, empty:], v[kept, :, empty:]) for k, v in self.layers]
            self._hide()
        self._group()

    def join(self, other: "SharedPrefixes") -> None:
        """Append other prompts and their rows."""
        width = max(self.seen.shape[1], other.seen.shape[1])
        self.of += [prompt + len(self.seen) for prompt in other.of]
        self.seen = torch.cat([_padded(x, width, dim=1) for x in (self.seen, other.seen)])
        pairs = zip(self.layers, other.layers, strict=True)
        self.layers = [
            Layer(*(torch.cat([_padded(x, width, dim=2) for x in both]) for both in zip(*layers)))
            for layers in pairs
        ]
        self._hide()
        self._group()

    def fix(self, held: "SharedPrefixes | None", rows: int) -> "SharedPrefixes":
        """Return these prompts, for at most `rows` rows, in persistent tensors: those of `held`, or new ones.

        There is a place for more prompts, tokens and rows of each, a power of two of all three.
        """
        count, width = self.seen.shape
        each = self.groups.shape[1]
        sizes = (count, width, each)
        room = (0, 0, 0)
        if held is not None and held.bias is not None and held.place.shape[1] == rows:
            room = (*held.bias.shape[::3], held.groups.shape[1])
        if held is None or any(x < y for x, y in zip(room, sizes)):
            most, wide, many = (max(x, 1 << (y - 1).bit_length()) for x, y in zip(room, sizes))
            held = copy(self)
            held.layers = [
                Layer(*(x.new_zeros(most, x.shape[1], wide, x.shape[3]) for x in y)) for y in self.layers
            ]
            held.bias = held.layers[0].keys.new_zeros(most, 1, 1, wide)
            held.groups = self.groups.new_zeros(most, many)
            held.place = self.place.new_zeros(2, rows)
            held.source, held._known = None, {}

        # prompts change when some join or are let go, and then this object has other layers
        if held.source is not self.layers:
            for mine, new in zip(held.layers, self.layers):
                for x, y in zip(mine, new):
                    x.zero_()
                    x[:count, :, :width] = y
            assert held.bias is not None
            held.bias.zero_()  # also of prompts that are not there
            held.bias[:count] = -torch.inf
            held.bias[:count, 0, 0, :width].masked_fill_(self.seen, 0)
            self.layers = [Layer(*(x[:count, :, :width] for x in layer)) for layer in held.layers]
            held.source = self.layers
        held.groups.zero_()
        held.groups[:count, :each] = self.groups
        held.place.zero_()
        held.place[:, : len(self.of)] = self.place
        return held

    def of_rows(self, rows: int) -> "SharedPrefixes":
        """Return fixed prompts as the first `rows` rows have them, in the same tensors."""
        first = copy(self)
        first.place = self.place[:, :rows]
        first._known = {}
        return first

    def forget_places(self) -> None:
        """Recompute the positions from now on, as a graph does at each replay."""
        self._known.clear()

    def scores(self, layer: int, query: Tensor) -> Tensor:
        """Return [R, H, N, W]: queries [R, H, N, D] by the keys of their prompts, N heads to one of keys."""
        scores = _product(self._by_prompt(query), self.layers[layer].keys.mT)
        if self.bias is not None:
            scores += self.bias
        return self._by_row(scores, query.shape[:3])

    def sums(self, layer: int, p: Tensor) -> Tensor:
        """Return [R, H, N, D']: the values of their prompts, weighted by p [R, H, N, W]."""
        return self._by_row(self._by_prompt(p) @ self.layers[layer].values, p.shape[:3])

    def _by_prompt(self, x: Tensor) -> Tensor:
        """Return [P, H, G N, X] of x [R, H, N, X]."""
        there, _ = self._places(*x.shape[1:3])
        grouped = x.flatten(0, 2).index_select(0, there)
        return grouped.view(len(self.groups), x.shape[1], -1, x.shape[-1])

    def _by_row(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Return [R, H, N, X] of x [P, H, G N, X], with `shape` (R, H, N)."""
        _, back = self._places(*shape[1:])
        return x.flatten(0, 2).index_select(0, back).view(*shape, -1)

    def _places(self, heads: int, each: int) -> tuple[Tensor, Tensor]:
        """Return the index into [R, H, N] of each of [P, H, G, N], and its inverse."""
        if (heads, each) not in self._known:
            head = torch.arange(heads, device=self.seen.device)[:, None]
            query = torch.arange(each, device=self.seen.device)
            there = (self.groups[:, None, :, None] * heads + head[:, None]) * each + query
            of, rank = self.place[..., None, None]
            back = ((of * heads + head) * self.groups.shape[1] + rank) * each + query
            self._known[heads, each] = there.flatten(), back.flatten()
        return self._known[heads, each]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, [R, H, N, D] and [R, H, D, S], with sums of 16-bit numbers in float32."""
    if a.dtype.itemsize > 2:
        return a @ b
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])


def _padded(x: Tensor, width: int, dim: int) -> Tensor:
    """Return x with zeros in front of a dimension, which then is `width` long."""
    shape = list(x.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([x.new_zeros(shape), x], dim)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers: query [R, H, 1, D] -> [R, 1, H, D'].

    Keys [R, H', S, D] and values [R, H', S, D'] are of each row's own tokens; its prompt's are read too,
    where prompts are shared. Keys may be of a wider type than the queries, in which all is then computed. A
    mask [R, 1, 1, S] is added to scores, or says where they stay. Keys are not repeated for the queries that
    share them. ValueError for a layer that asks for more than that.
    """
    dtype = query.dtype
    query = query.to(key.dtype)
    prompts: SharedPrefixes | None = options.get(OPTION)
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "dropout"):
        given = options.get(name)
        if given is not None and not (name == "dropout" and given == 0):
            raise ValueError(f"attention of shared prompts: expected no {name}, got {given}")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    if prompts is None:
        rows = rearrange(query, "r (h n) 1 d -> r h n d", h=key.shape[1])
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return rearrange(out, "r h n d -> r 1 (h n) d").to(dtype), None
    narrow = query.dtype.itemsize == 2  # scaled scores are rounded less often than scaled queries
    rows = rearrange(query if narrow else query * scale, "r (h n) 1 d -> r h n d", h=key.shape[1])
    own = _product(rows, key.mT)
    if mask is not None and mask.dtype == torch.bool:
        own.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        own += mask

    # one softmax over the tokens of the prompt and the row's own
    layer: Any = module.layer_idx
    scores = prompts.scores(layer, rows)
    width = scores.shape[-1]
    scores = torch.cat([scores, own], -1)
    p = (scores * scale if narrow else scores).softmax(-1).to(value.dtype)
    out = p[..., width:] @ value + prompts.sums(layer, p[..., :width])
    return rearrange(out, "r h n d -> r 1 (h n) d").to(dtype), None


def can_replace(lm: nn.Module) -> bool:
    """Return whether this attention may be tried: where a model looks its own up by name."""
    return unfit_model(lm) is None and not keeps_scores(lm)


@contextmanager
def shared_attention(lm: nn.Module) -> Iterator[None]:
    """Make a text model use this attention within the block."""
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
