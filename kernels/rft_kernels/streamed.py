"""Engine "streamed": torch operations on tiles of logits, on any device.

The vocabulary is the outer loop and the tokens are the inner one. So a slice of w is upcast once; a slice of
dw is one matrix product and needs no accumulator of size V D; only dh, of size T D, is added up over the
slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rft_kernels import narrow, products, softmax
from rft_kernels.interface import Gradients, Outputs, Problem
from rft_kernels.parallel import Shard, local_labels, sum_over
from rft_kernels.slices import cut, part
from rft_kernels.softmax import Cotangent, OnlineSoftmax

_CPU_ROWS = 4096  # of a matrix product: more would make the slices of w thin within the same workspace
_GPU_ROWS = 32768
_COLUMNS = 64  # slices of the vocabulary are multiples of this


class ScaledHead(NamedTuple):
    """A head with its temperature applied before the matrix product.

    x = h wᵀ + inner bias are scaled logits; z = x, or outer tanh(x) under a softcap.
    """

    h: Tensor  # [R, D] hidden states times inner, in the type of the computation
    w: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    inner: Tensor  # [R] 1 / temperature, or 1 / softcap
    outer: Tensor | None  # [R] softcap / temperature
    workspace: int  # bytes


class ScaledTile(NamedTuple):
    """Scaled logits of a block of B tokens over a slice of C columns."""

    cols: slice  # of the vocabulary
    rows: slice  # of the tokens
    w: Tensor  # [C, D] in the type of the computation
    x: Tensor  # [B, C] the consumer may write into it
    outer: Tensor | None  # [B] of ScaledHead
    wide_dw: Tensor | None  # [C, D] room for a gradient of w, if w is of a narrower type


def scaled_head(problem: Problem) -> ScaledHead:
    """Return the head with the temperature (or the softcap) in h.

    T D numbers are scaled instead of T V.
    """
    inner = problem.scale
    outer = None
    if problem.softcap is not None:
        inner = torch.full_like(problem.scale, 1 / problem.softcap)
        outer = problem.scale * problem.softcap
    h = problem.h.to(inner.dtype) * inner[:, None]
    return ScaledHead(h, problem.w, problem.bias, inner, outer, problem.workspace)


def forward(problem: Problem, y: Tensor, *, entropy: bool, unit_grad: bool) -> Outputs:
    """Do as `interface.Forward`."""
    head = scaled_head(problem)
    y = local_labels(y, problem.shard)
    state = softmax.start(head.h)

    # The sum of exp(z - row_max) w over all columns but the target's, kept up to date like state.row_sum.
    weight_sum = None
    if unit_grad:
        weight_sum = torch.zeros_like(head.h)
    # The column of each row's largest logit besides the target, where that logit is computed once more.
    largest = None
    if products.sums_are_long(head.h, head.w):
        largest = torch.full_like(y, -1)

    copies = 1
    if entropy:
        copies += 1  # `softmax.absorb` clamps a copy
    for tile in _tiles(head, copies=copies):
        seen = state.rows(tile.rows)
        softmax.absorb(seen, tile.x, y[tile.rows] - tile.cols.start, tile.outer, entropy=entropy)
        if largest is not None:
            _update_largest(largest[tile.rows], tile, seen.rescale)
        if weight_sum is not None:
            rescaled = weight_sum[tile.rows].mul_(seen.rescale[:, None])
            products.add_mm(rescaled, tile.x, tile.w)
        del tile  # its memory is that of the next one

    logp, found_entropy, lse = _outputs(head, state, y, largest, problem.shard, entropy=entropy)
    if weight_sum is not None:
        weight_sum = softmax.unit_gradient(weight_sum, head.w, y, state.row_max, logp, lse)
        weight_sum = sum_over(problem.shard, weight_sum.mul_(head.inner[:, None]))
    return Outputs(logp, found_entropy, lse, weight_sum)


def backward(problem: Problem, y: Tensor, cot: Cotangent, need: tuple[bool, bool, bool]) -> Gradients:
    """Do as `interface.Backward`."""
    head = scaled_head(problem)
    y = local_labels(y, problem.shard)
    need_h, need_w, need_bias = need
    dh = dw = dbias = None
    if need_h:
        dh = torch.zeros_like(head.h)
    if need_w:
        dw = head.w.new_empty(head.w.shape)
    if need_bias:
        dbias = head.h.new_zeros(head.w.shape[0])

    # The gradient of the logits is rounded once where its products are faster in bfloat16, as h and w are.
    is_narrow = narrow.fits(head.w) and problem.h.dtype == head.w.dtype and narrow.is_fast()
    h = head.h.to(head.w.dtype) if is_narrow else head.h

    # `softmax.differentiate` makes one more tensor of a tile's size for each of these.
    copies = 1
    if is_narrow:
        copies += 1
    if cot.g_entropy is not None:
        copies += 1
    if head.outer is not None:
        copies += 1
    for tile in _tiles(head, copies=copies):
        rows = tile.rows
        softmax.differentiate(tile.x, y[rows] - tile.cols.start, cot.rows(rows), tile.outer)
        dx, w = tile.x, tile.w
        if is_narrow:
            dx, w = dx.to(head.w.dtype), head.w[tile.cols]
        if dh is not None:
            narrow.add_mm(dh[rows], dx, w)
        if dw is not None:
            _weight_grad(dw[tile.cols], tile, dx, h[rows])
        if dbias is not None:
            dbias[tile.cols].addmv_(tile.x.T, head.inner[rows])
        del tile, dx  # its memory is that of the next one

    if dh is not None:
        dh = sum_over(problem.shard, dh.mul_(head.inner[:, None]))
    return Gradients(dh, dw, dbias)


def _outputs(
    head: ScaledHead,
    state: OnlineSoftmax,
    y: Tensor,
    largest: Tensor | None,
    shard: Shard | None,
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return logp, entropy or None, lse, each [R].

    The target's logit and that of column `largest` [R] are refined, if it is given.
    """
    refined = state
    if largest is not None:
        state = state._replace(target_logit=_select(head, y))
        refined = _refine(state, _select(head, largest))

    # lse stays that of the tiles: then p adds up to 1 in the backward, which sees the same tiles. Both are
    # stacked, so that the shards reduce them together.
    both = OnlineSoftmax(*(torch.stack(pair) for pair in zip(state, refined, strict=True)))
    logp, found_entropy, lse = softmax.outputs(both, y, shard, entropy=entropy)
    if found_entropy is not None:
        found_entropy = found_entropy[1]
    return logp[1], found_entropy, lse[0]


def _update_largest(largest: Tensor, tile: ScaledTile, rescale: Tensor) -> None:
    """Update the columns [B] of the largest logits from a tile of exp(z - row_max)."""
    risen = (rescale < 1).nonzero()[:, 0]
    x = tile.x
    if len(risen) < len(largest):
        x = x.index_select(0, risen)
    largest[risen] = x.argmax(1) + tile.cols.start


def _refine(state: OnlineSoftmax, largest_logit: Tensor) -> OnlineSoftmax:
    """Return state, with its largest logit replaced by largest_logit [R].

    It is the one that counts most. NaN leaves a row as it is.

    An error of a logit is one of lse times its probability. A long sum over D that is added up one by one
    has an error that a separate vector product has not.
    """
    more = torch.where(largest_logit.isnan(), 0, largest_logit - state.row_max)
    row_sum = state.row_sum + torch.expm1(more)
    row_moment = torch.addcmul(state.row_moment, more, more.exp())
    return state._replace(row_sum=row_sum, row_moment=row_moment)


def _select(head: ScaledHead, column: Tensor) -> Tensor:
    """Select the scaled logits [R] of one column in each row, by vector products.

    NaN if the column is no row of w.
    """
    z = torch.empty_like(head.inner)
    inside = (column >= 0) & (column < len(head.w))
    here = torch.where(inside, column, 0)

    # The rows of w that a block selects are a copy, once narrow and once converted.
    row_bytes = head.h.element_size() * max(1, head.h.shape[1])
    block = max(1, head.workspace // (2 * row_bytes))
    for rows in cut(len(z), block):
        z[rows] = torch.linalg.vecdot(head.h[rows], head.w[here[rows]].to(z.dtype))
    if head.bias is not None:
        z.addcmul_(head.inner, head.bias[here].to(z.dtype))
    if head.outer is not None:
        z.tanh_().mul_(head.outer)
    return z.masked_fill_(~inside, torch.nan)


def _weight_grad(dw: Tensor, tile: ScaledTile, dx: Tensor, h: Tensor) -> None:
    """Compute dw [C, D] (+)= dxᵀ h for dx [B, C], over the blocks of tokens.

    In wide_dw first if dw is of a narrower type.
    """
    total = dw
    if tile.wide_dw is not None:
        total = tile.wide_dw
    if tile.rows.start == 0:
        narrow.mm(dx.T, h, total)
    else:
        narrow.add_mm(total, dx.T, h)
    if total is not dw:
        dw.copy_(total)


def _tiles(head: ScaledHead, *, copies: int) -> Iterator[ScaledTile]:
    """Yield scaled logits, tile by tile.

    The consumer may hold copies - 1 more tensors of a tile's size. It lets go of a tile before it asks for
    the next: where they are not all in one buffer, that frees it.
    """
    tokens, width = head.h.shape
    vocabulary = head.w.shape[0]
    if not vocabulary:
        return  # a rank that has no row of the head

    # oneDNN allocates each result; torch.mm writes into one buffer.
    height, breadth = _tile_shape(head, copies)
    buffer = None
    if not products.by_onednn(head.h):
        buffer = head.h.new_empty(height * breadth)
    # Slices of a narrower w, and of its gradient, in the type of the computation.
    wide = None
    if head.w.dtype != head.h.dtype:
        wide = head.h.new_empty(2, breadth, width)

    for cols in cut(vocabulary, breadth):
        w = head.w[cols]
        wide_dw = None
        if wide is not None:
            w = wide[0, : len(w)].copy_(w)
            wide_dw = wide[1, : len(w)]
        for rows in cut(tokens, height):
            yield ScaledTile(
                cols, rows, w, _logits(head, rows, cols, w, buffer), part(head.outer, rows), wide_dw
            )


def _logits(head: ScaledHead, rows: slice, cols: slice, w: Tensor, buffer: Tensor | None) -> Tensor:
    """Return scaled logits of a block of tokens over w, the slice cols of the head."""
    h = head.h[rows]
    out = None
    if buffer is not None:
        out = buffer[: len(h) * len(w)].view(-1, len(w))
    x = products.mm(h, w.T, out)
    if head.bias is None:
        return x
    return x.addr_(head.inner[rows], head.bias[cols].to(w.dtype))


def _tile_shape(head: ScaledHead, copies: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tile that fits into the workspace.

    With its copies, and with converted slices of w.
    """
    tokens, width = head.h.shape
    vocabulary = head.w.shape[0]
    most_rows = _GPU_ROWS
    if head.h.device.type == "cpu":
        most_rows = _CPU_ROWS
    height = max(1, min(tokens, most_rows))

    # Numbers for each column: a tile's copies, and two converted slices of a narrower w.
    per_column = copies * height
    if head.w.dtype != head.h.dtype:
        per_column += 2 * width
    fit = head.workspace // (head.h.element_size() * per_column)

    # Slices of one size, rather than a thin one at the end.
    slices = -(-vocabulary // max(fit, _COLUMNS))
    breadth = -(-vocabulary // slices)
    return height, min(vocabulary, -(-breadth // _COLUMNS) * _COLUMNS)
