"""Triton kernels of the engine "triton", which compute logits and use them in registers.

Blocks of h, w and the gradient are moved by tensor descriptors: on Hopper the hardware then copies them by
itself, and no thread holds an address. Type checkers misread the language of kernels.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rft_kernels.row_kernels import INTERPRETED, bound, tanh

GROUP = 16  # blocks of tokens whose tiles run one after another, over all columns: what they read stays in L2
# Of the vocabulary, for a forward of many tokens to few: the first keep blocks of h in L2, the others fill a
# GPU of 132 multiprocessors. Constants of the kernel, which would spill registers with an argument.
SPLITS = (8, 11, 16, 22, 33, 44, 66, 132)


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


def forward_config(*, BIAS: bool, SOFTCAP: bool, ENTROPY: bool) -> Config:
    """Return the tile of the forward kernel with these compile-time arguments."""
    if BIAS or SOFTCAP:
        return NARROW
    return WIDE


def constants(config: Config) -> dict[str, int | bool]:
    """Return the compile-time arguments by which both kernels know their tile."""
    sizes = {"BM": config.tokens, "BN": config.columns, "BK": config.depth, "STAGES": config.stages}
    return sizes | {"UPCAST": INTERPRETED}


@triton.jit
def _quarters(z):
    """Split z [M, N] into four pieces of N / 4 columns."""
    left, right = _halves(z)
    a, b = _halves(left)
    c, d = _halves(right)
    return a, b, c, d


@triton.jit
def _halves(z):
    """Split z [M, N] into its first and its last N / 2 columns."""
    half: tl.constexpr = z.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(z, (z.shape[0], 2, half)), (0, 2, 1)))


# The signatures of kernels are a few lines each.
# fmt: off
@triton.jit
def _products(
    h_desc, w_desc, block, n, width, dtype: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute tile (block, n) [BM, BN] of h wᵀ; 0 beyond the last row or column."""
    z = tl.zeros([BM, BN], dtype)
    for k in tl.range(0, bound(width), BK, num_stages=STAGES):
        h = h_desc.load([block * BM, k])
        w = w_desc.load([n * BN, k])
        if UPCAST:
            h = h.to(dtype)
            w = w.to(dtype)
        z = tl.dot(h, w.T, z, input_precision="ieee", out_dtype=dtype)
    return z


@triton.jit
def _absorb(
    state, z, first, bias_ptr, inner, outer, target, vocabulary,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):
    """Add a piece of products z to the running softmax of some rows.

    The piece has the columns first, first + 1, ...
    """
    row_max, row_sum, row_moment, target_logit = state
    size: tl.constexpr = z.shape[1]
    at = first + tl.arange(0, size)
    if BIAS:
        z += tl.load(bias_ptr + at, mask=at < vocabulary, other=0.0).to(z.dtype)[None, :]
    z = z * inner[:, None]
    if SOFTCAP:
        z = tanh(z) * outer[:, None]

    # The target's logit, if its column is among these; then it is left out.
    is_target = at[None, :] == target[:, None]
    found = tl.sum(tl.where(is_target, z, 0.0), 1)
    inside = (target >= first) & (target < first + size) & (target < vocabulary)
    target_logit = tl.where(inside, found, target_logit)
    z = tl.where(is_target | (at >= vocabulary)[None, :], float("-inf"), z)

    new_max = tl.maximum(row_max, tl.max(z, 1))
    drop = row_max - new_max
    z = z - new_max[:, None]
    e = tl.exp(z)
    if ENTROPY:
        row_moment = (row_moment + drop * row_sum) * tl.exp(drop)
        row_moment += tl.sum(tl.maximum(z, -1e4) * e, 1)
    row_sum = row_sum * tl.exp(drop) + tl.sum(e, 1)
    return new_max, row_sum, row_moment, target_logit


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    h_desc, w_desc, bias_ptr, inner_ptr, outer_ptr, y_ptr, row_max_ptr, row_sum_ptr, row_moment_ptr,
    target_logit_ptr, tokens, vocabulary, width,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, UPCAST: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute the running softmax of each split of the vocabulary, from h [R, D] and w [V, D].

    row_max, row_sum, row_moment, target_logit, all [SPLITS, R]; programs are [SPLITS, blocks of tokens].
    """
    split = tl.program_id(0)
    block = tl.program_id(1)
    dtype = inner_ptr.dtype.element_ty
    rows = block * BM + tl.arange(0, BM)
    live = rows < tokens
    inner = tl.load(inner_ptr + rows, mask=live, other=1.0)
    outer = inner
    if SOFTCAP:
        outer = tl.load(outer_ptr + rows, mask=live, other=1.0)
    target = tl.load(y_ptr + rows, mask=live, other=-1)

    # As `softmax.start`, then every SPLITS-th slice of the vocabulary.
    row_max = tl.full([BM], -1.7e38, dtype)
    row_sum = tl.zeros([BM], dtype)
    row_moment = tl.zeros([BM], dtype)
    target_logit = tl.full([BM], float("nan"), dtype)
    for n in range(bound(split), bound(tl.cdiv(vocabulary, BN)), SPLITS):
        z = _products(h_desc, w_desc, block, n, width, dtype, UPCAST, BM, BN, BK, STAGES)
        state = (row_max, row_sum, row_moment, target_logit)
        # A quarter of the columns at a time: all at once would not fit into the registers.
        pieces = _quarters(z)
        for i in tl.static_range(4):
            state = _absorb(
                state, pieces[i], n * BN + i * (BN // 4), bias_ptr, inner, outer, target, vocabulary,
                BIAS, SOFTCAP, ENTROPY,
            )
        row_max, row_sum, row_moment, target_logit = state

    out = split.to(tl.int64) * tokens + rows
    tl.store(row_max_ptr + out, row_max, mask=live)
    tl.store(row_sum_ptr + out, row_sum, mask=live)
    tl.store(target_logit_ptr + out, target_logit, mask=live)
    if ENTROPY:
        tl.store(row_moment_ptr + out, row_moment, mask=live)


@triton.jit
def _differentiate(
    z, first, bias_ptr, inner, outer, target, lse, p_factor, g_entropy, target_grad, grad_scale, columns,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SCALED: tl.constexpr,
):
    """Compute the gradient of a piece of logits with products z.

    The piece has the columns first, first + 1, ...
    """
    at = first + tl.arange(0, z.shape[1])
    if BIAS:
        z += tl.load(bias_ptr + at, mask=at < columns, other=0.0).to(z.dtype)[None, :]
    z = z * inner[:, None]
    slope = inner[:, None]
    if SOFTCAP:
        z = tanh(z)
        slope = (1 - z * z) * (outer * inner)[:, None]
        z = z * outer[:, None]

    # p times its factor; the target's column has its own number.
    z = z - lse[:, None]
    factor = p_factor[:, None]
    if ENTROPY:
        factor = factor - g_entropy[:, None] * tl.maximum(z, -1e4)
    dz = tl.where(at[None, :] == target[:, None], target_grad[:, None], tl.exp(z) * factor) * slope
    if SCALED:
        dz = dz / grad_scale[:, None]
    return dz


@triton.jit
def backward_kernel(
    h_desc, w_desc, bias_ptr, inner_ptr, outer_ptr, y_ptr, lse_ptr, p_factor_ptr, g_entropy_ptr,
    target_grad_ptr, grad_scale_ptr, dx_desc, first, tokens, columns, width,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SCALED: tl.constexpr,
    UPCAST: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute the gradient dx [R, C] of the logits of h [R, D] and a slice w [C, D].

    The slice starts at row `first` of the head; dx is divided by grad_scale [R].

    As `row_kernels.differentiate_kernel`: 1[y] - p is formed before it is rounded.
    """
    # GROUP blocks of tokens go over all columns before the next ones start.
    group = tl.program_id(0) // (GROUP * tl.cdiv(columns, BN))
    place = tl.program_id(0) % (GROUP * tl.cdiv(columns, BN))
    height = tl.minimum(GROUP, tl.cdiv(tokens, BM) - group * GROUP)
    block = group * GROUP + place % height
    n = place // height
    dtype = inner_ptr.dtype.element_ty
    z = _products(h_desc, w_desc, block, n, width, dtype, UPCAST, BM, BN, BK, STAGES)

    # The numbers of each row; those that a variant has no use for stand for another.
    rows = block * BM + tl.arange(0, BM)
    live = rows < tokens
    inner = tl.load(inner_ptr + rows, mask=live, other=1.0)
    lse = tl.load(lse_ptr + rows, mask=live, other=0.0)
    p_factor = tl.load(p_factor_ptr + rows, mask=live, other=0.0)
    target_grad = tl.load(target_grad_ptr + rows, mask=live, other=0.0)
    outer = inner
    g_entropy = inner
    grad_scale = inner
    if SOFTCAP:
        outer = tl.load(outer_ptr + rows, mask=live, other=1.0)
    if ENTROPY:
        g_entropy = tl.load(g_entropy_ptr + rows, mask=live, other=0.0)
    if SCALED:
        grad_scale = tl.load(grad_scale_ptr + rows, mask=live, other=1.0)
    target = tl.load(y_ptr + rows, mask=live, other=-1) - first

    pieces = _quarters(z)
    for i in tl.static_range(4):
        at = n * BN + i * (BN // 4)
        dz = _differentiate(
            pieces[i], at, bias_ptr, inner, outer, target, lse, p_factor, g_entropy, target_grad, grad_scale,
            columns, BIAS, SOFTCAP, ENTROPY, SCALED,
        )
        dx_desc.store([block * BM, at], dz.to(dx_desc.dtype))
# fmt: on
