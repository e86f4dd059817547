"""Log-probability and entropy of given logits in one pass: a Triton row kernel, or slices of rows.

Two `autograd.Function`s, each with a vmap rule that makes the examples more rows: torch.func runs the
backward of the first one under the transforms that surround it. What is differentiated twice is the
definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from rft_kernels import autograd, engines, reference, streamed

_CPU_BYTES = 4 << 20  # of a slice of rows in float32: it stays in the cache


class FromLogits(NamedTuple):
    """In float32 (float64 if the logits are). Rows whose label is ignored are 0."""

    logp: Tensor  # [T] nats
    entropy: Tensor | None  # [T] nats


def logits_logprob(
    z: Tensor,
    y: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    inplace_backward: bool = False,
    engine: str = "auto",
) -> FromLogits:
    """z [T, V], y [T] -> log softmax(z / temperature)[t, y[t]] as [T], and the entropy [T] if wanted.

    Arithmetic is float32 whatever the type of z (float64 if z is); z is read once, and only it, y and a few
    numbers a row are kept for the backward. Differentiable in z through both outputs, under torch.func too
    (not in forward mode); a second differentiation is that of plain operations on whole logits. `temperature`
    (a number, [] or [T]) is data. A row whose label is `ignore_index` yields 0 and no gradient, also if it is
    NaN; any other label outside [0, V) makes its row NaN.

    inplace_backward: the gradient overwrites z, which nobody may read afterwards, nor differentiate again.

    engine: "streamed": torch operations on slices of rows. "gemm" or "triton": the Triton row kernel, on
    CUDA. "auto" is the kernel on CUDA where triton is there and z is not float64.

    Raises ValueError for shapes, types and options that do not fit.
    """
    _check(z, y, engine)
    scale = 1 / autograd.temperatures(temperature, z, z)
    if scale.requires_grad:
        raise ValueError("temperature: expected no gradient, got requires_grad=True")
    fused = engines.pick(engine, z, z) != "streamed"
    options = Options(ignore_index, entropy, inplace_backward, fused)
    logp, found, _ = _FromLogits.apply(z, y.long(), scale, options)  # found is None without entropy
    return FromLogits(logp, found)


@dataclass(frozen=True)
class Options:
    """What is not a tensor. A dataclass, because torch.func would flatten a tuple and batch its members."""

    ignore_index: int
    entropy: bool  # compute the entropy
    inplace: bool  # the gradient overwrites the logits
    fused: bool  # by the Triton kernels


class _FromLogits(torch.autograd.Function):
    """(z, y, scale, options) -> (logp, entropy or None, lse)."""

    @staticmethod
    def forward(z, y, scale, options):
        y, scale = y.contiguous(), scale.contiguous()
        run = streamed.start(scale)
        for rows, piece, room in _slices(z, scale, options.fused):
            state = streamed.Running(*(r[rows] for r in run))
            _absorb(state, piece, y[rows], scale[rows], room, options)
        logp, lse = streamed.log_prob(run)
        entropy = streamed.entropy_of(run, logp) if options.entropy else None
        values = (logp, entropy, lse)
        return tuple(x if x is None else torch.where(y == options.ignore_index, 0, x) for x in values)

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, y, scale, ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(z, y, scale, *output)

    @staticmethod
    def backward(ctx, g, g_entropy, _):
        if g is None and g_entropy is None:
            return None, None, None, None
        return _Gradient.apply(*ctx.saved_tensors, g, g_entropy, ctx.options), None, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        out = _FromLogits.apply(*_as_rows(info.batch_size, in_dims, args))
        out = tuple(x if x is None else x.unflatten(0, (info.batch_size, -1)) for x in out)
        return out, tuple(None if x is None else 0 for x in out)


class _Gradient(torch.autograd.Function):
    """Inputs and outputs of `_FromLogits`, gradients of logp and entropy -> the gradient of z."""

    @staticmethod
    def forward(z, y, scale, logp, entropy, lse, g, g_entropy, options):
        y, scale, z = y.contiguous(), scale.contiguous(), z.detach()
        cot = streamed.Cotangent.of(logp, entropy, lse, g, g_entropy, None)
        cot = cot.each(Tensor.contiguous)
        dz = z if options.inplace else torch.empty_like(z, memory_format=torch.contiguous_format)
        for rows, piece, room in _slices(z, scale, options.fused):
            _differentiate(piece, dz[rows], y[rows], cot.each(itemgetter(rows)), scale[rows], room)
        # Filled, not multiplied: a NaN of an ignored row, or of one without an upstream gradient, ends here.
        live = torch.stack([x != 0 for x in (g, g_entropy) if x is not None]).any(0)
        return dz.masked_fill_(~(live & (y != options.ignore_index))[:, None], 0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, y, scale, _, _, _, g, g_entropy, ctx.options = inputs
        ctx.save_for_backward(z, y, scale, g, g_entropy)

    @staticmethod
    def backward(ctx, u):
        if ctx.options.inplace:
            raise RuntimeError("z: expected one differentiation with inplace_backward=True, got two")
        z, y, scale, g, g_entropy = ctx.saved_tensors
        zero = torch.zeros_like(scale)
        upstream = (zero if g is None else g, zero if g_entropy is None else g_entropy)

        def gradient(z: Tensor, *upstream: Tensor) -> Tensor:
            def outputs(z: Tensor) -> tuple[Tensor, Tensor]:
                return reference.outputs(z.to(scale.dtype) * scale[:, None], y, ctx.options.ignore_index)[:2]

            return torch.func.vjp(outputs, z)[1](upstream)[0]

        dz, *more = torch.func.vjp(gradient, z, *upstream)[1](u)
        more = (None if x is None else d for x, d in zip((g, g_entropy), more, strict=True))
        return dz, *(None,) * 5, *more, None

    @staticmethod
    def vmap(info, in_dims, *args):
        dz = _Gradient.apply(*_as_rows(info.batch_size, in_dims, args))
        return dz.unflatten(0, (info.batch_size, -1)), 0


def _as_rows(batch: int, in_dims: tuple, args: tuple) -> list:
    """Tensors of B examples of T rows each -> of B T rows; what has no examples is the same for all."""

    def rows(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(batch, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    return [rows(x, d) if isinstance(x, Tensor) else x for x, d in zip(args, in_dims, strict=True)]


def _slices(z: Tensor, scale: Tensor, fused: bool) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Rows of z, and room for them in the type of scale; all at once and without room for the kernels."""
    if fused:
        yield slice(0, z.shape[0]), z if z.stride(1) == 1 else z.contiguous(), None
        return
    height = max(1, _CPU_BYTES // (4 * z.shape[1]))
    room = scale.new_empty(min(height, z.shape[0]), z.shape[1])
    for rows in streamed.cut(z.shape[0], height):
        yield rows, z[rows], room[: z[rows].shape[0]]


def _absorb(
    run: streamed.Running, z: Tensor, y: Tensor, scale: Tensor, room: Tensor | None, options: Options
) -> None:
    if room is None:
        from rft_kernels import row_kernels

        return row_kernels.absorb(
            run, z, y, first=0, inner=scale, outer=None, bias=None, entropy=options.entropy
        )
    torch.mul(z, scale[:, None], out=room)
    return streamed.absorb(run, room, y, None, entropy=options.entropy)


def _differentiate(
    z: Tensor, dz: Tensor, y: Tensor, cot: streamed.Cotangent, scale: Tensor, room: Tensor | None
) -> None:
    if room is None:
        from rft_kernels import row_kernels

        return row_kernels.differentiate(z, dz, y, cot, first=0, inner=scale, outer=None, bias=None)
    streamed.differentiate(torch.mul(z, scale[:, None], out=room), y, cot, None)
    return torch.mul(room, scale[:, None], out=dz)


def _check(z: Tensor, y: Tensor, engine: str) -> None:
    if z.dim() != 2 or z.shape[1] == 0:
        raise ValueError(f"z: expected [T, V] with V > 0, got {list(z.shape)}")
    if not z.is_floating_point():
        raise ValueError(f"z: expected a floating-point tensor, got {z.dtype}")
    if y.shape != z.shape[:1]:
        raise ValueError(f"y: expected [T] = [{z.shape[0]}], got {list(y.shape)}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y: expected an integer tensor, got {y.dtype}")
    if y.device != z.device:
        raise ValueError(f"y: expected a tensor on {z.device}, got {y.device}")
    engines.check(engine, z, also=())
