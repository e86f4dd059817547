"""MLPs that compute some tokens at a time, in the backward too."""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model import routing
from rft_fn.model.packed_attention import warn_once
from rft_fn.precision import widen

__all__ = ["SLICE", "slice_mlps"]


SLICE = 2048
"""Tokens of a slice: enough for whole matrix products, and few beside those of a long row."""

_MLP = re.compile(r"(mlp|feedforward(network)?|ffn|moe|moelayer|moeblock|mlpblock|denseactdense)$")
_MIXES = (nn.Conv1d, nn.Conv2d, nn.ZeroPad2d, nn.modules.batchnorm._BatchNorm, nn.RNNBase)
_TRIED = 8  # tokens


def slice_mlps(layers: list[Any]) -> None:
    """Have the MLPs and mixtures of experts of blocks compute long rows in slices."""
    for mlp in _mlps(layers):
        mlp.__class__ = _sliced_class(type(mlp))


def _mlps(layers: list[Any]) -> list[nn.Module]:
    """Return the MLPs and mixtures of experts of blocks, by the names of their classes."""
    found = [m for layer in layers for m in layer.children() if _MLP.search(type(m).__name__.lower())]
    kept = [m for m in found if not any(isinstance(part, _MIXES) for part in m.modules())]
    return [m for m in kept if not hasattr(m, "rft_sliced") and not hasattr(m, "rft_separated")]


@cache
def _sliced_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that computes long rows in slices: names, hooks and copies are as before."""
    plain = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dim() < 2 or x.numel() // max(x.shape[-1], 1) <= SLICE:
            return plain(self, *args, **kwargs)
        function = partial(plain, self)
        if _is_heard(self) or not _is_tokenwise(self, function, x):
            return plain(self, x)
        rows = x.reshape(-1, x.shape[-1])
        return _in_slices(self, function, rows).view(x.shape)

    return type(f"Sliced{cls.__name__}", (cls,), {"forward": forward, "rft_sliced": cls})


def _is_heard(mlp: nn.Module) -> bool:
    """Return whether somebody listens to a part, or tells it of tokens, for whom slices would be calls."""
    if routing.current() is not None and any(hasattr(m, "rft_number") for m in mlp.modules()):
        return True  # its router is told the experts of all tokens of the pack
    # ZeRO 3 gathers weights by the hooks of each layer, in the order of its first calls
    return any(m._forward_hooks or m._forward_pre_hooks for m in mlp.modules() if m is not mlp) or any(
        hasattr(p, "ds_id") for p in mlp.parameters()
    )


def _is_tokenwise(mlp: Any, function: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Return whether an MLP computes each token by itself: tried once, with a few tokens."""
    found = mlp.__dict__.get("rft_tokenwise")
    if found is None:
        with torch.no_grad():
            few = x.reshape(1, -1, x.shape[-1])[:, :_TRIED]
            whole, part = function(few), function(few[:, _TRIED // 2 :])
            found = isinstance(whole, Tensor) and whole.shape == few.shape and whole.dtype == x.dtype
            if found and not x.is_meta:
                error = (whole[:, _TRIED // 2 :] - part).abs().max()
                found = not bool(error > 0.05 * whole.abs().max())
        mlp.rft_tokenwise = found
        if not found:
            warn_once(f"gradient_checkpointing: {type(mlp).__name__} takes all tokens at once, not in slices")
    return found


def _in_slices(mlp: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """Return the MLP of tokens [T, D]."""
    params = [p for p in mlp.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or params):
        return _sliced_forward(function, x)
    # the input is kept before anything is computed: a block that is computed anew stops there
    kept = _Keep.apply(x.new_empty(0).requires_grad_(), x)
    out: Any = _Slices.apply(mlp, function, kept, x, *params)
    return out


def _sliced_forward(function: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for rows, part in zip(out.split(SLICE), x.split(SLICE)):
        rows.copy_(function(part[None])[0])
    return out


class _Keep(torch.autograd.Function):
    """Keeps a tensor for the backward of another function."""

    @staticmethod
    def forward(ctx: Any, switch: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return switch.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


class _Slices(torch.autograd.Function):
    """An MLP over slices: its backward computes each slice once more, and then that slice's gradient."""

    @staticmethod
    def forward(ctx: Any, mlp: nn.Module, function: Any, kept: Tensor, x: Tensor, *params: Tensor) -> Tensor:
        ctx.mlp, ctx.function, ctx.kept = mlp, function, kept.grad_fn
        return _sliced_forward(function, x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        [grad], [x] = grad_outputs, ctx.kept.saved_tensors
        params = [p for p in ctx.mlp.parameters() if p.requires_grad]
        of_x = torch.empty_like(x) if ctx.needs_input_grad[3] else None
        # sums of many small terms are wide
        sums: list[Tensor | None] = [None] * len(params)
        for start in range(0, len(x), SLICE):
            part = x[start : start + SLICE].detach().requires_grad_(of_x is not None)
            with torch.enable_grad():
                out = ctx.function(part[None])[0]
            wanted = params if of_x is None else [part, *params]
            got = list(torch.autograd.grad(out, wanted, grad[start : start + SLICE], allow_unused=True))
            if of_x is not None:
                of_x[start : start + SLICE] = got.pop(0)
            for i, g in enumerate(got):
                if g is not None:
                    have = sums[i]
                    sums[i] = widen(g.contiguous()) if have is None else have.add_(g)
            del out, got, part
        of_params = [None if s is None else s.to(p.dtype) for s, p in zip(sums, params)]
        return None, None, None, of_x, *of_params
