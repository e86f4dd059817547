"""Triton kernels over rows of logits that exist: the running softmax, and the gradient.

One read for the softmax; one more and a write for the gradient. Importing this needs triton. On CPU tensors
the kernels run only in triton's interpreter, which has to be switched on (TRITON_INTERPRET=1) before the
import. Nothing here is atomic, so reruns are equal to the bit, and a row is the work of one program, so it
does not depend on other rows.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft_kernels.slices import ceil_div
from rft_kernels.softmax import Cotangent, OnlineSoftmax

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# (columns read at once, warps): fixed by the width of the row, so that a row never depends on what was tuned.
ABSORB = {2048: 8}
# Of a thread of `absorb_kernel`: left alone, ptxas gives some variants 32 and spills a number or two.
REGISTERS = 64
DIFFERENTIATE = {1024: 4}
RESCALE = {1024: 4}


def _item(n):
    return n.handle.data.item()


@triton.jit
def _same(n):
    return n


# A number as an argument of range: in the interpreter it is an array of one, no index for numpy 2.4.
bound = _item if INTERPRETED else _same


@triton.jit
def tanh(x):
    """Return tanh: the interpreter has no libdevice; exp of a negative number cannot overflow."""
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _scaled(x_ptr, bias_ptr, inner, at, mask, BIAS: tl.constexpr):
    """Return inner (x + bias) at some columns of a row, in the type of inner."""
    z = tl.load(x_ptr + at, mask=mask, other=0.0).to(inner.dtype)
    if BIAS:
        z += tl.load(bias_ptr + at, mask=mask, other=0.0).to(inner.dtype)
    return z * inner


@triton.jit
def _logits(x_ptr, bias_ptr, inner, outer, at, mask, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the logits at some columns of a row: outer tanh of `_scaled` under a softcap."""
    z = _scaled(x_ptr, bias_ptr, inner, at, mask, BIAS)
    if SOFTCAP:
        z = tanh(z) * outer
    return z


# The signatures of kernels are a few lines each.
# fmt: off
@triton.jit
def absorb_kernel(
    x_ptr, x_stride, bias_ptr, inner_ptr, outer_ptr, y_ptr, first, columns, row_max_ptr, row_sum_ptr,
    row_moment_ptr, target_logit_ptr, rescale_ptr, kept_ptr, kept_stride,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a row of x [R, C] to the running softmax, without its target.

    KEEP: exp(z - row_max) goes into kept [R, C].
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    inner = tl.load(inner_ptr + row)
    outer = inner
    if SOFTCAP:
        outer = tl.load(outer_ptr + row)

    # The target's logit, if its column is among these.
    target = tl.load(y_ptr + row) - first
    inside = (target >= 0) & (target < columns)
    target_logit = _logits(x_ptr, bias_ptr, inner, outer, target, inside, BIAS, SOFTCAP)
    tl.store(target_logit_ptr + row, target_logit, mask=inside)

    # One maximum of the row, and BLOCK sums relative to it.
    old_max = tl.load(row_max_ptr + row)
    row_max = old_max
    sums = tl.zeros([BLOCK], inner.dtype)
    moments = tl.zeros([BLOCK], inner.dtype)
    for start in range(0, bound(columns), BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = _logits(x_ptr, bias_ptr, inner, outer, at, at < columns, BIAS, SOFTCAP)
        z = tl.where((at < columns) & (at != target), z, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(z, 0))
        drop = row_max - new_max
        if ENTROPY:
            moments = (moments + drop * sums) * tl.exp(drop)
        sums = sums * tl.exp(drop)
        z = z - new_max
        e = tl.exp(z)
        if ENTROPY:
            moments += tl.maximum(z, -1e4) * e
        sums += e
        row_max = new_max

    # What came before these columns is relative to the old maximum.
    drop = old_max - row_max
    rescale = tl.exp(drop)
    old_sum = tl.load(row_sum_ptr + row)
    if ENTROPY:
        old_moment = tl.load(row_moment_ptr + row)
        tl.store(row_moment_ptr + row, (old_moment + drop * old_sum) * rescale + tl.sum(moments, 0))
    tl.store(row_sum_ptr + row, old_sum * rescale + tl.sum(sums, 0))
    tl.store(row_max_ptr + row, row_max)
    tl.store(rescale_ptr + row, rescale)

    if KEEP:
        for start in range(0, bound(columns), BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _logits(x_ptr, bias_ptr, inner, outer, at, at < columns, BIAS, SOFTCAP)
            e = tl.where(at == target, 0.0, tl.exp(z - row_max))
            here = kept_ptr + row * kept_stride + at
            tl.store(here, e.to(kept_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def differentiate_kernel(
    x_ptr, x_stride, bias_ptr, inner_ptr, outer_ptr, y_ptr, first, columns, lse_ptr, p_factor_ptr,
    g_entropy_ptr, target_grad_ptr, grad_scale_ptr, dx_ptr, dx_stride,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn a piece of a row of x [R, C] into its gradient dx [R, C].

    Divided by grad_scale [R]; dx may be x itself.

    1[y] - p is formed before it is rounded to the type of dx: the target's column is `target_grad`, never
    1 - p.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    slope = tl.load(inner_ptr + row)
    z = _scaled(x_ptr + row * x_stride, bias_ptr, slope, at, mask, BIAS)
    if SOFTCAP:
        outer = tl.load(outer_ptr + row)
        z = tanh(z)
        slope = (1 - z * z) * (outer * slope)
        z = z * outer

    # p times its factor; the target's column has its own number.
    z = z - tl.load(lse_ptr + row)
    factor = tl.load(p_factor_ptr + row)
    if ENTROPY:
        log_p = tl.maximum(z, -1e4)
        factor = factor - tl.load(g_entropy_ptr + row) * log_p
    is_target = at == tl.load(y_ptr + row) - first
    dz = tl.where(is_target, tl.load(target_grad_ptr + row), tl.exp(z) * factor) * slope
    if SCALED:
        dz = dz / tl.load(grad_scale_ptr + row)
    tl.store(dx_ptr + row * dx_stride + at, dz.to(dx_ptr.dtype.element_ty), mask=mask)
# fmt: on


@triton.jit
def rescale_kernel(x_ptr, x_stride, columns, factor_ptr, BLOCK: tl.constexpr):
    """Multiply a row of x [R, D] by its factor [R], in place.

    A factor of 1 costs nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row)
    if factor != 1:
        for start in range(0, bound(columns), BLOCK):
            at = start + tl.arange(0, BLOCK)
            here = x_ptr + row * x_stride + at
            tl.store(here, tl.load(here, mask=at < columns, other=0.0) * factor, mask=at < columns)


def absorb(
    state: OnlineSoftmax,
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
    """Add the columns x [R, C] of the logits to the state, in place.

    They are columns [first, first + C) of the vocabulary; labels y [R].

    kept [R, C] gets exp(z - row_max), and 0 in the target's column.
    """
    rows, columns = x.shape
    if rows == 0:
        return
    # A kernel gets a number for each argument, also for a tensor that is absent.
    kept_stride = 0
    if kept is not None:
        kept_stride = kept.stride(0)
    block, warps = _fixed(ABSORB, columns)
    launch(
        absorb_kernel,
        (rows,),
        x.device,
        x,
        x.stride(0),
        bias,
        inner,
        outer,
        y,
        first,
        columns,
        *state,
        kept,
        kept_stride,
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
    grad_scale: Tensor | None = None,
) -> None:
    """Write the gradient in the columns x [R, C] of the logits into dx [R, C].

    They are columns [first, first + C) of the vocabulary; rows are divided by grad_scale [R].
    """
    rows, columns = x.shape
    if rows == 0:
        return
    # Programs share rows: nothing is summed here.
    block, warps = _fixed(DIFFERENTIATE, columns)
    launch(
        differentiate_kernel,
        (rows, ceil_div(columns, block)),
        x.device,
        x,
        x.stride(0),
        bias,
        inner,
        outer,
        y,
        first,
        columns,
        *cot,
        grad_scale,
        dx,
        dx.stride(0),
        BIAS=bias is not None,
        SOFTCAP=outer is not None,
        ENTROPY=cot.g_entropy is not None,
        SCALED=grad_scale is not None,
        BLOCK=block,
        num_warps=warps,
    )


def rescale(x: Tensor, factor: Tensor) -> None:
    """Multiply x [R, D] by factor [R], in place."""
    rows, columns = x.shape
    if x.numel() == 0:
        return
    block, warps = _fixed(RESCALE, columns)
    args = (x, x.stride(0), columns, factor)
    launch(rescale_kernel, (rows,), x.device, *args, BLOCK=block, num_warps=warps)


def launch(kernel: Any, programs: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Run a kernel on a device, which need not be the current one."""
    context: AbstractContextManager = nullcontext()
    if device.type == "cuda":
        context = torch.cuda.device(device)
    with context:
        kernel[programs](*args, **options)


def _fixed(table: dict[int, int], columns: int) -> tuple[int, int]:
    """Return the smallest block that holds a row, or the largest there is; and its warps."""
    block = min((b for b in table if b >= columns), default=max(table))
    return block, table[block]
