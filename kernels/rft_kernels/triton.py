"""Triton's own matrix products: what follows a tile of logits happens before it leaves the registers.

Forward: one persistent kernel, and no slice of the logits reaches memory. A program owns a block of tokens
and every S-th slice of the vocabulary, so all programs that run together read the same few slices of w and
blocks of h, which then stay in the L2 cache. Each leaves one running softmax a row; the S of them are merged
in a fixed order.

Backward: slice by slice of the vocabulary a kernel makes the logits and stores their gradient in 16 bits; the
two products behind it, and the unit gradient of a frozen head, are those of `gemm`.

Blocks of h, w and the gradient are moved by tensor descriptors: on Hopper the hardware then copies them by
itself, and no thread holds an address.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rft_kernels import gemm, streamed
from rft_kernels.gemm import Gradient, Head, head
from rft_kernels.row_kernels import INTERPRETED, on, tanh

__all__ = ["Head", "backward", "forward", "head"]

GROUP = 16  # blocks of tokens whose tiles run one after another, over all columns: what they read stays in L2
SPLITS = 8  # of the vocabulary; a constant, so that a row does not depend on how many rows there are


class Config(NamedTuple):
    """A tile of [tokens, columns] logits, summed over pieces of `depth` of the width."""

    tokens: int
    columns: int
    depth: int
    stages: int
    warps: int


# For 16-bit inputs. The wide tile reads less of what is in L2; the forward of a head with a bias or a softcap
# would spill registers with it.
WIDE = Config(128, 256, 64, 4, 8)
NARROW = Config(128, 128, 64, 4, 8)
SMALL = Config(16, 64, 32, 1, 4)  # of the interpreter, whose tiles cost the same whatever their size


@triton.jit
def _quarters(z):
    """z [M, N] -> its columns in four pieces of N / 4."""
    left, right = _halves(z)
    a, b = _halves(left)
    c, d = _halves(right)
    return a, b, c, d


@triton.jit
def _halves(z):
    """z [M, N] -> its first and its last N / 2 columns."""
    half: tl.constexpr = z.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(z, (z.shape[0], 2, half)), (0, 2, 1)))


# fmt: off
@triton.jit
def _logits(
    h, w, block, n, width, dtype: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):
# fmt: on
    """Tile (block, n) [BM, BN] of h wᵀ; 0 beyond the last row or column."""
    z = tl.zeros([BM, BN], dtype)
    for k in tl.range(0, width, BK, num_stages=STAGES):
        x = h.load([block * BM, k])
        v = w.load([n * BN, k])
        if UPCAST:
            x = x.to(dtype)
            v = v.to(dtype)
        z = tl.dot(x, v.T, z, input_precision="ieee", out_dtype=dtype)
    return z


# fmt: off
@triton.jit
def _absorb(
    state, z, first, bias, scale, cap, target, vocabulary,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):
# fmt: on
    """The running softmax of some rows, and of the columns first, first + 1, ... of their products z."""
    high, s, u, seen = state
    size: tl.constexpr = z.shape[1]
    at = first + tl.arange(0, size)
    if BIAS:
        z += tl.load(bias + at, mask=at < vocabulary, other=0.0).to(z.dtype)[None, :]
    z = z * scale[:, None]
    if SOFTCAP:
        z = tanh(z) * cap[:, None]
    mine = at[None, :] == target[:, None]
    met = tl.sum(tl.where(mine, z, 0.0), 1)
    seen = tl.where((target >= first) & (target < first + size) & (target < vocabulary), met, seen)
    z = tl.where(mine | (at >= vocabulary)[None, :], float("-inf"), z)
    risen = tl.maximum(high, tl.max(z, 1))
    drop = high - risen
    z = z - risen[:, None]
    e = tl.exp(z)
    if ENTROPY:
        u = (u + drop * s) * tl.exp(drop) + tl.sum(tl.maximum(z, -1e4) * e, 1)
    s = s * tl.exp(drop) + tl.sum(e, 1)
    return risen, s, u, seen


# fmt: off
@triton.jit
def forward_kernel(
    h, w, bias, inner, outer, y, top, total, weighted, hit, tokens, vocabulary, width,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, UPCAST: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):
# fmt: on
    """h [R, D], w [V, D] -> top, total, weighted, hit, each [SPLITS, R]; see `streamed.Running`."""
    split = tl.program_id(0) % SPLITS
    dtype = inner.dtype.element_ty
    for block in range(tl.program_id(0) // SPLITS, tl.cdiv(tokens, BM), tl.num_programs(0) // SPLITS):
        rows = block * BM + tl.arange(0, BM)
        live = rows < tokens
        scale = tl.load(inner + rows, mask=live, other=1.0)
        cap = scale
        if SOFTCAP:
            cap = tl.load(outer + rows, mask=live, other=1.0)
        target = tl.load(y + rows, mask=live, other=-1)
        high = tl.full([BM], -1.7e38, dtype)
        s = tl.zeros([BM], dtype)
        u = tl.zeros([BM], dtype)
        seen = tl.full([BM], float("nan"), dtype)
        for n in range(split, tl.cdiv(vocabulary, BN), SPLITS):
            z = _logits(h, w, block, n, width, dtype, UPCAST, BM, BN, BK, STAGES)
            state = (high, s, u, seen)
            pieces = _quarters(z)
            for i in tl.static_range(4):
                state = _absorb(
                    state, pieces[i], n * BN + i * (BN // 4), bias, scale, cap, target, vocabulary,
                    BIAS, SOFTCAP, ENTROPY,
                )
            high, s, u, seen = state
        out = split.to(tl.int64) * tokens + rows
        tl.store(top + out, high, mask=live)
        tl.store(total + out, s, mask=live)
        tl.store(hit + out, seen, mask=live)
        if ENTROPY:
            tl.store(weighted + out, u, mask=live)


# fmt: off
@triton.jit
def _differentiate(
    z, first, bias, scale, cap, target, lse, level, slope, peak, unit, columns,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, UNIT: tl.constexpr,
):
# fmt: on
    """The gradient in the columns first, first + 1, ... of some rows, whose products are z."""
    at = first + tl.arange(0, z.shape[1])
    if BIAS:
        z += tl.load(bias + at, mask=at < columns, other=0.0).to(z.dtype)[None, :]
    z = z * scale[:, None]
    rate = scale[:, None]
    if SOFTCAP:
        z = tanh(z)
        rate = (1 - z * z) * (cap * scale)[:, None]
        z = z * cap[:, None]
    z = z - lse[:, None]
    factor = level[:, None]
    if ENTROPY:
        factor = factor - slope[:, None] * tl.maximum(z, -1e4)
    dz = tl.where(at[None, :] == target[:, None], peak[:, None], tl.exp(z) * factor) * rate
    if UNIT:
        dz = dz / unit[:, None]
    return dz


# fmt: off
@triton.jit
def backward_kernel(
    h, w, bias, inner, outer, y, lse, level, g_entropy, peak, unit, dx, first, tokens, columns, width,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, UNIT: tl.constexpr,
    UPCAST: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):
# fmt: on
    """h [R, D] and w [C, D], which starts at row `first` of the head -> dx [R, C] over unit [R].

    As `row_kernels.differentiate_kernel`: 1[y] - p is formed before it is rounded.
    """
    group = tl.program_id(0) // (GROUP * tl.cdiv(columns, BN))
    place = tl.program_id(0) % (GROUP * tl.cdiv(columns, BN))
    height = tl.minimum(GROUP, tl.cdiv(tokens, BM) - group * GROUP)
    block, n = group * GROUP + place % height, place // height
    dtype = inner.dtype.element_ty
    z = _logits(h, w, block, n, width, dtype, UPCAST, BM, BN, BK, STAGES)
    rows = block * BM + tl.arange(0, BM)
    live = rows < tokens
    scale = tl.load(inner + rows, mask=live, other=1.0)
    bottom = tl.load(lse + rows, mask=live, other=0.0)
    common = tl.load(level + rows, mask=live, other=0.0)
    top = tl.load(peak + rows, mask=live, other=0.0)
    cap, slope, over = scale, scale, scale
    if SOFTCAP:
        cap = tl.load(outer + rows, mask=live, other=1.0)
    if ENTROPY:
        slope = tl.load(g_entropy + rows, mask=live, other=0.0)
    if UNIT:
        over = tl.load(unit + rows, mask=live, other=1.0)
    target = tl.load(y + rows, mask=live, other=-1) - first
    pieces = _quarters(z)
    for i in tl.static_range(4):
        at = n * BN + i * (BN // 4)
        dz = _differentiate(
            pieces[i], at, bias, scale, cap, target, bottom, common, slope, top, over, columns,
            BIAS, SOFTCAP, ENTROPY, UNIT,
        )
        dx.store([block * BM, at], dz.to(dx.dtype))


def forward(head: Head, y: Tensor, *, entropy: bool, unit: bool) -> tuple[Tensor | None, ...]:
    """y [R] -> logp, entropy or None, lse, each [R], and dlogp/dh [R, D] or None. NaN for a bad label."""
    if unit or not _fits(head):
        return gemm.forward(head, y, entropy=entropy, unit=unit)
    y = gemm.local_labels(head, y)
    run = _merge(_partial(head, y, entropy=entropy), entropy=entropy)
    if head.shard is not None:
        run = streamed.merge(run, y, head.shard)
    logp, lse = streamed.log_prob(run)
    return logp, streamed.entropy_of(run, logp) if entropy else None, lse, None


def backward(
    head: Head, y: Tensor, cot: streamed.Cotangent, need: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of h [R, D], bias [V] (in the type of the results) and w [V, D] (its own), as needed."""
    return gemm.collect(head, y, cot, need, _gradients) if _fits(head) else gemm.backward(head, y, cot, need)


def _gradients(
    head: Head, y: Tensor, cot: streamed.Cotangent, unit: Tensor | None
) -> Iterator[Gradient]:
    """The gradient of each slice of the logits; all of them in one buffer, one after another."""
    (tokens, width), vocabulary = head.h.shape, head.w.shape[0]
    c = SMALL if INTERPRETED else WIDE
    fit = head.workspace // (head.h.element_size() * tokens) // c.columns * c.columns
    breadth = min(max(fit, c.columns), triton.cdiv(vocabulary, c.columns) * c.columns)
    buffer = head.h.new_empty(tokens, breadth)  # its rows are aligned, whatever the last slice is
    flags = {"BIAS": head.bias is not None, "SOFTCAP": head.outer is not None, "UNIT": unit is not None}
    for cols in streamed.cut(vocabulary, breadth):
        w, dx = head.w[cols], buffer[:, : cols.stop - cols.start]
        with on(head.h):
            backward_kernel[(triton.cdiv(tokens, c.tokens) * triton.cdiv(len(w), c.columns),)](
                TensorDescriptor.from_tensor(head.h, [c.tokens, c.depth]),
                TensorDescriptor.from_tensor(w, [c.columns, c.depth]),
                None if head.bias is None else head.bias[cols],
                head.inner,
                head.outer,
                y,
                *cot,
                unit,
                TensorDescriptor.from_tensor(dx, [c.tokens, c.columns // 4]),
                cols.start,
                tokens,
                len(w),
                width,
                ENTROPY=cot.g_entropy is not None,
                GROUP=GROUP,
                **flags,
                **constants(c),
                num_warps=c.warps,
            )
        yield Gradient(cols, slice(0, tokens), w, dx)


def _fits(head: Head) -> bool:
    """Without 16-bit tensor cores, without a row, and where rows are not aligned, `gemm` does it."""
    if head.h.dtype != head.w.dtype or not (len(head.h) and len(head.w)):
        return False
    return (INTERPRETED or head.h.element_size() == 2) and _aligned(head.h) and _aligned(head.w)


def _aligned(x: Tensor) -> bool:
    """Whether the hardware copies blocks of x [R, D] by itself: rows start at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(1) == 1


def _partial(head: Head, y: Tensor, *, entropy: bool) -> streamed.Running:
    """The running softmax of each split of the vocabulary: fields [SPLITS, R]."""
    tokens, width = head.h.shape
    flags = {"BIAS": head.bias is not None, "SOFTCAP": head.outer is not None, "ENTROPY": entropy}
    c = SMALL if INTERPRETED else forward_config(**flags)
    top, total, weighted, hit = head.inner.new_empty(4, SPLITS, tokens)
    with on(head.h):
        forward_kernel[(_programs(head.h, triton.cdiv(tokens, c.tokens)),)](
            TensorDescriptor.from_tensor(head.h, [c.tokens, c.depth]),
            TensorDescriptor.from_tensor(head.w, [c.columns, c.depth]),
            head.bias,
            head.inner,
            head.outer,
            y,
            top,
            total,
            weighted,
            hit,
            tokens,
            len(head.w),
            width,
            SPLITS=SPLITS,
            **flags,
            **constants(c),
            num_warps=c.warps,
        )
    return streamed.Running(top, total, weighted, hit, top)


def forward_config(*, BIAS: bool, SOFTCAP: bool, ENTROPY: bool) -> Config:
    """The tile of the forward kernel with these compile-time arguments."""
    return NARROW if BIAS or SOFTCAP else WIDE


def constants(c: Config) -> dict:
    """The compile-time arguments that both kernels have of a tile."""
    sizes = {"BM": c.tokens, "BN": c.columns, "BK": c.depth, "STAGES": c.stages}
    return sizes | {"UPCAST": INTERPRETED}


def _programs(h: Tensor, blocks: int) -> int:
    """As many as run at once: one on each multiprocessor, SPLITS to a block of tokens."""
    cores = torch.cuda.get_device_properties(h.device).multi_processor_count if h.is_cuda else 2 * SPLITS
    return SPLITS * max(1, min(blocks, cores // SPLITS))


def _merge(parts: streamed.Running, *, entropy: bool) -> streamed.Running:
    """Fields [SPLITS, R] -> [R]: the sums relative to the largest logit of all."""
    top = parts.top.amax(0)
    drop = parts.top - top
    shrink = drop.exp()
    total = (parts.total * shrink).sum(0)
    weighted = ((parts.weighted + drop * parts.total) * shrink).sum(0) if entropy else total
    # At most one split has met the target; in the others it is NaN.
    met = ~parts.hit.isnan()
    hit = torch.where(met, parts.hit, 0).sum(0).masked_fill(~met.any(0), torch.nan)
    return streamed.Running(top, total, weighted, hit, top)
