"""Arithmetic on tiles of logits: an online softmax forward, recomputation backward. No autograd here.

The vocabulary is the outer loop and the tokens are the inner one. So a slice of w is upcast once; a slice of
dw is one matrix product and needs no accumulator of size V D; only dh, of size T D, is added up over the
slices.

The target is left out of the running sums and put back at the end. Then 1 - p and log p keep their relative
accuracy when the policy is nearly certain (p > 0.999), where 1 - p formed from a rounded p has none left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from rft_kernels import products
from rft_kernels.parallel import Shard

_CPU_ROWS = 4096  # of a matrix product: more would make the slices of w thin within the same workspace
_GPU_ROWS = 32768
_COLUMNS = 64  # slices of the vocabulary are multiples of this
_LOG2_E = math.log2(math.e)
_NEVER = -1e4  # exp(_NEVER) is 0 in every type, and 0 * _NEVER is 0 where 0 * -inf would be NaN


class Head(NamedTuple):
    """x = h wᵀ + inner bias are scaled logits; z = x, or outer tanh(x) under a softcap."""

    h: Tensor  # [R, D] hidden states times inner, in the type of the computation
    w: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    inner: Tensor  # [R] 1 / temperature, or 1 / softcap
    outer: Tensor | None  # [R] softcap / temperature
    workspace: int  # bytes
    shard: Shard | None = None  # of a vocabulary that is spread over ranks: w is its local rows


class Running(NamedTuple):
    """The online softmax of each row over the columns seen so far, its target left out."""

    top: Tensor  # [R] largest logit
    total: Tensor  # [R] sum of exp(z - top)
    weighted: Tensor  # [R] sum of (z - top) exp(z - top)
    hit: Tensor  # [R] the target's logit, NaN until it is met
    shrink: Tensor  # [R] what the last tile multiplied earlier sums by


class Cotangent(NamedTuple):
    """dz = p (level - g_entropy log p) for every column but the target's, which is peak; all [R]."""

    lse: Tensor
    level: Tensor
    g_entropy: Tensor | None
    peak: Tensor

    @classmethod
    def of(
        cls,
        logp: Tensor,
        entropy: Tensor | None,
        lse: Tensor,
        g: Tensor | None,
        g_entropy: Tensor | None,
        g_lse: Tensor | None,
    ) -> Cotangent:
        """d logp/dz = 1[y] - p, d entropy/dz = -p (log p + entropy), d lse/dz = p."""
        zero = torch.zeros_like(lse)
        g = zero if g is None else g
        level = -g if g_lse is None else g_lse - g
        others = level + g
        if g_entropy is not None:
            level = level - g_entropy * entropy
            others = level + g - g_entropy * logp.clamp(min=_NEVER)
        return cls(lse, level, g_entropy, logp.exp() * others - g * torch.expm1(logp))

    def each(self, f: Callable[[Tensor], Tensor]) -> Cotangent:
        """f of each tensor that is there."""
        return Cotangent(*(x if x is None else f(x) for x in self))


class Tile(NamedTuple):
    """Scaled logits of a block of B tokens over a slice of C columns."""

    cols: slice  # of the vocabulary
    rows: slice  # of the tokens
    w: Tensor  # [C, D] in the type of the computation
    x: Tensor  # [B, C] the consumer may write into it
    outer: Tensor | None  # [B] of Head
    total: Tensor | None  # [C, D] room for a gradient of w, if w is of a narrower type


def head(
    h: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor, *, softcap: float | None, workspace: int
) -> Head:
    """The temperature (or the softcap) goes into h: T D numbers are scaled instead of T V."""
    inner = scale if softcap is None else torch.full_like(scale, 1 / softcap)
    outer = None if softcap is None else scale * softcap
    return Head(h.to(scale.dtype) * inner[:, None], w, bias, inner, outer, workspace)


def forward(head: Head, y: Tensor, *, entropy: bool, unit: bool) -> tuple[Tensor | None, ...]:
    """y [R] -> logp, entropy or None, lse, each [R], and dlogp/dh [R, D] or None. NaN for a bad label."""
    if head.shard is not None:
        y = head.shard.local(y)
    run = start(head.h)
    # The sum of exp(z - top) w over all columns but the target's, kept up to date like run.total.
    pull = torch.zeros_like(head.h) if unit else None
    leader = torch.full_like(y, -1) if products.sums_are_long(head.h, head.w) else None
    for tile in _tiles(head, copies=1 + entropy):
        state = Running(*(r[tile.rows] for r in run))
        absorb(state, tile.x, y[tile.rows] - tile.cols.start, tile.outer, entropy=entropy)
        if leader is not None:
            _update_leader(leader[tile.rows], tile, state.shrink)
        if pull is not None:
            products.add_mm(pull[tile.rows].mul_(state.shrink[:, None]), tile.x, tile.w)
        del tile  # its memory is that of the next one
    top = run.top
    refined = run
    if leader is not None:
        run = run._replace(hit=_select(head, y))
        refined = _refine(run, _select(head, leader))
    pair = Running(*map(torch.stack, zip(run, refined, strict=True)))
    if head.shard is not None:
        pair = merge(pair, y, head.shard)
    logps, lses = log_prob(pair)
    # lse stays that of the tiles: then p adds up to 1 in the backward, which sees the same tiles.
    logp, lse = logps[1], lses[0]
    if pull is not None:
        pull = unit_gradient(pull, head.w, y, top, logp, lse).mul_(head.inner[:, None])
    if pull is not None and head.shard is not None:
        pull = head.shard.sum(pull)
    return logp, entropy_of(pair, logps)[1] if entropy else None, lse, pull


def backward(
    head: Head, y: Tensor, cot: Cotangent, need: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of h [R, D], bias [V] (in the type of the computation) and w [V, D] (its own), as needed."""
    if head.shard is not None:
        y = head.shard.local(y)
    dh = torch.zeros_like(head.h) if need[0] else None
    dw = head.w.new_empty(head.w.shape) if need[1] else None
    db = head.h.new_zeros(head.w.shape[0]) if need[2] else None
    for tile in _tiles(head, copies=1 + (cot.g_entropy is not None) + (head.outer is not None)):
        rows = tile.rows
        differentiate(tile.x, y[rows] - tile.cols.start, cot.each(itemgetter(rows)), tile.outer)
        if dh is not None:
            products.add_mm(dh[tile.rows], tile.x, tile.w)
        if dw is not None:
            _weight_grad(dw[tile.cols], tile, head.h[tile.rows])
        if db is not None:
            db[tile.cols].addmv_(tile.x.T, head.inner[tile.rows])
        del tile
    if dh is not None:
        dh.mul_(head.inner[:, None])
    if dh is not None and head.shard is not None:
        dh = head.shard.sum(dh)
    return dh, dw, db


def start(h: Tensor) -> Running:
    """The state before the first column, for R rows of the type of h [R, ...]."""
    # A finite floor instead of -inf: a tile that is -inf throughout then needs no guard against -inf - -inf.
    zero = h.new_zeros(h.shape[0])
    top, hit = torch.full_like(zero, torch.finfo(h.dtype).min / 2), torch.full_like(zero, torch.nan)
    return Running(top, zero, zero.clone(), hit, zero.clone())


def absorb(run: Running, z: Tensor, column: Tensor, outer: Tensor | None, *, entropy: bool) -> None:
    """Adds the tile z [R, C] to run in place, and leaves exp(z - top) in z.

    column [R]: the target's in this tile, or a number outside [0, C) when it is in another one.
    """
    if outer is not None:
        z.tanh_().mul_(outer[:, None])
    at, inside = _locate(z, column)
    seen = z.gather(1, at)
    run.hit.copy_(torch.where(inside, seen, run.hit[:, None])[:, 0])
    z.scatter_(1, at, seen.masked_fill(inside, -torch.inf))
    top = torch.maximum(run.top, z.amax(1))
    drop = run.top - top
    torch.exp(drop, out=run.shrink)
    z.sub_(top[:, None])
    if entropy:
        below = z.clamp(min=_NEVER)
        moments = below.mul_(_exp_(z)).sum(1)
        run.weighted.addcmul_(drop, run.total).mul_(run.shrink).add_(moments)
    else:
        _exp_(z)
    run.total.mul_(run.shrink).add_(z.sum(1))
    run.top.copy_(top)


def merge(run: Running, y: Tensor, shard: Shard) -> Running:
    """The same over the whole vocabulary, from each shard's: two reductions of [..., R] numbers."""
    top = shard.max(run.top.clone())
    drop = run.top - top
    scale = torch.exp(drop)
    hit = torch.where(y == -1, 0, run.hit)  # that of another shard; a label of none stays NaN
    sums = torch.stack([run.total * scale, torch.addcmul(run.weighted, drop, run.total) * scale, hit])
    total, weighted, hit = shard.sum(sums)
    return Running(top, total, weighted, hit, run.shrink)


def unit_gradient(pull: Tensor, w: Tensor, y: Tensor, top: Tensor, logp: Tensor, lse: Tensor) -> Tensor:
    """d logp / d(h wᵀ) w [R, D], in place of pull: the sum of exp(z - top) w without the target.

    Targets that are no row of w (they are another shard's) add nothing.
    """
    pull.mul_(-torch.exp(top - lse)[:, None])
    if not w.shape[0]:
        return pull
    here = torch.where((y < 0) | (y >= w.shape[0]), 0, -torch.expm1(logp))
    return pull.addcmul_(w[y.clamp(0, w.shape[0] - 1)].to(pull.dtype), here[:, None])


def log_prob(run: Running) -> tuple[Tensor, Tensor]:
    """logp [R] = -log(1 + sum of the others / the target), and lse [R]."""
    lse = torch.logaddexp(run.top + run.total.log(), run.hit)
    # Differences of logits first: what all logits have in common must not round them.
    logp = -torch.logaddexp(torch.zeros_like(lse), run.total.log() - (run.hit - run.top))
    return logp + (lse - lse), lse  # an infinite logit has no log-probability: NaN, not 0


def entropy_of(run: Running, logp: Tensor) -> Tensor:
    """-sum p log p [R], over the target and over the others, for whom log p = (z - top) + (top - lse)."""
    offset = -torch.logaddexp(run.total.log(), run.hit - run.top)
    target = logp.exp() * logp.clamp(min=_NEVER)
    return -target - offset.exp() * torch.addcmul(run.weighted, offset, run.total)


def differentiate(z: Tensor, column: Tensor, cot: Cotangent, outer: Tensor | None) -> None:
    """Replaces the scaled logits z [R, C] by the gradient of the outputs in them."""
    slope = None
    if outer is not None:
        slope = z.cosh().reciprocal_().square_().mul_(outer[:, None])  # 1 - tanh² would have no digits left
        z.tanh_().mul_(outer[:, None])
    z.sub_(cot.lse[:, None])
    if cot.g_entropy is None:
        _exp_(z).mul_(cot.level[:, None])
    else:
        factor = z.clamp(min=_NEVER).mul_(-cot.g_entropy[:, None]).add_(cot.level[:, None])
        _exp_(z).mul_(factor)
    at, inside = _locate(z, column)
    z.scatter_(1, at, torch.where(inside, cot.peak[:, None], z.gather(1, at)))
    if slope is not None:
        z.mul_(slope)


def _update_leader(leader: Tensor, tile: Tile, shrink: Tensor) -> None:
    """leader [B] gets the column of each row whose largest logit is in this tile of exp(z - top)."""
    risen = (shrink < 1).nonzero()[:, 0]
    x = tile.x if len(risen) == len(leader) else tile.x.index_select(0, risen)
    leader[risen] = x.argmax(1) + tile.cols.start


def _refine(run: Running, largest: Tensor) -> Running:
    """run, with its largest logit, which counts most, replaced by largest [R]; NaN leaves it as it is.

    An error of a logit is one of lse times its probability. A long sum over D that is added up one by one
    has an error that a vector product of its own has not.
    """
    more = torch.where(largest.isnan(), 0, largest - run.top)
    total, weighted = run.total + torch.expm1(more), torch.addcmul(run.weighted, more, more.exp())
    return run._replace(total=total, weighted=weighted)


def _select(head: Head, column: Tensor) -> Tensor:
    """The scaled logits [R] of one column in each row, by vector products; NaN if it is no row of w."""
    z = torch.empty_like(head.inner)
    inside = (column >= 0) & (column < len(head.w))
    here = torch.where(inside, column, 0)
    block = max(1, head.workspace // (2 * head.h.element_size() * max(1, head.h.shape[1])))
    for rows in cut(len(z), block):
        z[rows] = torch.linalg.vecdot(head.h[rows], head.w[here[rows]].to(z.dtype))
    if head.bias is not None:
        z.addcmul_(head.inner, head.bias[here].to(z.dtype))
    if head.outer is not None:
        z.tanh_().mul_(head.outer)
    return z.masked_fill_(~inside, torch.nan)


def _exp_(x: Tensor) -> Tensor:
    """exp(x) in place of x, in base 2: torch's exp is MKL's, which took six times as long on an AMD EPYC."""
    return x.mul_(_LOG2_E).exp2_()


def _weight_grad(dw: Tensor, tile: Tile, h: Tensor) -> None:
    """dw [C, D] (+)= dxᵀ h, over the blocks of tokens; in tile.total first if dw is of a narrower type."""
    total = dw if tile.total is None else tile.total
    if tile.rows.start == 0:
        products.mm(tile.x.T, h, total)
    else:
        products.add_mm(total, tile.x.T, h)
    if total is not dw:
        dw.copy_(total)


def _locate(z: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row's target is in z [R, C], clamped into it, and whether it was inside; both [R, 1]."""
    last = z.shape[1] - 1
    return column.clamp(0, last)[:, None], ((column >= 0) & (column <= last))[:, None]


def _tiles(head: Head, *, copies: int) -> Iterator[Tile]:
    """Scaled logits, tile by tile. The consumer may hold copies - 1 more of a tile's size.

    It lets go of a tile before it asks for the next: where they are not all in one buffer, that frees it.
    """
    (tokens, width), vocabulary = head.h.shape, head.w.shape[0]
    if not vocabulary:
        return  # a rank that has no row of the head
    height, breadth = _tile_shape(head, copies)
    buffer = None if products.by_onednn(head.h) else head.h.new_empty(height * breadth)
    narrow = head.w.dtype != head.h.dtype
    upcast, total = head.h.new_empty(2, breadth, width) if narrow else (None, None)
    for cols in cut(vocabulary, breadth):
        size = cols.stop - cols.start
        w = upcast[:size].copy_(head.w[cols]) if narrow else head.w[cols]
        for rows in cut(tokens, height):
            outer, room = None if head.outer is None else head.outer[rows], total[:size] if narrow else None
            yield Tile(cols, rows, w, _logits(head, rows, cols, w, buffer), outer, room)


def _logits(head: Head, rows: slice, cols: slice, w: Tensor, buffer: Tensor | None) -> Tensor:
    """Scaled logits of a block of tokens over w, the slice cols of the head."""
    h, inner = head.h[rows], head.inner[rows]
    x = products.mm(h, w.T, None if buffer is None else buffer[: len(h) * len(w)].view(-1, len(w)))
    return x if head.bias is None else x.addr_(inner, head.bias[cols].to(w.dtype))


def _tile_shape(head: Head, copies: int) -> tuple[int, int]:
    """Rows and columns of a tile, such that its copies and converted slices of w fit into the workspace."""
    (tokens, width), vocabulary = head.h.shape, head.w.shape[0]
    height = max(1, min(tokens, _CPU_ROWS if head.h.device.type == "cpu" else _GPU_ROWS))
    converted = 0 if head.w.dtype == head.h.dtype else 2 * width
    fit = head.workspace // (head.h.element_size() * (copies * height + converted))
    slices = -(-vocabulary // max(fit, _COLUMNS))  # of one size, rather than a thin one at the end
    breadth = -(-vocabulary // slices)
    return height, min(vocabulary, -(-breadth // _COLUMNS) * _COLUMNS)


def cut(size: int, step: int) -> list[slice]:
    """[0, size) in slices of at most step; one empty slice if size is 0: products over it are zeros."""
    return [slice(a, min(a + step, size)) for a in range(0, max(size, 1), step)]
