"""Every engine as one differentiable operation.

Rows are selected here, the engine does the arithmetic. There are two `autograd.Function`s, because torch.func
runs the backward of the first one under the transforms that surround it: the backward therefore has to be an
operation with a vmap rule too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_kernels import engines
from rft_kernels.interface import Problem
from rft_kernels.numerics import exact_matmul
from rft_kernels.parallel import Shard
from rft_kernels.softmax import Cotangent


@dataclass(frozen=True)
class Options:
    """All inputs but the tensors.

    A dataclass, because torch.func would flatten a tuple and batch its members.
    """

    softcap: float | None
    ignore_index: int
    entropy: bool  # compute the entropy
    unit_grad: bool  # compute dlogp/dh in the forward
    workspace: int  # bytes
    engine: str  # of `engines.load`
    shard: Shard | None = None  # of a vocabulary that is spread over ranks


def log_prob(
    h: Tensor, w: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return logp, entropy or None, and lse, each [T], by the engine of the options.

    h [T, D], w [V, D], y [T], scale [T] = 1 / temperature.
    """
    head = _LogProb if torch.compiler.is_compiling() else _Eager
    logp, entropy, lse, _ = head.apply(h, w, bias, y, scale, options)
    return logp, entropy, lse


def compute(
    h: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, scale: Tensor, options: Options
) -> tuple[Tensor | None, ...]:
    """Return the outputs of `log_prob`, and dlogp/dh [T, D] or None."""
    live = _indices(y != options.ignore_index)
    with exact_matmul(h.device.type):
        problem = _problem(h, w, bias, scale, live, options)
        engine = engines.load(options.engine)
        out = engine.forward(problem, _take(y, live), entropy=options.entropy, unit_grad=options.unit_grad)
    return tuple(_spread_optional(x, live, h.shape[0]) for x in out)


# The signature is that of an `autograd.Function`: inputs and outputs of `compute`, gradients of its outputs.
def gradients(
    h: Tensor,
    w: Tensor,
    bias: Tensor | None,
    y: Tensor,
    scale: Tensor,
    logp: Tensor,
    entropy: Tensor | None,
    lse: Tensor,
    unit_grad: Tensor | None,
    g: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    options: Options,
    need: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of h, w and bias, where they are needed.

    None where no row has one.
    """
    live = y != options.ignore_index

    # dlogp/dh is there already: the upstream gradient only scales it.
    dh = None
    if unit_grad is not None and g is not None:
        # A where, not a product: what is NaN in a row without an upstream gradient has to end there.
        dh = torch.where((live & (g != 0))[:, None], unit_grad * g[:, None], 0).to(h.dtype)
        g = None
    upstream = [x for x in (g, g_entropy, g_lse) if x is not None]
    if not upstream:
        return dh, None, None

    # The rest needs the logits again, of the rows that any other gradient reaches.
    rows = _indices(live & (torch.stack(upstream) != 0).any(0))
    cotangent = Cotangent.of(
        _take(logp, rows),
        _take_optional(entropy, rows),
        _take(lse, rows),
        _take_optional(g, rows),
        _take_optional(g_entropy, rows),
        _take_optional(g_lse, rows),
    )
    with exact_matmul(h.device.type):
        problem = _problem(h, w, bias, scale, rows, options)
        found = engines.load(options.engine).backward(problem, _take(y, rows), cotangent, need)

    if found.h is not None:
        more = _spread(found.h.to(h.dtype), rows, h.shape[0])
        if dh is not None:
            more = dh + more
        dh = more
    dbias = found.bias
    if bias is not None and dbias is not None:
        dbias = dbias.to(bias.dtype)
    return dh, found.w, dbias


class _LogProb(torch.autograd.Function):
    """`compute`, differentiable."""

    forward = staticmethod(compute)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.options = inputs
        ctx.set_materialize_grads(False)
        unit_grad = output[3]
        if unit_grad is not None:
            ctx.mark_non_differentiable(unit_grad)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        need = ctx.needs_input_grad[:3]
        grads = _LogProbBackward.apply(*ctx.saved_tensors, *upstream[:3], ctx.options, need)
        return *grads, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return _loop(_LogProb.apply, info.batch_size, in_dims, args)


class _Eager(_LogProb):
    """`_LogProb` with a line about forward mode; torch.compile takes no function that has a `jvp`."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "linear_logprob: expected reverse mode, got forward mode (jvp); pass engine='reference' (for a "
            "bound model fused=False, or fused_linear_logprob=False in StrategyConfig), which has both"
        )


class _LogProbBackward(torch.autograd.Function):
    """`gradients`, which cannot be differentiated."""

    forward = staticmethod(gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "linear_logprob: expected one differentiation, got two; pass engine='reference' (for a bound "
            "model fused=False, or fused_linear_logprob=False in StrategyConfig), which has any order"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return _loop(_LogProbBackward.apply, info.batch_size, in_dims, args)


def _problem(
    h: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor, rows: Tensor | None, options: Options
) -> Problem:
    """Return the problem of some rows, or of all without `rows`."""
    return Problem(
        _take(h, rows), w, bias, _take(scale, rows), options.softcap, options.workspace, options.shard
    )


def _indices(mask: Tensor) -> Tensor | None:
    """Return the indices where mask [T] is True; None if that is everywhere.

    None on the meta device too, where it is unknown.
    """
    if mask.is_meta:
        return None
    rows = mask.nonzero()[:, 0]
    if rows.numel() == mask.numel():
        return None
    return rows


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    """Take the rows of x [T, ...] at these indices; all of them without any."""
    if rows is None:
        return x
    return x.index_select(0, rows)


def _take_optional(x: Tensor | None, rows: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return _take(x, rows)


def _spread(x: Tensor, rows: Tensor | None, tokens: int) -> Tensor:
    """Undo `_take`; the other rows are 0."""
    if rows is None:
        return x
    return x.new_zeros(tokens, *x.shape[1:]).index_copy_(0, rows, x)


def _spread_optional(x: Tensor | None, rows: Tensor | None, tokens: int) -> Tensor | None:
    if x is None:
        return None
    return _spread(x, rows, tokens)


def _loop(function: Callable, batch: int, in_dims: tuple, args: tuple) -> tuple:
    """Vmap by one call for each example, because one matrix product fills the machine."""

    def selected(x: Any, dim: Any, i: int) -> Any:
        if isinstance(dim, int):
            return x.select(dim, i)
        return x

    def example(i: int) -> tuple:
        return function(*(selected(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))

    # The examples' outputs, each stacked along a new dimension 0; absent ones have none.
    out = []
    out_dims = []
    for column in zip(*(example(i) for i in range(batch)), strict=True):
        if column[0] is None:
            out.append(None)
            out_dims.append(None)
        else:
            out.append(torch.stack(column))
            out_dims.append(0)
    return tuple(out), tuple(out_dims)
