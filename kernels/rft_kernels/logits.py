"""Log-probability and entropy of given logits in one pass: a Triton row kernel, or slices of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rft_kernels import engines, streamed, tiles

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
    numbers a row are kept for the backward. Differentiable once, in z, through both outputs. `temperature`
    (a number, [] or [T]) is data. A row whose label is `ignore_index` yields 0 and no gradient, also if it is
    NaN; any other label outside [0, V) makes its row NaN.

    inplace_backward: the gradient overwrites z, which nobody may read afterwards, nor differentiate again.

    engine: "streamed": torch operations on slices of rows. "gemm" or "triton": the Triton row kernel, on
    CUDA. "auto" is the kernel on CUDA where triton is there and z is not float64.

    Raises ValueError for shapes, types and options that do not fit.
    """
    _check(z, y, engine)
    scale = 1 / streamed.temperatures(temperature, z, z)
    if scale.requires_grad:
        raise ValueError("temperature: expected no gradient, got requires_grad=True")
    fused = engines.pick(engine, z, z) != "streamed"
    out = _FromLogits.apply(
        z, y.long().contiguous(), scale.contiguous(), ignore_index, entropy, inplace_backward, fused
    )
    return FromLogits(out[0], out[1] if entropy else None)


class _FromLogits(torch.autograd.Function):
    """(z, y, scale, ignore_index, entropy, inplace, fused) -> (logp, entropy or None, lse)."""

    @staticmethod
    def forward(z, y, scale, ignore_index, entropy, inplace, fused):
        run = tiles.start(scale)
        for rows, piece in _slices(z, fused):
            _absorb(tiles.Running(*(r[rows] for r in run)), piece, y[rows], scale[rows], entropy, fused)
        logp, lse = tiles.log_prob(run)
        values = (logp, tiles.entropy_of(run, logp, lse) if entropy else None, lse)
        return tuple(x if x is None else torch.where(y == ignore_index, 0, x) for x in values)

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, y, scale, ctx.ignore_index, _, ctx.inplace, ctx.fused = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(z, y, scale, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, g, g_entropy, _):
        z, y, scale, logp, entropy, lse = ctx.saved_tensors
        none = (None,) * 6
        if g is None and g_entropy is None:
            return None, *none
        cot = tiles.Cotangent.of(logp, entropy, lse, g, g_entropy, None)
        cot = tiles.Cotangent(*(c if c is None else c.contiguous() for c in cot))
        dz = z.detach() if ctx.inplace else torch.empty_like(z, memory_format=torch.contiguous_format)
        for rows, piece in _slices(z.detach(), ctx.fused):
            here = tiles.Cotangent(*(c if c is None else c[rows] for c in cot))
            _differentiate(piece, dz[rows], y[rows], here, scale[rows], ctx.fused)
        # Filled, not multiplied: a NaN of an ignored row, or of one without an upstream gradient, ends here.
        live = torch.stack([x != 0 for x in (g, g_entropy) if x is not None]).any(0) & (y != ctx.ignore_index)
        return dz.masked_fill_(~live[:, None], 0), *none


def _slices(z: Tensor, fused: bool) -> Iterator[tuple[slice, Tensor]]:
    """All rows at once for the kernel; else a few, so that their float32 copy stays in the cache."""
    if fused:
        yield slice(0, z.shape[0]), z if z.stride(1) == 1 else z.contiguous()
        return
    for rows in tiles.cut(z.shape[0], max(1, _CPU_BYTES // (4 * z.shape[1]))):
        yield rows, z[rows]


def _absorb(run: tiles.Running, z: Tensor, y: Tensor, scale: Tensor, entropy: bool, fused: bool) -> None:
    if fused:
        from rft_kernels import rows

        return rows.absorb(run, z, y, first=0, inner=scale, outer=None, bias=None, entropy=entropy)
    return tiles.absorb(run, z.to(scale.dtype) * scale[:, None], y, None, entropy=entropy)


def _differentiate(
    z: Tensor, dz: Tensor, y: Tensor, cot: tiles.Cotangent, scale: Tensor, fused: bool
) -> None:
    if fused:
        from rft_kernels import rows

        return rows.differentiate(z, dz, y, cot, first=0, inner=scale, outer=None, bias=None)
    x = z.to(scale.dtype) * scale[:, None]
    tiles.differentiate(x, y, cot, None)
    dz.copy_(x.mul_(scale[:, None]))
    return None


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
