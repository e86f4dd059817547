"""What checkpointed blocks keep for their backward, and where it waits until then."""

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rft_fn.model import routing
from rft_fn.model.dropout import checkpointed
from rft_fn.model.packed_attention import warn_once
from rft_fn.precision import widen

__all__ = ["LADDER", "SLICE", "Checkpointing", "Moved", "OnHost", "checkpoint", "kind_of", "on_host"]


Checkpointing: TypeAlias = Literal[False, True, "products", "slices", "host"]
"""What a block keeps for its backward: all, its input, its input and what takes long to compute; its input
with its MLP over slices of tokens; the same with that input in memory of the host."""

LADDER: tuple[Checkpointing, ...] = (False, "products", True, "slices", "host")
"""From the fastest to the longest rows."""


def checkpoint(module: Any, kind: Checkpointing) -> None:
    """Have the blocks of a model keep what `kind` says, and compute the rest again in the backward.

    ValueError for a kind that is none, and for a model whose blocks transformers does not checkpoint.
    """
    if kind not in LADDER:
        raise ValueError(f"gradient_checkpointing: expected one of {_listed()}, got {kind!r}")
    if kind is False:
        return
    enable = getattr(module, "activation_checkpointing_enable", None)  # its name since 5.23
    enable = enable or module.gradient_checkpointing_enable
    more = {"context_fn": _products} if kind == "products" else {}
    enable({"use_reentrant": False, **more})
    layers = checkpointed(module)
    for mlp in _mlps(layers) if kind in ("slices", "host") else ():
        mlp.__class__ = _sliced_class(type(mlp))
    if kind == "host" and layers:
        function = OnHost(layers[0]._gradient_checkpointing_func)  # one of all, to know their order
        for layer in layers:
            layer._gradient_checkpointing_func = function


def kind_of(module: nn.Module) -> Checkpointing:
    """Return what the checkpointed blocks of a model keep."""
    layers = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    functions = [_inner(m) for m in layers if hasattr(m, "_gradient_checkpointing_func")]
    if any(isinstance(f, OnHost) for f in functions):
        return "host"
    if any(hasattr(m, "rft_sliced") for m in module.modules()):
        return "slices"
    if any(getattr(f, "keywords", {}).get("context_fn") is _products for f in functions):
        return "products"
    return bool(layers)


def _inner(layer: Any) -> Any:
    """Return the checkpointing function of a layer, without the one that runs it in evaluation mode."""
    function = layer._gradient_checkpointing_func
    return function if isinstance(function, OnHost) else getattr(function, "function", function)


def _listed() -> str:
    return ", ".join(map(str, get_args(Checkpointing)))


# ---------- "products": results that take long to compute are kept beside the inputs


_PRODUCTS = r"aten::_?(mm|addmm|bmm|baddbmm|grouped_mm|linear)|(mkldnn|mkl)::\w*linear\w*"
_LONG = re.compile(rf"({_PRODUCTS}|aten::_scaled_dot_product\w*|aten::_\w*attention_forward)$")


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_long(op) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_long(op: Any) -> bool:
    return bool(_LONG.match(op.name().partition(".")[0]))


def _products() -> Any:
    forward, again = create_selective_checkpoint_contexts(_policy)
    return forward, _kept_as_they_were(again)


@contextmanager
def _kept_as_they_were(again: Any) -> Iterator[None]:
    """Compute a block again; ValueError for one that has written into a product that was kept."""
    try:
        with again:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise ValueError(
            "gradient_checkpointing: expected a model that leaves the results of its products as they are "
            "for 'products', this one writes into them; take True"
        ) from error


# ---------- "slices": an MLP computes some tokens at a time, in the backward too


SLICE = 2048
"""Tokens of a slice: enough for whole matrix products, and few beside those of a long row."""

_MLP = re.compile(r"(mlp|feedforward(network)?|ffn|moe|moelayer|moeblock|mlpblock|denseactdense)$")
_MIXES = (nn.Conv1d, nn.Conv2d, nn.ZeroPad2d, nn.modules.batchnorm._BatchNorm, nn.RNNBase)
_TRIED = 8  # tokens


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
    """Return whether an MLP computes each token from that token alone, by a few of them; asks once."""
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


# ---------- "host": the inputs of blocks wait in memory of the host


class Moved:
    """An input of a block in pinned memory of the host, copied beside the computation in both directions.

    When the backward takes one, the one of the block before it is on its way.
    """

    def __init__(self, x: Tensor, before: "Moved | None"):
        self.device = x.device
        self.before: Any = _nothing if before is None else weakref.ref(before)
        self.here: Tensor | None = None  # on its way back, or there
        self.send(x)

    def send(self, x: Tensor) -> None:
        """Start the copy to the host."""
        stream = _stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host = torch.empty_like(x, device="cpu", pin_memory=True)
            self.host.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is free when the copy is done

    def fetch(self) -> Tensor:
        """Return a copy on the device, which may still be on its way."""
        with torch.cuda.stream(_stream(self.device)):
            return self.host.to(self.device, non_blocking=True)

    def wait(self, x: Tensor) -> None:
        """Have the computation wait for the copies that have been started."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(_stream(self.device))
        x.record_stream(stream)

    def back(self) -> Tensor:
        """Return the input on its device, and start the copy of the one before it."""
        x = self.fetch() if self.here is None else self.here
        self.here = None
        self.wait(x)
        before = self.before()
        if before is not None and before.here is None:
            before.here = before.fetch()
        return x


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class OnHost:
    """A checkpointing function whose inputs are on the host between forward and backward.

    On a CPU they stay where they are.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.moved: Any = None  # in place of `Moved`, on a device without values
        self.last: Any = _nothing

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        with saved_tensors_hooks(self.pack, self.unpack):
            return self.function(forward, *args)

    def pack(self, x: Tensor) -> Any:
        """Move an input of a block."""
        kind = self.moved or (Moved if x.is_cuda else None)
        if kind is None or not x.is_floating_point():
            return x
        moved = kind(x, self.last())
        self.last = weakref.ref(moved)
        return moved

    def unpack(self, kept: Any) -> Tensor:
        """Return an input of a block on its device."""
        return kept.back() if isinstance(kept, Moved) else kept


def _nothing() -> None:
    return None


def on_host(module: nn.Module) -> list[OnHost]:
    """Return the functions of a model that move inputs to the host."""
    found = [_inner(m) for m in module.modules() if hasattr(m, "_gradient_checkpointing_func")]
    return list({id(f): f for f in found if isinstance(f, OnHost)}.values())
