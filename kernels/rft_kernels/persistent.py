"""The forward as one persistent Triton kernel: no slice of the logits reaches memory.

A program owns a block of tokens and every S-th slice of the vocabulary, so all programs that run together
read the same few slices of w and blocks of h, which then stay in the L2 cache. Each leaves one running
softmax a row; the S of them are merged in a fixed order. The backward, and the unit gradient of a frozen
head, are those of `gemm`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft_kernels import gemm, tiles
from rft_kernels.gemm import Head, backward, head
from rft_kernels.rows import INTERPRETED, on, tanh

__all__ = ["Head", "backward", "forward", "head"]

SPLITS = 8  # of the vocabulary; a constant, so that a row does not depend on how many rows there are


class Config(NamedTuple):
    """A tile of [tokens, columns] logits, summed over pieces of `depth` of the width."""

    tokens: int
    columns: int
    depth: int
    stages: int
    warps: int


# For 16-bit inputs. A tile of 128 x 256 reads less, but spills registers if operands are loaded by pointer.
CONFIG = Config(128, 128, 64, 4, 8)
SMALL = Config(16, 64, 32, 1, 4)  # of the interpreter, whose tiles cost the same whatever their size


@triton.jit
def _halves(z):
    """z [M, N] -> its first and its last N / 2 columns."""
    half: tl.constexpr = z.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(z, (z.shape[0], 2, half)), (0, 2, 1)))


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
    h, h_stride, w, w_stride, bias, inner, outer, y, top, total, weighted, hit, tokens, vocabulary,
    width,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):
# fmt: on
    """h [R, D], w [V, D] -> top, total, weighted, hit, each [SPLITS, R]; see `tiles.Running`."""
    split = tl.program_id(0) % SPLITS
    dtype = inner.dtype.element_ty
    k = tl.arange(0, BK)
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
            # Rows and columns beyond the end repeat the last one; what comes of them is masked or not stored.
            # The wide part of an address is one number of the program: a matrix of them would fill registers.
            i = tl.minimum(tl.arange(0, BM), tokens - block * BM - 1)
            j = tl.minimum(tl.arange(0, BN), vocabulary - n * BN - 1)
            a = h + tl.cast(block * BM, tl.int64) * h_stride
            b = w + tl.cast(n * BN, tl.int64) * w_stride
            at_a = i[:, None] * h_stride + k[None, :]
            at_b = j[None, :] * w_stride + k[:, None]
            z = tl.zeros([BM, BN], dtype)
            for start in tl.range(0, width, BK, num_stages=STAGES):
                if EVEN:
                    x = tl.load(a + at_a)
                    v = tl.load(b + at_b)
                else:
                    x = tl.load(a + at_a, mask=(start + k < width)[None, :], other=0.0)
                    v = tl.load(b + at_b, mask=(start + k < width)[:, None], other=0.0)
                if UPCAST:
                    x = x.to(dtype)
                    v = v.to(dtype)
                z = tl.dot(x, v, z, input_precision="ieee", out_dtype=dtype)
                a += BK
                b += BK
            state = (high, s, u, seen)
            left, right = _halves(z)
            at = n * BN
            state = _absorb(state, left, at, bias, scale, cap, target, vocabulary, BIAS, SOFTCAP, ENTROPY)
            at += BN // 2
            state = _absorb(state, right, at, bias, scale, cap, target, vocabulary, BIAS, SOFTCAP, ENTROPY)
            high, s, u, seen = state
        out = split.to(tl.int64) * tokens + rows
        tl.store(top + out, high, mask=live)
        tl.store(total + out, s, mask=live)
        tl.store(hit + out, seen, mask=live)
        if ENTROPY:
            tl.store(weighted + out, u, mask=live)


def forward(head: Head, y: Tensor, *, entropy: bool, unit: bool) -> tuple[Tensor | None, ...]:
    """y [R] -> logp, entropy or None, lse, each [R], and dlogp/dh [R, D] or None. NaN for a bad label."""
    if unit or head.h.shape[0] == 0 or not _fits(head):
        return gemm.forward(head, y, entropy=entropy, unit=unit)
    y = gemm.local_labels(head, y)
    run = _merge(_partial(head, y, entropy=entropy), entropy=entropy)
    if head.shard is not None:
        run = tiles.merge(run, y, head.shard)
    logp, lse = tiles.log_prob(run)
    return logp, tiles.entropy_of(run, logp) if entropy else None, lse, None


def _fits(head: Head) -> bool:
    """Without 16-bit tensor cores, or with rows that are not aligned, the product belongs to cuBLAS."""
    if head.h.dtype != head.w.dtype:
        return False
    return INTERPRETED or (head.h.element_size() == 2 and _aligned(head.h) and _aligned(head.w))


def _aligned(x: Tensor) -> bool:
    """Whether triton knows of x [R, D] that its rows start at multiples of 16 bytes: its unit is 16 elements.

    Otherwise loads are of one element, cannot be asynchronous, and fill the registers: 150 bytes are spilled.
    """
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.stride(1) == 1 and x.shape[1] % 16 == 0


def _partial(head: Head, y: Tensor, *, entropy: bool) -> tiles.Running:
    """The running softmax of each split of the vocabulary: fields [SPLITS, R]."""
    tokens, width = head.h.shape
    c = SMALL if INTERPRETED else CONFIG
    w = head.w if head.w.stride(1) == 1 else head.w.contiguous()
    top, total, weighted, hit = head.inner.new_empty(4, SPLITS, tokens)
    with on(head.h):
        forward_kernel[(_programs(head.h, triton.cdiv(tokens, c.tokens)),)](
            head.h,
            head.h.stride(0),
            w,
            w.stride(0),
            head.bias,
            head.inner,
            head.outer,
            y,
            top,
            total,
            weighted,
            hit,
            tokens,
            w.shape[0],
            width,
            **constants(c, width, bias=head.bias, softcap=head.outer, entropy=entropy),
            num_warps=c.warps,
        )
    return tiles.Running(top, total, weighted, hit, top)


def constants(c: Config, width: int, *, bias: object, softcap: object, entropy: bool) -> dict:
    """The compile-time arguments of the kernel."""
    return {
        "BIAS": bias is not None,
        "SOFTCAP": softcap is not None,
        "ENTROPY": entropy,
        "EVEN": width % c.depth == 0,
        "UPCAST": INTERPRETED,
        "SPLITS": SPLITS,
        "BM": c.tokens,
        "BN": c.columns,
        "BK": c.depth,
        "STAGES": c.stages,
    }


def _programs(h: Tensor, blocks: int) -> int:
    """As many as run at once: one on each multiprocessor, SPLITS to a block of tokens."""
    cores = torch.cuda.get_device_properties(h.device).multi_processor_count if h.is_cuda else 2 * SPLITS
    return SPLITS * max(1, min(blocks, cores // SPLITS))


def _merge(parts: tiles.Running, *, entropy: bool) -> tiles.Running:
    """Fields [SPLITS, R] -> [R]: the sums relative to the largest logit of all."""
    top = parts.top.amax(0)
    drop = parts.top - top
    shrink = drop.exp()
    total = (parts.total * shrink).sum(0)
    weighted = ((parts.weighted + drop * parts.total) * shrink).sum(0) if entropy else total
    # At most one split has met the target; in the others it is NaN.
    met = ~parts.hit.isnan()
    hit = torch.where(met, parts.hit, 0).sum(0).masked_fill(~met.any(0), torch.nan)
    return tiles.Running(top, total, weighted, hit, top)
