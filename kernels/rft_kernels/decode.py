"""Triton kernels of one new token of every row: norms, rotary embedding, attention, SwiGLU, draw.

Importing this needs triton. They round to 16 bits where the modules of transformers do, so that a sampler
stays as near to its trainer as it was. Nothing here is atomic, and a row never depends on another one.
"""

from __future__ import annotations

from subprocess import SubprocessError
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from rft_kernels import row_kernels
from rft_kernels.row_kernels import bound
from rft_kernels.slices import ceil_div

__all__ = ["attend", "draw", "norm", "rotate", "swiglu"]

_COLUMNS = 64  # of the cache that attention reads at once
_SWIGLU = 1024  # columns of a program
_LEAST = 16  # rows of a product
_DRAWN = 4096  # nodes of a level that are summed at once
_LOG2E = 1.4426950408889634


@triton.jit
def _product(x, y):
    """Return x * y, rounded to the type of x."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@triton.jit
def _sum(x, y):
    """Return x + y, rounded to the type of x."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def _difference(x, y):
    """Return x - y, rounded to the type of x."""
    return (x.to(tl.float32) - y.to(tl.float32)).to(x.dtype)


# The signatures of kernels are a few lines each.
# fmt: off
@triton.jit
def norm_kernel(x_ptr, more_ptr, w_ptr, out_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise a row of x [R, D] to out [R, D] by its root mean square. ADD: x becomes x + more first."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0)
    if ADD:
        x = _sum(x, tl.load(more_ptr + row + at, mask=mask, other=0.0))
        tl.store(x_ptr + row + at, x, mask=mask)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    w = tl.load(w_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + row + at, _product(w, (wide * factor).to(x.dtype)), mask=mask)


@triton.jit
def _turn(x_ptr, w_ptr, cos_ptr, sin_ptr, out_ptr, eps, NORM: tl.constexpr, SIZE: tl.constexpr,
          BLOCK: tl.constexpr):
    """Rotate one head of SIZE numbers, which pair up across its halves. NORM: an RMSNorm comes first."""
    at = tl.arange(0, BLOCK)
    mask = at < SIZE // 2
    then = at + SIZE // 2
    a = tl.load(x_ptr + at, mask=mask, other=0.0)
    b = tl.load(x_ptr + then, mask=mask, other=0.0)
    if NORM:
        x = a.to(tl.float32)
        y = b.to(tl.float32)
        factor = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / SIZE + eps)
        a = _product(tl.load(w_ptr + at, mask=mask, other=0.0), (x * factor).to(a.dtype))
        b = _product(tl.load(w_ptr + then, mask=mask, other=0.0), (y * factor).to(b.dtype))
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, _difference(_product(a, cos), _product(b, sin)), mask=mask)
    cos = tl.load(cos_ptr + then, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + then, mask=mask, other=0.0)
    tl.store(out_ptr + then, _sum(_product(b, cos), _product(a, sin)), mask=mask)


@triton.jit
def rotate_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_eps, k_eps, out_ptr, keys_ptr,
    values_ptr, row_stride, head_stride, at_ptr,
    HEADS: tl.constexpr, OF_KEYS: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):
    """Rotate a head of the queries [R, H, D] to out, or one of the keys [R, H', D] into the cache.

    A value [R, H', D] is copied there: to column `at` of values [R, H', W, D].
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cos_ptr += row * SIZE
    sin_ptr += row * SIZE
    if head < HEADS:
        here = (row * HEADS + head) * SIZE
        _turn(q_ptr + here, q_norm_ptr, cos_ptr, sin_ptr, out_ptr + here, q_eps, NORM, SIZE, BLOCK)
    else:
        head = (head - HEADS) % OF_KEYS
        here = (row * OF_KEYS + head) * SIZE
        there = row * row_stride + head.to(tl.int64) * head_stride + tl.load(at_ptr) * SIZE
        if tl.program_id(1) < HEADS + OF_KEYS:
            _turn(k_ptr + here, k_norm_ptr, cos_ptr, sin_ptr, keys_ptr + there, k_eps, NORM, SIZE, BLOCK)
        else:
            at = tl.arange(0, 2 * BLOCK)
            x = tl.load(v_ptr + here + at, mask=at < SIZE, other=0.0)
            tl.store(values_ptr + there + at, x, mask=at < SIZE)


@triton.jit
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, row_stride, head_stride, bias_ptr, bias_stride, first_ptr, at_ptr, scale,
    out_ptr,
    EACH: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend from the EACH queries of a row that share a head of keys to columns [first, at] of the cache.

    A bias [R, W] is added to scores; a row that sees nothing gets 0. `scale` has the factor log2(e).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, GROUP)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    here = ((row * tl.num_programs(1) + head) * EACH + n) * SIZE + d
    asked = (n < EACH) & (d < SIZE)
    q = tl.load(q_ptr + here, mask=asked, other=0.0)
    if UPCAST:  # of 16 bits the interpreter has no products
        q = q.to(tl.float32)
    keys_ptr += row * row_stride + head * head_stride
    values_ptr += row * row_stride + head * head_stride
    bias_ptr += row * bias_stride
    end = tl.load(at_ptr) + 1
    first = tl.load(first_ptr + row) // BLOCK * BLOCK

    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, WIDTH], tl.float32)
    for start in range(bound(first), bound(end), BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = at[:, None] * SIZE + d
        seen = (at[:, None] < end) & (d < SIZE)
        k = tl.load(keys_ptr + place, mask=seen, other=0.0)
        bias = tl.load(bias_ptr + at, mask=at < end, other=float("-inf")).to(tl.float32)
        v = tl.load(values_ptr + place, mask=seen, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias[None, :]
        new_top = tl.maximum(top, tl.max(score, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - finite[:, None])
        drop = tl.exp2(top - finite)
        total = total * drop + tl.sum(p, 1)
        out = out * drop[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out_ptr + here, out.to(out_ptr.dtype.element_ty), mask=asked)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Write silu(gate) up of a piece of a row [R, F]."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row + at, mask=at < width, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    up = tl.load(up_ptr + row + at, mask=at < width, other=0.0)
    tl.store(out_ptr + row + at, _product(silu, up), mask=at < width)


@triton.jit
def draw_kernel(levels_ptr, stride, u_ptr, depth, token_ptr, width, BLOCK: tl.constexpr):
    """Draw one of `width` tokens by the weights at the start of a row of levels [R, W].

    The rest of the row is made here. A level is the one below it, folded in the middle:
    y[j] = x[j] + x[j + half]. So is `draw` of the engine.
    """
    row = tl.program_id(0).to(tl.int64)
    levels_ptr += row * stride
    first = tl.full([], 0, tl.int32)  # where the last level begins
    size = first + width
    while size > 1:
        half = (size + 1) // 2
        for start in range(0, bound(half), BLOCK):
            at = start + tl.arange(0, BLOCK)
            one = tl.load(levels_ptr + first + at, mask=at < half, other=0.0)
            two = tl.load(levels_ptr + first + half + at, mask=at + half < size, other=0.0)
            tl.store(levels_ptr + first + size + at, one + two, mask=at < half)
        tl.debug_barrier()  # the next level reads what other threads wrote
        first += size
        size = half

    # from the root, which is one node, to a token
    node = tl.full([], 0, tl.int32)
    for level in range(bound(depth)):
        below = tl.full([], 0, tl.int32)
        size = below + width
        for _ in range(bound(depth) - 1 - level):
            below += size
            size = (size + 1) // 2
        half = (size + 1) // 2
        here = levels_ptr + below + node
        one = tl.load(here, mask=node < size, other=0.0).to(tl.float64)
        two = tl.load(here + half, mask=node + half < size, other=0.0).to(tl.float64)
        u = tl.load(u_ptr + row * depth + level)
        node = tl.where(u * (one + two) < one, node, node + half)
    tl.store(token_ptr + row, node.to(tl.int64))
# fmt: on


def norm(x: Tensor, weight: Tensor, eps: float, *, more: Tensor | None = None) -> Tensor:
    """Return the RMSNorm [R, D] of x [R, D], to which `more` is added first, in place."""
    out = x.new_empty(x.shape)
    _launch(
        norm_kernel,
        (len(x),),
        x,
        more,
        weight,
        out,
        x.shape[1],
        eps,
        ADD=more is not None,
        BLOCK=triton.next_power_of_2(x.shape[1]),
        num_warps=4,
    )
    return out


def rotate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None = None,
) -> Tensor:
    """Return rotated queries [R, H, D]; write rotated keys and values to column `at` [1] of the cache.

    q [R, H D], k and v [R, H' D]; cos and sin [R, D] of `turn`, whose halves make pairs; keys and values
    [R, H', W, D], alike in strides. `norms` are weight [D] and eps of the queries' RMSNorm, and of the keys'.
    """
    rows, of_keys, _, size = keys.shape
    heads = q.shape[1] // size
    out = q.new_empty(rows, heads, size)
    (q_weight, q_eps), (k_weight, k_eps) = norms or ((None, 0.0), (None, 0.0))
    _launch(
        rotate_kernel,
        (rows, heads + 2 * of_keys),
        q,
        k,
        v,
        *turn,
        q_weight,
        k_weight,
        q_eps,
        k_eps,
        out,
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        at,
        HEADS=heads,
        OF_KEYS=of_keys,
        SIZE=size,
        NORM=norms is not None,
        BLOCK=triton.next_power_of_2(size) // 2,
        num_warps=1,
    )
    return out


def attend(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, first: Tensor, at: Tensor, *, scale: float
) -> Tensor:
    """Return attention [R, H, D] of queries [R, H, D] to columns first [R] to `at` [1] of a cache.

    Keys and values [R, H', W, D] are alike in strides; a bias [R, W] is added to scores times `scale`.
    """
    rows, of_keys, _, size = keys.shape
    each = q.shape[1] // of_keys
    out = q.new_empty(q.shape)
    _launch(
        attend_kernel,
        (rows, of_keys),
        q,
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        bias,
        bias.stride(0),
        first,
        at,
        scale * _LOG2E,
        out,
        EACH=each,
        SIZE=size,
        GROUP=max(_LEAST, triton.next_power_of_2(each)),
        WIDTH=max(_LEAST, triton.next_power_of_2(size)),
        BLOCK=_COLUMNS,
        UPCAST=row_kernels.INTERPRETED,
        num_warps=4,
    )
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) up, [R, F] as both are."""
    out = gate.new_empty(gate.shape)
    programs = (len(gate), ceil_div(gate.shape[1], _SWIGLU))
    _launch(swiglu_kernel, programs, gate, up, out, gate.shape[1], BLOCK=_SWIGLU, num_warps=4)
    return out


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Draw one of V tokens [R] by weights p [R, V] and uniform numbers u [R, D] of its D levels.

    In float32 the tokens are those of `rft_fn.engine.hf.draws.draw`, to the bit.
    """
    rows, width = p.shape
    depth = (width - 1).bit_length()
    levels = p.new_empty(rows, 2 * width + depth)
    levels[:, :width] = p
    token = u.new_empty(rows, dtype=torch.long)
    u = u[:, :depth].contiguous()
    _launch(draw_kernel, (rows,), levels, levels.stride(0), u, depth, token, width, BLOCK=_DRAWN, num_warps=8)
    return token


def _launch(kernel: Any, programs: tuple[int, ...], x: Tensor, *args: object, **options: object) -> None:
    """Run a kernel on the device of its first argument; RuntimeError where it cannot be compiled for that."""
    try:
        row_kernels.launch(kernel, programs, x.device, x, *args, **options)
    except (TritonError, SubprocessError) as error:
        raise RuntimeError(f"{kernel.__name__}: {error}") from error
