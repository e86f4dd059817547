"""Every engine as one differentiable operation: rows are selected here, the engine does the arithmetic.

Two `autograd.Function`s, because torch.func runs the backward of the first one under the transforms that
surround it: the backward therefore has to be an operation with a vmap rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_kernels import engines, streamed
from rft_kernels.parallel import Shard


@dataclass(frozen=True)
class Options:
    """What is not a tensor. A dataclass, because torch.func would flatten a tuple and batch its members."""

    softcap: float | None
    ignore_index: int
    entropy: bool  # compute the entropy
    unit: bool  # compute dlogp/dh in the forward
    workspace: int  # bytes
    engine: str  # of `engines.load`
    shard: Shard | None = None  # of a vocabulary that is spread over ranks


def log_prob(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None,
    softcap: float | None,
    ignore_index: int,
    entropy: bool,
    save_unit: bool,
    workspace: int,
    engine: str = "streamed",
    shard: Shard | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """h [T, D], w [V, D], y [T], scale [T] = 1 / temperature -> logp, entropy or None, lse, each [T].

    save_unit: keep dlogp/dh [T, D] from the forward if h is the only input that needs a gradient.
    """
    frozen = not (w.requires_grad or (bias is not None and bias.requires_grad))
    unit = save_unit and frozen and softcap is None and h.requires_grad and torch.is_grad_enabled()
    options = Options(softcap, ignore_index, entropy, unit, workspace, engine, shard)
    if torch.compiler.is_compiling() and shard is None:
        from rft_kernels import compiled

        return compiled.log_prob(h, w, y.long(), scale, bias, options)
    return _LogProb.apply(h, w, bias, y.long(), scale, options)[:3]


def accumulate_dtype(h: Tensor, w: Tensor) -> torch.dtype:
    """The type that everything is computed and returned in."""
    return torch.float64 if torch.float64 in (h.dtype, w.dtype) else torch.float32


def temperatures(temperature: float | Tensor, h: Tensor, w: Tensor) -> Tensor:
    """The temperature of each row: [T], in the type that is computed in."""
    dtype, rows = accumulate_dtype(h, w), h.shape[0]
    if isinstance(temperature, Tensor):
        if temperature.shape not in ((), (rows,)):
            raise ValueError(
                f"temperature: expected a number, [] or [T] = [{rows}], got {list(temperature.shape)}"
            )
        return temperature.to(h.device, dtype).expand(rows)
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number > 0, got {temperature}")
    return torch.full((rows,), float(temperature), dtype=dtype, device=h.device)


def exact_matmul(device_type: str) -> AbstractContextManager:
    """Autocast would round logits to 8 bits of mantissa: an error of 3e-2 in a log-probability."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def compute(
    h: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, scale: Tensor, options: Options
) -> tuple[Tensor | None, ...]:
    """-> logp, entropy or None, lse, each [T], and dlogp/dh [T, D] or None."""
    rows = _live_rows(y != options.ignore_index)
    with exact_matmul(h.device.type):
        engine, head = _head(_take(h, rows), w, bias, _take(scale, rows), options)
        out = engine.forward(head, _take(y, rows), entropy=options.entropy, unit=options.unit)
    return tuple(_spread(x, rows, h.shape[0]) for x in out)


def gradients(
    h, w, bias, y, scale, logp, entropy, lse, unit, g, g_entropy, g_lse, options: Options, need: tuple
) -> tuple[Tensor | None, ...]:
    """Inputs and outputs of `compute`, gradients of its outputs -> gradients of h, w and bias, or None."""
    dh, live = None, y != options.ignore_index
    if unit is not None and g is not None:
        # A where, not a product: what is NaN in a row without an upstream gradient has to end there.
        dh, g = torch.where((live & (g != 0))[:, None], unit * g[:, None], 0).to(h.dtype), None
    upstream = [x for x in (g, g_entropy, g_lse) if x is not None]
    if not upstream:
        return dh, None, None
    rows = _live_rows(live & (torch.stack(upstream) != 0).any(0))
    cotangent = streamed.Cotangent.of(*(_take(x, rows) for x in (logp, entropy, lse, g, g_entropy, g_lse)))
    with exact_matmul(h.device.type):
        engine, head = _head(_take(h, rows), w, bias, _take(scale, rows), options)
        more, dw, db = engine.backward(head, _take(y, rows), cotangent, need)
    if more is not None:
        more = _spread(more.to(h.dtype), rows, h.shape[0])
    return more if dh is None else dh + more, dw, None if db is None else db.to(bias.dtype)


class _LogProb(torch.autograd.Function):
    """`compute`, differentiable."""

    forward = staticmethod(compute)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options = inputs
        ctx.set_materialize_grads(False)
        if output[3] is not None:
            ctx.mark_non_differentiable(output[3])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, *upstream):
        need = ctx.needs_input_grad[:3]
        grads = _LogProbBackward.apply(*ctx.saved_tensors, *upstream[:3], ctx.options, need)
        return *grads, None, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return _loop(_LogProb.apply, info.batch_size, in_dims, args)


class _LogProbBackward(torch.autograd.Function):
    """`gradients`, which cannot be differentiated."""

    forward = staticmethod(gradients)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "linear_logprob: expected one differentiation, got two; pass engine='reference' (for a bound "
            "model fused=False, or fused_linear_logprob=False in StrategyConfig), which has any order"
        )

    @staticmethod
    def vmap(info, in_dims, *args):
        return _loop(_LogProbBackward.apply, info.batch_size, in_dims, args)


def _head(h: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor, options: Options) -> tuple:
    """The engine, and its view of the problem."""
    engine = engines.load(options.engine)
    head = engine.head(h, w, bias, scale, softcap=options.softcap, workspace=options.workspace)
    return engine, head if options.shard is None else head._replace(shard=options.shard)


def _live_rows(mask: Tensor) -> Tensor | None:
    """The indices where mask [T] holds; None if that is everywhere, or on the meta device: unknown."""
    if mask.is_meta:
        return None
    rows = mask.nonzero()[:, 0]
    return None if rows.numel() == mask.numel() else rows


def _take(x: Tensor | None, rows: Tensor | None) -> Tensor | None:
    return x if x is None or rows is None else x.index_select(0, rows)


def _spread(x: Tensor | None, rows: Tensor | None, tokens: int) -> Tensor | None:
    """The inverse of `_take`; the other rows are 0."""
    if x is None or rows is None:
        return x
    return x.new_zeros(tokens, *x.shape[1:]).index_copy_(0, rows, x)


def _loop(function: Callable, batch: int, in_dims: tuple, args: tuple) -> tuple:
    """The vmap rule: one call for each example, because one matrix product fills the machine."""

    def example(i: int) -> tuple:
        pairs = zip(args, in_dims, strict=True)
        return function(*(x.select(d, i) if isinstance(d, int) else x for x, d in pairs))

    columns = zip(*(example(i) for i in range(batch)), strict=True)
    out = tuple(None if c[0] is None else torch.stack(c) for c in columns)
    return out, tuple(None if x is None else 0 for x in out)
