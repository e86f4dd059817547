"""The GPU engine: cuBLAS makes slices of the logits in float32, Triton reads each of them once.

The interface of `streamed`, so that one differentiable operation serves both. What differs: h stays in its own
type, for 16-bit tensor cores, and 1 / temperature meets the logits inside the row kernels; the gradient of
the logits is rounded once, to the type of the matrix products, after 1[y] - p was formed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from rft_kernels import row_kernels as kernels
from rft_kernels import streamed
from rft_kernels.autograd import accumulate_dtype
from rft_kernels.parallel import Shard

_ROWS = 32768  # of a matrix product
_COLUMNS = 1024  # slices of the vocabulary are multiples of this where they are larger
_SMALLEST = 64
_FP16_RANGE = 2.0**15  # a row of gradients is scaled to this: 1 / V would be subnormal in float16


class Head(NamedTuple):
    """x = inner (h wᵀ + bias) are scaled logits; z = x, or outer tanh(x) under a softcap."""

    h: Tensor  # [R, D] in the type of the matrix products
    w: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    inner: Tensor  # [R] 1 / temperature, or 1 / softcap; its type is that of the results
    outer: Tensor | None  # [R] softcap / temperature
    workspace: int  # bytes
    shard: Shard | None = None  # of a vocabulary that is spread over ranks: w is its local rows


class Tile(NamedTuple):
    """Logits of a block of B tokens over a slice of C columns, before the temperature and the bias."""

    cols: slice  # of the vocabulary
    rows: slice  # of the tokens
    w: Tensor  # [C, D] in the type of the matrix products
    x: Tensor  # [B, C] in the type of the results
    narrow: Tensor  # [B, C] in the type of the matrix products; x itself if that is the same
    bias: Tensor | None  # [C]


class Gradient(NamedTuple):
    """The gradient in such a block, over the units of its rows if there are any."""

    cols: slice
    rows: slice
    w: Tensor  # [C, D]
    dx: Tensor  # [B, C] in the type of the matrix products


def head(
    h: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor, *, softcap: float | None, workspace: int
) -> Head:
    """scale [R] = 1 / temperature, in float32 (float64 if h or w is)."""
    inner = scale.contiguous() if softcap is None else torch.full_like(scale, 1 / softcap).contiguous()
    outer = None if softcap is None else (scale * softcap).contiguous()
    bias = None if bias is None else bias.contiguous()
    return Head(h.to(_product_type(h, w, scale)).contiguous(), w, bias, inner, outer, workspace)


def forward(head: Head, y: Tensor, *, entropy: bool, unit: bool) -> tuple[Tensor | None, ...]:
    """y [R] -> logp, entropy or None, lse, each [R], and dlogp/dh [R, D] or None. NaN for a bad label."""
    y, run = local_labels(head, y), streamed.start(head.inner)
    # The sum of exp(z - top) w over all columns but the target's, kept up to date like run.total.
    pull = head.inner.new_zeros(head.h.shape) if unit else None
    for tile in _tiles(head, narrow=unit):
        state = streamed.Running(*(r[tile.rows] for r in run))
        kept = tile.narrow if unit else None
        options = _options(head, tile)
        kernels.absorb(state, tile.x, y[tile.rows], entropy=entropy, kept=kept, **options)
        if pull is not None:
            kernels.rescale(pull[tile.rows], state.shrink)
            product(tile.narrow, tile.w, out=pull[tile.rows], add=True)
    top = run.top
    if head.shard is not None:
        run = streamed.merge(run, y, head.shard)
    logp, lse = streamed.log_prob(run)
    if pull is not None:
        pull = streamed.unit_gradient(pull, head.w, y, top, logp, lse).mul_(head.inner[:, None])
    if pull is not None and head.shard is not None:
        pull = head.shard.sum(pull)
    return logp, streamed.entropy_of(run, logp) if entropy else None, lse, pull


def backward(
    head: Head, y: Tensor, cot: streamed.Cotangent, need: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of h [R, D], bias [V] (in the type of the results) and w [V, D] (its own), as needed."""
    return collect(head, y, cot, need, _gradients)


def collect(
    head: Head, y: Tensor, cot: streamed.Cotangent, need: tuple[bool, ...], gradients: Callable
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`backward`, of the `Gradient`s that gradients(head, y, cot, unit) yields, slice by slice."""
    y = local_labels(head, y)
    cot = cot.each(Tensor.contiguous)
    unit = _row_unit(head, cot) if head.h.dtype == torch.float16 else None
    dh = head.inner.new_zeros(head.h.shape) if need[0] else None
    dw = head.w.new_empty(head.w.shape) if need[1] else None
    db = head.inner.new_zeros(head.w.shape[0]) if need[2] else None
    common, share, h = _common_unit(head, unit)
    for tile in gradients(head, y, cot, unit):
        if dh is not None:
            product(tile.dx, tile.w, out=dh[tile.rows], add=True)
        if dw is not None:
            _weight_grad(dw[tile.cols], tile, h, common)
        if db is not None:
            _bias_grad(db[tile.cols], tile, share, common)
    if dh is not None and unit is not None:
        dh.mul_(unit[:, None])
    if dh is not None and head.shard is not None:
        dh = head.shard.sum(dh)
    return dh, dw, db


def local_labels(head: Head, y: Tensor) -> Tensor:
    """Labels y [R] as rows of head.w."""
    if head.shard is not None:
        y = head.shard.local(y)
    return y.contiguous()


def product(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """out (+)= a b, where out may be of a wider type: sums are then stored in that type."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _gradients(head: Head, y: Tensor, cot: streamed.Cotangent, unit: Tensor | None) -> Iterator[Gradient]:
    """Each slice of the logits again, and turned into its gradient."""
    for tile in _tiles(head, narrow=True):
        rows = tile.rows
        here = None if unit is None else unit[rows]
        options = _options(head, tile)
        kernels.differentiate(tile.x, tile.narrow, y[rows], cot.each(itemgetter(rows)), unit=here, **options)
        yield Gradient(tile.cols, tile.rows, tile.w, tile.narrow)


def _product_type(h: Tensor, w: Tensor, scale: Tensor) -> torch.dtype:
    """Only a GPU multiplies 16-bit matrices into float32."""
    return h.dtype if h.is_cuda and h.dtype == w.dtype else scale.dtype


def _options(head: Head, tile: Tile) -> dict:
    outer = None if head.outer is None else head.outer[tile.rows]
    return {"first": tile.cols.start, "inner": head.inner[tile.rows], "outer": outer, "bias": tile.bias}


def _row_unit(head: Head, cot: streamed.Cotangent) -> Tensor:
    """A power of two [R]: no gradient of a logit over it exceeds the range of float16, nor is it tiny."""
    bound = torch.maximum(cot.level.abs(), cot.peak.abs())
    if cot.g_entropy is not None:
        bound = torch.maximum(bound, cot.level.abs() + cot.g_entropy.abs())  # |p log p| < 1
    bound = bound * (head.inner if head.outer is None else head.inner * head.outer)
    exponent = torch.frexp(bound).exponent.to(bound.dtype)
    return torch.exp2(torch.where(bound > 0, exponent, 0)) / _FP16_RANGE


def _common_unit(head: Head, unit: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """The largest unit [], the units of the rows over it [R] and h times that [R, D].

    A sum over rows needs one unit for all. What that rounds to 0 in h is 2^-24 of the sum.
    """
    if unit is None:
        return None, torch.ones_like(head.inner, dtype=head.h.dtype), head.h
    common = unit.amax() if unit.numel() else unit.new_ones(())
    share = unit / common
    return common, share.to(head.h.dtype), (head.h * share[:, None]).to(head.h.dtype)


def _weight_grad(dw: Tensor, tile: Gradient, h: Tensor, common: Tensor | None) -> None:
    """dw [C, D] (+)= dxᵀ h: one product into its slice; in float32 first if there are units or blocks."""
    first, last = tile.rows.start == 0, tile.rows.stop == h.shape[0]
    if first and last and common is None and dw.dtype == h.dtype:
        return product(tile.dx.T, h, out=dw)
    total = dw.new_empty(dw.shape, dtype=accumulate_dtype(h, dw))
    product(tile.dx.T, h[tile.rows], out=total)
    if common is not None:
        total.mul_(common)
    if not first:
        total.add_(dw)
    dw.copy_(total)
    return None


def _bias_grad(db: Tensor, tile: Gradient, share: Tensor, common: Tensor | None) -> None:
    """db [C] += the sum of dx over the rows."""
    total = db.new_empty(1, db.shape[0])
    product(share[tile.rows][None], tile.dx, out=total)
    if common is not None:
        total.mul_(common)
    db.add_(total[0])


def _tiles(head: Head, *, narrow: bool) -> Iterator[Tile]:
    """Slices of the logits, one after another in one buffer; narrow: with room for a rounded copy."""
    (tokens, width), vocabulary = head.h.shape, head.w.shape[0]
    if not vocabulary:
        return  # a rank that has no row of the head
    wide, thin = head.inner.dtype, head.h.dtype
    height, breadth = max(1, min(tokens, _ROWS)), _breadth(head, narrow)
    buffer = torch.empty(height * breadth, dtype=wide, device=head.h.device)
    copy = torch.empty_like(buffer, dtype=thin) if narrow and thin != wide else buffer
    converted = head.h.new_empty(breadth, width) if head.w.dtype != thin else None
    for cols in streamed.cut(vocabulary, breadth):
        size = cols.stop - cols.start
        w = head.w[cols] if converted is None else converted[:size].copy_(head.w[cols])
        bias = None if head.bias is None else head.bias[cols]
        for rows in streamed.cut(tokens, height):
            x, rounded = (b[: (rows.stop - rows.start) * size].view(-1, size) for b in (buffer, copy))
            product(head.h[rows], w.T, out=x)
            yield Tile(cols, rows, w, x, rounded, bias)


def _breadth(head: Head, narrow: bool) -> int:
    """Columns of a tile, such that it, its rounded copy and a converted slice of w fit into the workspace."""
    (tokens, width), vocabulary = head.h.shape, head.w.shape[0]
    wide, thin = head.inner.element_size(), head.h.element_size()
    logit = wide
    if narrow and thin != wide:
        logit += thin
    converted = 0 if head.w.dtype == head.h.dtype else thin * width
    fit = head.workspace // (logit * max(1, min(tokens, _ROWS)) + converted)
    step = _COLUMNS if fit >= _COLUMNS else _SMALLEST
    return min(vocabulary, max(_SMALLEST, fit // step * step))
