"""Recurrent layers and short convolutions of a pack: each sequence is a row of a batch.

The scans of such a layer carry a state from token to token, and of most there is no form that starts anew
inside of a row. So within `apart` the layer, which is transformers' own, reads the sequences of a pack as the
rows of batches, padded behind their last tokens, where nothing that is causal sees it. Attention keeps to the
same boundaries (see `attention`); MLPs and experts read the pack.

Where tokens that begin alike are computed once, such a layer still reads every sequence whole, so that its
state behind a prompt is that of the prompt. What is computed once is all else.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rft_fn.model.bounds import SequenceBounds, take_rows

__all__ = ["apart", "current", "joined", "leaves_work", "separated"]


# by the words with which transformers names the classes of layers that carry states
_KINDS = re.compile(
    "(GatedDeltaNet|DeltaAttention|LightningAttention|LinearAttention|Mamba[0-9]*(Mixer|Layer)|[a-z0-9]Mixer"
    "|ShortConv(olution)?|RecurrentBlock|RwkvSelfAttention|RwkvFeedForward)$"
)

_SEQUENCES: ContextVar[SequenceBounds | None] = ContextVar("rft_sequences", default=None)


def current() -> SequenceBounds | None:
    """Return the boundaries that layers of the running forward keep to, or None."""
    return _SEQUENCES.get()


@contextmanager
def apart(bounds: SequenceBounds | None) -> Iterator[None]:
    """Have separated layers keep to these boundaries in the block; None for a pack as it is."""
    before = _SEQUENCES.set(bounds)
    try:
        yield
    finally:
        _SEQUENCES.reset(before)


def separated(module: nn.Module) -> int:
    """Make the layers of a model that carry states keep to `apart`, in place; return their number.

    Classes stay as they are: a layer gets a subclass of its own, as with `compile_blocks`, and names of
    parameters, hooks and `copy.deepcopy` work as before. Outside of `apart` nothing changes.
    """
    layers = [m for m in module.modules() if _KINDS.search(type(m).__name__) and not hasattr(m, "is_causal")]
    for layer in layers:
        if not hasattr(layer, "rft_separated"):
            layer.__class__ = _separated_class(type(layer))
    return len(layers)


def joined(module: nn.Module) -> None:
    """Give the layers of a model back the classes that they had before `separated`."""
    for layer in module.modules():
        before: Any = getattr(layer, "rft_separated", None)
        if before is not None:
            layer.__class__ = before


def leaves_work(module: nn.Module) -> bool:
    """Return whether a model has matrices outside of its separated layers, besides those of words."""
    layers = [m for m in module.modules() if hasattr(m, "rft_separated")]
    words = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    apart = {id(p) for m in (*layers, *words) for p in m.parameters()}
    # ZeRO 3 keeps a part of a weight, and its shape
    shapes = [getattr(p, "ds_shape", p.shape) for p in module.parameters() if id(p) not in apart]
    return not layers or any(len(shape) > 1 for shape in shapes)


@cache
def _separated_class(cls: type[nn.Module]) -> type[nn.Module]:
    plain = cls.forward

    @torch.compiler.disable  # a graph would hold the boundaries of one pack
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bounds = current()
        if bounds is None:
            return plain(self, *args, **kwargs)
        # ZeRO 3 gathers weights in each call, so every process makes one
        whole = any(hasattr(p, "ds_id") for p in self.parameters())
        batches = [list(range(len(bounds.sizes)))] if whole else bounds.batches
        with apart(None):  # for layers inside of this one, which get its rows
            return _by_rows(partial(plain, self), bounds, batches, args, kwargs)

    return type(f"Packed{cls.__name__}", (cls,), {"forward": forward, "rft_separated": cls})


def _by_rows(
    layer: Callable[..., Any],
    bounds: SequenceBounds,
    batches: Sequence[Sequence[int]],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call a layer with the sequences of a pack as rows: all that is [1, T, ...] becomes [K, S, ...].

    The output, or the first of several, is [1, T, D] again; the others, which are states, are left out. Where
    the pack has prefixes, T are the tokens that it keeps.
    """
    sizes = bounds.sizes
    places = {name: _cut(x, bounds) for name, x in [*enumerate(args), *kwargs.items()]}
    rows: list[Any] = [None] * len(sizes)
    result = None
    for members in batches:
        given = {name: _batch(x, members) for name, x in places.items()}
        positional = [given.pop(i) for i in range(len(args))]
        result = layer(*positional, **given)
        out = result[0] if isinstance(result, tuple) else result
        # unbound at once: the gradient of a slice of a batch is a batch of zeros
        for i, row in zip(members, out.unbind(0)):
            rows[i] = row[: sizes[i]]
    whole = torch.cat(rows)
    if bounds.prefixes is not None:
        whole = take_rows(whole, bounds.prefixes.kept)
    whole = whole[None]
    return (whole, *[None] * (len(result) - 1)) if isinstance(result, tuple) else whole


class _Cut(list):
    """The sequences of a tensor that was [1, T, ...]."""


def _cut(x: Any, bounds: SequenceBounds) -> Any:
    prefixes = bounds.prefixes
    tokens = sum(bounds.sizes) if prefixes is None else len(prefixes.kept)
    if isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == (1, tokens):
        whole = x[0]
        if prefixes is not None:
            whole = take_rows(whole, prefixes.of) if whole.requires_grad else whole[prefixes.of]
        return _Cut(whole.split(bounds.sizes))
    if isinstance(x, tuple):  # the sines and cosines of positions
        return tuple(_cut(y, bounds) for y in x)
    return x


def _batch(x: Any, members: Sequence[int]) -> Any:
    """Return the rows of some sequences, with zeros behind the shorter ones."""
    if isinstance(x, tuple):
        return tuple(_batch(y, members) for y in x)
    if not isinstance(x, _Cut):
        return x
    longest = max(len(x[i]) for i in members)
    return torch.stack([pad(x[i], (0, 0) * (x[i].dim() - 1) + (0, longest - len(x[i]))) for i in members])
