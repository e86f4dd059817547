"""Linear recurrences over the last dimension, without a Python loop over time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import check

__all__ = ["linear_scan"]


def linear_scan(a: Tensor, b: Tensor, *, reverse: bool = True) -> Tensor:
    """y [..., S] with y[t] = b[t] + a[t] y[t+1] and y[S] = 0; `reverse=False`: y[t] = b[t]
    + a[t] y[t-1], y[-1] = 0.

    Cyclic reduction: the recurrence over every fourth position is one of a quarter of the length, and gives
    the three between. Costs O(S) multiplications in O(log S) vector operations; differentiable in a and b;
    where a is 0 nothing crosses.
    """
    check.shapes(a=(a, "... S"), b=(b, "... S"))
    return _backward(a, b) if reverse else _backward(a.flip(-1), b.flip(-1)).flip(-1)


def _backward(a: Tensor, b: Tensor) -> Tensor:
    size = b.shape[-1]
    if size < 2:
        return b
    if size % 4:
        a, b = F.pad(a, (0, -size % 4)), F.pad(b, (0, -size % 4))
    (a0, a1, a2, a3), (b0, b1, b2, b3) = (x.unflatten(-1, (-1, 4)).unbind(-1) for x in (a, b))
    step = torch.addcmul  # step(b, a, y) = b + a y
    y0 = _backward(a0 * a1 * a2 * a3, step(b0, a0, step(b1, a1, step(b2, a2, b3))))
    y3 = step(b3, a3, F.pad(y0[..., 1:], (0, 1)))
    y2 = step(b2, a2, y3)
    return torch.stack([y0, step(b1, a1, y2), y2, y3], -1).flatten(-2)[..., :size]
