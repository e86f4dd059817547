"""Linear recurrences without a loop over time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import check

__all__ = ["linear_scan"]


def step(b: Tensor, a: Tensor, y: Tensor) -> Tensor:
    """Take one step of a recurrence, b + a y [...].

    The result is exactly b where a is 0, even if y is inf or NaN there.
    """
    return torch.addcmul(b, a, _reached(y, a == 0))


def _reached(y: Tensor, ends: Tensor) -> Tensor:
    """Return y with finite values where `ends`.

    0 * inf would be NaN. Finite values stay, so that the derivative with respect to the factor 0 is right.
    """
    return torch.where(ends, y.nan_to_num(0.0, 0.0, 0.0), y)


def linear_scan(a: Tensor, b: Tensor, *, reverse: bool = True) -> Tensor:
    """Solve a linear recurrence over the last dimension.

    Given a and b [..., S], y [..., S] is

        y[t] = b[t] + a[t] y[t+1],    y[S] = 0
        y[t] = b[t] + a[t] y[t-1],    y[-1] = 0    with reverse=False

    By cyclic reduction: the recurrence over every fourth position has a quarter of the length, and its
    solution gives the three positions between. That costs O(S) multiplications in O(log S) vector
    operations. Differentiable in a and b. Where a is 0 nothing crosses, in value nor gradient, not even inf
    or NaN: y[t] is b[t].
    """
    check.shapes(a=(a, "... S"), b=(b, "... S"))
    if b.shape[-1] < 2:
        return b
    return _scan(a, b) if reverse else _scan(a.flip(-1), b.flip(-1)).flip(-1)


def _scan(a: Tensor, b: Tensor) -> Tensor:
    return _Scan.apply(a, b)  # type: ignore[return-value]


class _Scan(torch.autograd.Function):
    """`_backward` with a gradient that is a recurrence too, so that 0 * inf is 0 in the gradient as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _backward(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        a, y = ctx.saved_tensors
        db = linear_scan(F.pad(a[..., :-1], (1, 0)), upstream[0], reverse=False)
        after = F.pad(y[..., 1:], (0, 1))
        return db * _reached(after, (a == 0) | (db == 0)), db


def _step(b: Tensor, a: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return torch.where(ends, b, torch.addcmul(b, a, y))


def _backward(a: Tensor, b: Tensor) -> Tensor:
    """Solve y[t] = b[t] + a[t] y[t+1] from the last position."""
    size = b.shape[-1]
    if size < 2:
        return b

    # padding of zeros at the end does not change the recurrence
    if size % 4:
        a = F.pad(a, (0, -size % 4))
        b = F.pad(b, (0, -size % 4))
    a0, a1, a2, a3 = a.unflatten(-1, (-1, 4)).unbind(-1)
    b0, b1, b2, b3 = b.unflatten(-1, (-1, 4)).unbind(-1)
    end0, end1, end2, end3 = (a == 0).unflatten(-1, (-1, 4)).unbind(-1)

    # substituting three steps into the fourth leaves a recurrence over every fourth position
    b012 = _step(b0, a0, _step(b1, a1, _step(b2, a2, b3, end2), end1), end0)
    y0 = _backward(a0 * a1 * a2 * a3, b012)

    # the positions between follow from the next solved one
    y3 = _step(b3, a3, F.pad(y0[..., 1:], (0, 1)), end3)
    y2 = _step(b2, a2, y3, end2)
    y1 = _step(b1, a1, y2, end1)
    return torch.stack([y0, y1, y2, y3], -1).flatten(-2)[..., :size]
