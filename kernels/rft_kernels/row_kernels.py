"""Triton kernels over rows of logits: one read for the running softmax, one more and a write for a gradient.

Importing this needs triton. On CPU tensors the kernels run only in triton's interpreter, which has to be
switched on (TRITON_INTERPRET=1) before the import. Nothing here is atomic, so reruns are equal to the bit,
and a row is the work of one program, so it does not depend on other rows.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft_kernels.streamed import Cotangent, Running

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# (columns read at once, warps): fixed by the width of the row, so that a row never depends on what was tuned.
ABSORB = {2048: 8}
# Of a thread of `absorb_kernel`: left alone, ptxas gives some variants 32 and spills a number or two.
REGISTERS = 64
DIFFERENTIATE = {1024: 4}
RESCALE = {1024: 4}


@triton.jit
def tanh(x):
    """The interpreter has no libdevice; exp of a negative number cannot overflow."""
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _scaled(x, bias, inner, at, mask, BIAS: tl.constexpr):
    """inner (x + bias) at some columns of a row, in the type of inner."""
    z = tl.load(x + at, mask=mask, other=0.0).to(inner.dtype)
    if BIAS:
        z += tl.load(bias + at, mask=mask, other=0.0).to(inner.dtype)
    return z * inner


# fmt: off
@triton.jit
def absorb_kernel(
    x, x_stride, bias, inner, outer, y, first, columns, top, total, weighted, hit, shrink, kept,
    kept_stride,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
# fmt: on
    """A row of x [R, C] into the running softmax, without its target; KEEP: exp(z - top) into kept [R, C]."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    scale = tl.load(inner + row)
    cap = scale
    if SOFTCAP:
        cap = tl.load(outer + row)
    target = tl.load(y + row) - first
    met = (target >= 0) & (target < columns)
    seen = _scaled(x, bias, scale, target, met, BIAS)
    if SOFTCAP:
        seen = tanh(seen) * cap
    tl.store(hit + row, seen, mask=met)

    old = tl.load(top + row)
    high = old
    s = tl.zeros([BLOCK], scale.dtype)
    u = tl.zeros([BLOCK], scale.dtype)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = _scaled(x, bias, scale, at, at < columns, BIAS)
        if SOFTCAP:
            z = tanh(z) * cap
        z = tl.where((at < columns) & (at != target), z, float("-inf"))
        risen = tl.maximum(high, tl.max(z, 0))
        drop = high - risen
        if ENTROPY:
            u = (u + drop * s) * tl.exp(drop)
        s = s * tl.exp(drop)
        z = z - risen
        e = tl.exp(z)
        if ENTROPY:
            u += tl.maximum(z, -1e4) * e
        s += e
        high = risen
    drop = old - high
    factor = tl.exp(drop)
    before = tl.load(total + row)
    if ENTROPY:
        tl.store(weighted + row, (tl.load(weighted + row) + drop * before) * factor + tl.sum(u, 0))
    tl.store(total + row, before * factor + tl.sum(s, 0))
    tl.store(top + row, high)
    tl.store(shrink + row, factor)

    if KEEP:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _scaled(x, bias, scale, at, at < columns, BIAS)
            if SOFTCAP:
                z = tanh(z) * cap
            e = tl.where(at == target, 0.0, tl.exp(z - high))
            tl.store(kept + row * kept_stride + at, e.to(kept.dtype.element_ty), mask=at < columns)


# fmt: off
@triton.jit
def differentiate_kernel(
    x, x_stride, bias, inner, outer, y, first, columns, lse, level, g_entropy, peak, unit, dx,
    dx_stride,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
# fmt: on
    """A piece of a row of x [R, C] to the gradient in it, divided by unit [R]; dx may be x itself.

    1[y] - p is formed before it is rounded to the type of dx: the target's column is `peak`, never 1 - p.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    scale = tl.load(inner + row)
    z = _scaled(x + row * x_stride, bias, scale, at, mask, BIAS)
    if SOFTCAP:
        cap = tl.load(outer + row)
        z = tanh(z)
        scale = (1 - z * z) * (cap * scale)
        z = z * cap
    z = z - tl.load(lse + row)
    factor = tl.load(level + row)
    if ENTROPY:
        low = tl.maximum(z, -1e4)
        factor = factor - tl.load(g_entropy + row) * low
    dz = tl.where(at == tl.load(y + row) - first, tl.load(peak + row), tl.exp(z) * factor) * scale
    if UNIT:
        dz = dz / tl.load(unit + row)
    tl.store(dx + row * dx_stride + at, dz.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def rescale_kernel(x, x_stride, columns, factor, BLOCK: tl.constexpr):
    """A row of x [R, D] times its factor [R], in place; a factor of 1 costs nothing."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(factor + row)
    if scale != 1:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            here = x + row * x_stride + at
            tl.store(here, tl.load(here, mask=at < columns, other=0.0) * scale, mask=at < columns)


def absorb(
    run: Running,
    x: Tensor,
    y: Tensor,
    *,
    first: int,
    inner: Tensor,
    outer: Tensor | None,
    bias: Tensor | None,
    entropy: bool,
    kept: Tensor | None = None,
) -> None:
    """Adds the columns [first, first + C) of the logits, x [R, C], to run [R] in place; labels y [R]."""
    if x.shape[0] == 0:
        return
    block, warps = _fixed(ABSORB, x.shape[1])
    with on(x):
        absorb_kernel[(x.shape[0],)](
            x,
            x.stride(0),
            bias,
            inner,
            outer,
            y,
            first,
            x.shape[1],
            *run,
            kept,
            0 if kept is None else kept.stride(0),
            BIAS=bias is not None,
            SOFTCAP=outer is not None,
            ENTROPY=entropy,
            KEEP=kept is not None,
            BLOCK=block,
            num_warps=warps,
            maxnreg=REGISTERS,
        )


def differentiate(
    x: Tensor,
    dx: Tensor,
    y: Tensor,
    cot: Cotangent,
    *,
    first: int,
    inner: Tensor,
    outer: Tensor | None,
    bias: Tensor | None,
    unit: Tensor | None = None,
) -> None:
    """The gradient in the columns [first, first + C), x [R, C], over unit [R], into dx [R, C]."""
    if x.shape[0] == 0:
        return
    block, warps = _fixed(DIFFERENTIATE, x.shape[1])
    with on(x):
        differentiate_kernel[(x.shape[0], triton.cdiv(x.shape[1], block))](
            x,
            x.stride(0),
            bias,
            inner,
            outer,
            y,
            first,
            x.shape[1],
            *cot,
            unit,
            dx,
            dx.stride(0),
            BIAS=bias is not None,
            SOFTCAP=outer is not None,
            ENTROPY=cot.g_entropy is not None,
            UNIT=unit is not None,
            BLOCK=block,
            num_warps=warps,
        )


def rescale(x: Tensor, factor: Tensor) -> None:
    """x [R, D] times factor [R], in place."""
    if x.numel() == 0:
        return
    block, warps = _fixed(RESCALE, x.shape[1])
    with on(x):
        rescale_kernel[(x.shape[0],)](x, x.stride(0), x.shape[1], factor, BLOCK=block, num_warps=warps)


def on(x: Tensor) -> AbstractContextManager:
    """Launches go to the current device, which need not be that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _fixed(table: dict[int, int], columns: int) -> tuple[int, int]:
    """The smallest block that holds a row, or the largest there is; and its warps."""
    block = min((b for b in table if b >= columns), default=max(table))
    return block, table[block]
