"""Engine "gemm", for CUDA: cuBLAS makes slices of the logits, Triton reads every slice once.

The slices are float32. Unlike in "streamed", h stays in its own type, for 16-bit tensor cores, and
1 / temperature meets the logits inside the row kernels; the gradient of the logits is rounded once, to the
type of the matrix products, after 1[y] - p was formed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rft_kernels import row_kernels, softmax
from rft_kernels.interface import Gradients, Outputs, Problem
from rft_kernels.numerics import accumulate_dtype
from rft_kernels.parallel import Shard, local_labels, sum_over
from rft_kernels.slices import cut, part
from rft_kernels.softmax import Cotangent

_ROWS = 32768  # of a matrix product
_COLUMNS = 1024  # slices of the vocabulary are multiples of this where they are larger
_SMALLEST = 64
_FP16_RANGE = 2.0**15  # a row of gradients is scaled to this: 1 / V would be subnormal in float16


class UnscaledHead(NamedTuple):
    """A head with its temperature applied after the matrix product.

    x = inner (h wᵀ + bias) are scaled logits; z = x, or outer tanh(x) under a softcap.
    """

    h: Tensor  # [R, D] in the type of the matrix products
    w: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    inner: Tensor  # [R] 1 / temperature, or 1 / softcap; its type is that of the results
    outer: Tensor | None  # [R] softcap / temperature
    workspace: int  # bytes
    shard: Shard | None  # of a vocabulary that is spread over ranks: w is its local rows


class UnscaledTile(NamedTuple):
    """Logits of B tokens over C columns, before the temperature and the bias."""

    cols: slice  # of the vocabulary
    rows: slice  # of the tokens
    w: Tensor  # [C, D] in the type of the matrix products
    x: Tensor  # [B, C] in the type of the results
    narrow: Tensor  # [B, C] in the type of the matrix products; x itself if that is the same
    bias: Tensor | None  # [C]


class GradientTile(NamedTuple):
    """The gradient of the logits of B tokens over C columns.

    Divided by the scale of its rows, if they have one.
    """

    cols: slice
    rows: slice
    w: Tensor  # [C, D]
    dx: Tensor  # [B, C] in the type of the matrix products


class GradientTiles(Protocol):
    """Makes the gradient of the logits, slice by slice."""

    def __call__(
        self, head: UnscaledHead, y: Tensor, cot: Cotangent, grad_scale: Tensor | None
    ) -> Iterator[GradientTile]:
        """Every block of tokens of every slice of the vocabulary, for local labels y [R].

        Rows are divided by grad_scale [R], if there is one.
        """
        ...


def unscaled_head(problem: Problem) -> UnscaledHead:
    """Return the problem with everything contiguous, and h in the type of the matrix products."""
    inner = problem.scale
    outer = None
    if problem.softcap is not None:
        inner = torch.full_like(problem.scale, 1 / problem.softcap)
        outer = (problem.scale * problem.softcap).contiguous()
    bias = problem.bias
    if bias is not None:
        bias = bias.contiguous()
    h = problem.h.to(_product_type(problem.h, problem.w, problem.scale)).contiguous()
    return UnscaledHead(h, problem.w, bias, inner.contiguous(), outer, problem.workspace, problem.shard)


def forward(problem: Problem, y: Tensor, *, entropy: bool, unit_grad: bool) -> Outputs:
    """Do as `interface.Forward`."""
    head = unscaled_head(problem)
    y = local_labels(y, head.shard).contiguous()
    state = softmax.start(head.inner)

    # The sum of exp(z - row_max) w over all columns but the target's, kept up to date like state.row_sum.
    weight_sum = None
    if unit_grad:
        weight_sum = head.inner.new_zeros(head.h.shape)
    for tile in _tiles(head, narrow=unit_grad):
        seen = state.rows(tile.rows)
        kept = None
        if unit_grad:
            kept = tile.narrow
        row_kernels.absorb(
            seen,
            tile.x,
            y[tile.rows],
            first=tile.cols.start,
            inner=head.inner[tile.rows],
            outer=part(head.outer, tile.rows),
            bias=tile.bias,
            entropy=entropy,
            kept=kept,
        )
        if weight_sum is not None:
            row_kernels.rescale(weight_sum[tile.rows], seen.rescale)
            product(tile.narrow, tile.w, out=weight_sum[tile.rows], add=True)

    logp, found_entropy, lse = softmax.outputs(state, y, head.shard, entropy=entropy)
    if weight_sum is not None:
        weight_sum = softmax.unit_gradient(weight_sum, head.w, y, state.row_max, logp, lse)
        weight_sum = sum_over(head.shard, weight_sum.mul_(head.inner[:, None]))
    return Outputs(logp, found_entropy, lse, weight_sum)


def backward(problem: Problem, y: Tensor, cot: Cotangent, need: tuple[bool, bool, bool]) -> Gradients:
    """Do as `interface.Backward`."""
    return collect(unscaled_head(problem), y, cot, need, _gradient_tiles)


def collect(
    head: UnscaledHead,
    y: Tensor,
    cot: Cotangent,
    need: tuple[bool, bool, bool],
    gradient_tiles: GradientTiles,
) -> Gradients:
    """Compute the gradients of h, w and bias from the gradients of the logits."""
    y = local_labels(y, head.shard).contiguous()
    cot = cot.each(Tensor.contiguous)

    # float16 alone lacks the range that gradients of logits have.
    grad_scale = None
    if head.h.dtype == torch.float16:
        grad_scale = _grad_scale(head, cot)

    need_h, need_w, need_bias = need
    dh = dw = dbias = None
    if need_h:
        dh = head.inner.new_zeros(head.h.shape)
    if need_w:
        dw = head.w.new_empty(head.w.shape)
    if need_bias:
        dbias = head.inner.new_zeros(head.w.shape[0])

    # dw is one product per slice of the vocabulary, dh a sum over the slices.
    summed = _summed_rows(head, grad_scale)
    for tile in gradient_tiles(head, y, cot, grad_scale):
        if dh is not None:
            product(tile.dx, tile.w, out=dh[tile.rows], add=True)
        if dw is not None:
            _weight_grad(dw[tile.cols], tile, summed)
        if dbias is not None:
            _bias_grad(dbias[tile.cols], tile, summed)

    if dh is not None:
        if grad_scale is not None:
            dh.mul_(grad_scale[:, None])
        dh = sum_over(head.shard, dh)
    return Gradients(dh, dw, dbias)


def product(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """Compute out (+)= a b, where out may be of a wider type.

    Sums are then stored in that type.
    """
    if out.dtype == a.dtype and add:
        out.addmm_(a, b)
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _gradient_tiles(
    head: UnscaledHead, y: Tensor, cot: Cotangent, grad_scale: Tensor | None
) -> Iterator[GradientTile]:
    """Yield each slice of the logits, made again and turned into its gradient."""
    for tile in _tiles(head, narrow=True):
        row_kernels.differentiate(
            tile.x,
            tile.narrow,
            y[tile.rows],
            cot.rows(tile.rows),
            first=tile.cols.start,
            inner=head.inner[tile.rows],
            outer=part(head.outer, tile.rows),
            bias=tile.bias,
            grad_scale=part(grad_scale, tile.rows),
        )
        yield GradientTile(tile.cols, tile.rows, tile.w, tile.narrow)


def _product_type(h: Tensor, w: Tensor, scale: Tensor) -> torch.dtype:
    """Return the type of products: only a GPU multiplies 16-bit matrices into float32."""
    if h.is_cuda and h.dtype == w.dtype:
        return h.dtype
    return scale.dtype


# ---------------------------------------------------------------------------------------- scales for float16
class SummedRows(NamedTuple):
    """Rows with gradients that are summed over the tokens, which needs one scale for all of them.

    A scale relative to the largest that rounds to 0 in h belongs to 2^-24 of the sum.
    """

    largest: Tensor | None  # [] the largest grad_scale of a row
    relative: Tensor  # [R] the scale of each row over the largest, in the type of h
    h: Tensor  # [R, D] times relative


def _grad_scale(head: UnscaledHead, cot: Cotangent) -> Tensor:
    """Return a power of two [R] that brings each row of gradients into the range of float16.

    A gradient of a logit over it neither exceeds that range, nor is it tiny.
    """
    bound = torch.maximum(cot.p_factor.abs(), cot.target_grad.abs())
    if cot.g_entropy is not None:
        bound = torch.maximum(bound, cot.p_factor.abs() + cot.g_entropy.abs())  # |p log p| < 1
    slope = head.inner
    if head.outer is not None:
        slope = head.inner * head.outer
    bound = bound * slope
    exponent = torch.frexp(bound).exponent.to(bound.dtype)
    return torch.exp2(torch.where(bound > 0, exponent, 0)) / _FP16_RANGE


def _summed_rows(head: UnscaledHead, grad_scale: Tensor | None) -> SummedRows:
    """Return the rows of a head for sums over them."""
    if grad_scale is None:
        return SummedRows(None, torch.ones_like(head.inner, dtype=head.h.dtype), head.h)
    largest = grad_scale.new_ones(())
    if grad_scale.numel():
        largest = grad_scale.amax()
    relative = grad_scale / largest
    h = (head.h * relative[:, None]).to(head.h.dtype)
    return SummedRows(largest, relative.to(head.h.dtype), h)


def _weight_grad(dw: Tensor, tile: GradientTile, summed: SummedRows) -> None:
    """Compute dw [C, D] (+)= dxᵀ h.

    One product into its slice; in float32 first if there are scales or blocks.
    """
    h = summed.h
    is_first = tile.rows.start == 0
    is_last = tile.rows.stop == h.shape[0]
    if is_first and is_last and summed.largest is None and dw.dtype == h.dtype:
        product(tile.dx.T, h, out=dw)
        return
    total = dw.new_empty(dw.shape, dtype=accumulate_dtype(h, dw))
    product(tile.dx.T, h[tile.rows], out=total)
    if summed.largest is not None:
        total.mul_(summed.largest)
    if not is_first:
        total.add_(dw)
    dw.copy_(total)


def _bias_grad(dbias: Tensor, tile: GradientTile, summed: SummedRows) -> None:
    """Compute dbias [C] += the sum of dx over the rows."""
    total = dbias.new_empty(1, dbias.shape[0])
    product(summed.relative[tile.rows][None], tile.dx, out=total)
    if summed.largest is not None:
        total.mul_(summed.largest)
    dbias.add_(total[0])


# --------------------------------------------------------------------------------------- slices of the logits
def _tiles(head: UnscaledHead, *, narrow: bool) -> Iterator[UnscaledTile]:
    """Yield slices of the logits, one after another in one buffer.

    narrow: with room for a copy in the type of the products.
    """
    tokens, width = head.h.shape
    vocabulary = head.w.shape[0]
    if not vocabulary:
        return  # a rank that has no row of the head

    # One buffer for all slices, and others for a rounded copy and for a converted slice of w.
    height = max(1, min(tokens, _ROWS))
    breadth = _breadth(head, narrow)
    buffer = torch.empty(height * breadth, dtype=head.inner.dtype, device=head.h.device)
    narrow_buffer = buffer
    if narrow and head.h.dtype != buffer.dtype:
        narrow_buffer = torch.empty_like(buffer, dtype=head.h.dtype)
    converted = None
    if head.w.dtype != head.h.dtype:
        converted = head.h.new_empty(breadth, width)

    # The vocabulary is the outer loop, so that a slice of w is converted once.
    for cols in cut(vocabulary, breadth):
        w = head.w[cols]
        columns = len(w)
        if converted is not None:
            w = converted[:columns].copy_(w)
        for rows in cut(tokens, height):
            size = (rows.stop - rows.start) * columns
            x = buffer[:size].view(-1, columns)
            rounded = narrow_buffer[:size].view(-1, columns)
            product(head.h[rows], w.T, out=x)
            yield UnscaledTile(cols, rows, w, x, rounded, part(head.bias, cols))


def _breadth(head: UnscaledHead, narrow: bool) -> int:
    """Return the number of columns of a tile that fits into the workspace.

    With its rounded copy, and with a converted slice of w.
    """
    tokens, width = head.h.shape
    height = max(1, min(tokens, _ROWS))
    narrow_size = head.h.element_size()

    # Bytes for each column.
    logit = head.inner.element_size()
    if narrow and narrow_size != logit:
        logit += narrow_size
    per_column = logit * height
    if head.w.dtype != head.h.dtype:
        per_column += narrow_size * width
    fit = head.workspace // per_column

    step = _SMALLEST
    if fit >= _COLUMNS:
        step = _COLUMNS
    return min(head.w.shape[0], max(_SMALLEST, fit // step * step))
