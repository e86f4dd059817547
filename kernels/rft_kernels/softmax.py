"""The online softmax of rows of logits, and its derivative.

The target is left out of the running sums and put back at the end. Then 1 - p and log p keep their relative
accuracy when the policy is nearly certain (p > 0.999), where 1 - p formed from a rounded p has none left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rft_kernels.parallel import Shard

_LOG2_E = math.log2(math.e)
_NEVER = -1e4  # exp(_NEVER) is 0 in every type, and 0 * _NEVER is 0 where 0 * -inf would be NaN


class OnlineSoftmax(NamedTuple):
    """The softmax of each row over the columns so far, without its target."""

    row_max: Tensor  # [R] largest logit
    row_sum: Tensor  # [R] sum of exp(z - row_max)
    row_moment: Tensor  # [R] sum of (z - row_max) exp(z - row_max), for the entropy
    target_logit: Tensor  # [R] NaN until its column comes
    rescale: Tensor  # [R] factor of the earlier sums when the last tile was added

    def rows(self, at: slice) -> OnlineSoftmax:
        """Views of some rows."""
        return OnlineSoftmax(*(x[at] for x in self))


class Cotangent(NamedTuple):
    """The gradient of the logits z as numbers per row, all [R].

    dz = p (p_factor - g_entropy log p) for every column but the target's, whose dz is target_grad.
    """

    lse: Tensor
    p_factor: Tensor
    g_entropy: Tensor | None
    target_grad: Tensor

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
        """From the outputs and the gradients of them.

        d logp/dz = 1[y] - p, d entropy/dz = -p (log p + entropy), d lse/dz = p.
        """
        if g is None:
            g = torch.zeros_like(lse)
        p_factor = -g
        if g_lse is not None:
            p_factor = g_lse - g

        # 1 - p of the target is -expm1(logp): its gradient keeps its digits when p is nearly 1.
        others = p_factor + g
        if g_entropy is not None and entropy is not None:
            p_factor = p_factor - g_entropy * entropy
            others = p_factor + g - g_entropy * logp.clamp(min=_NEVER)
        return cls(lse, p_factor, g_entropy, logp.exp() * others - g * torch.expm1(logp))

    def each(self, f: Callable[[Tensor], Tensor]) -> Cotangent:
        """The same with f of each tensor that is there."""
        g_entropy = self.g_entropy
        if g_entropy is not None:
            g_entropy = f(g_entropy)
        return Cotangent(f(self.lse), f(self.p_factor), g_entropy, f(self.target_grad))

    def rows(self, at: slice) -> Cotangent:
        """Views of some rows."""
        return self.each(lambda x: x[at])


def start(h: Tensor) -> OnlineSoftmax:
    """Return the state before the first column, for R rows of the type of h [R, ...]."""
    zero = h.new_zeros(h.shape[0])
    # A finite floor instead of -inf: a tile that is -inf throughout then needs no guard against -inf - -inf.
    row_max = torch.full_like(zero, torch.finfo(h.dtype).min / 2)
    target_logit = torch.full_like(zero, torch.nan)
    return OnlineSoftmax(row_max, zero, zero.clone(), target_logit, zero.clone())


def absorb(state: OnlineSoftmax, z: Tensor, column: Tensor, outer: Tensor | None, *, entropy: bool) -> None:
    """Add the tile z [R, C] to the state, and leave exp(z - row_max) in z.

    column [R]: the target's in this tile, or a number outside [0, C) when it is in another one.
    """
    if outer is not None:
        z.tanh_().mul_(outer[:, None])

    # The target's logit goes into the state, and out of the tile.
    at, inside = _locate(z, column)
    found = z.gather(1, at)
    state.target_logit.copy_(torch.where(inside, found, state.target_logit[:, None])[:, 0])
    z.scatter_(1, at, found.masked_fill(inside, -torch.inf))

    # Earlier sums were relative to a smaller maximum.
    row_max = torch.maximum(state.row_max, z.amax(1))
    drop = state.row_max - row_max
    torch.exp(drop, out=state.rescale)
    z.sub_(row_max[:, None])
    if entropy:
        below = z.clamp(min=_NEVER)
        moments = below.mul_(_exp_(z)).sum(1)
        state.row_moment.addcmul_(drop, state.row_sum).mul_(state.rescale).add_(moments)
    else:
        _exp_(z)
    state.row_sum.mul_(state.rescale).add_(z.sum(1))
    state.row_max.copy_(row_max)


def merge(state: OnlineSoftmax, y: Tensor, shard: Shard) -> OnlineSoftmax:
    """Merge the shards' states to that of the whole vocabulary: two reductions of [..., R] numbers."""
    row_max = shard.max(state.row_max.clone())
    drop = state.row_max - row_max
    rescale = torch.exp(drop)
    row_sum = state.row_sum * rescale
    row_moment = torch.addcmul(state.row_moment, drop, state.row_sum) * rescale
    target_logit = torch.where(y == -1, 0, state.target_logit)  # 0 if another shard has it, NaN if none has
    row_sum, row_moment, target_logit = shard.sum(torch.stack([row_sum, row_moment, target_logit]))
    return OnlineSoftmax(row_max, row_sum, row_moment, target_logit, state.rescale)


def log_prob(state: OnlineSoftmax) -> tuple[Tensor, Tensor]:
    """Return logp [R] = -log(1 + sum of the others / the target), and lse [R]."""
    log_sum = state.row_sum.log()
    lse = torch.logaddexp(state.row_max + log_sum, state.target_logit)
    # Differences of logits first: what all logits have in common must not round them.
    logp = -torch.logaddexp(torch.zeros_like(lse), log_sum - (state.target_logit - state.row_max))
    return logp + (lse - lse), lse  # an infinite logit has no log-probability: NaN, not 0


def entropy_of(state: OnlineSoftmax, logp: Tensor) -> Tensor:
    """Return -sum p log p [R], over the target and the others.

    The others have log p = (z - row_max) + (row_max - lse).
    """
    offset = -torch.logaddexp(state.row_sum.log(), state.target_logit - state.row_max)  # row_max - lse
    target = logp.exp() * logp.clamp(min=_NEVER)
    return -target - offset.exp() * torch.addcmul(state.row_moment, offset, state.row_sum)


def outputs(
    state: OnlineSoftmax, y: Tensor, shard: Shard | None, *, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return logp, entropy or None, lse, each [R], of the whole vocabulary; labels y [R] are local."""
    if shard is not None:
        state = merge(state, y, shard)
    logp, lse = log_prob(state)
    if not entropy:
        return logp, None, lse
    return logp, entropy_of(state, logp), lse


def unit_gradient(
    weight_sum: Tensor, w: Tensor, y: Tensor, row_max: Tensor, logp: Tensor, lse: Tensor
) -> Tensor:
    """Compute d logp / d(h wᵀ) w [R, D], in place of weight_sum.

    weight_sum [R, D] is the sum of exp(z - row_max) w over all columns but the target's. Targets that are no
    row of w (they are another shard's) add nothing.
    """
    weight_sum.mul_(-torch.exp(row_max - lse)[:, None])
    if not w.shape[0]:
        return weight_sum
    target_factor = torch.where((y < 0) | (y >= w.shape[0]), 0, -torch.expm1(logp))
    target_w = w[y.clamp(0, w.shape[0] - 1)].to(weight_sum.dtype)
    return weight_sum.addcmul_(target_w, target_factor[:, None])


def differentiate(z: Tensor, column: Tensor, cot: Cotangent, outer: Tensor | None) -> None:
    """Replace the scaled logits z [R, C] by the gradient of the outputs in them."""
    slope = None
    if outer is not None:
        slope = z.cosh().reciprocal_().square_().mul_(outer[:, None])  # 1 - tanh² would have no digits left
        z.tanh_().mul_(outer[:, None])

    # p times its factor; then the target's column, which has its own number.
    z.sub_(cot.lse[:, None])
    if cot.g_entropy is None:
        _exp_(z).mul_(cot.p_factor[:, None])
    else:
        factor = z.clamp(min=_NEVER).mul_(-cot.g_entropy[:, None]).add_(cot.p_factor[:, None])
        _exp_(z).mul_(factor)
    at, inside = _locate(z, column)
    z.scatter_(1, at, torch.where(inside, cot.target_grad[:, None], z.gather(1, at)))
    if slope is not None:
        z.mul_(slope)


def _locate(z: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the column of each row's target, whether it is one of z [R, C]), both [R, 1].

    The column is clamped into z.
    """
    last = z.shape[1] - 1
    inside = (column >= 0) & (column <= last)
    return column.clamp(0, last)[:, None], inside[:, None]


def _exp_(x: Tensor) -> Tensor:
    """Compute exp(x) in place of x, in base 2.

    torch's exp is MKL's, which took six times as long on an AMD EPYC.
    """
    return x.mul_(_LOG2_E).exp2_()
