"""Linear recurrences over the last dimension, without a Python loop over time."""

import torch.nn.functional as F
from torch import Tensor

from rft_fn import check

__all__ = ["linear_scan"]


def linear_scan(a: Tensor, b: Tensor, *, reverse: bool = True) -> Tensor:
    """y [..., S] with y[t] = b[t] + a[t] y[t+1] and y[S] = 0; `reverse=False`: y[t] = b[t]
    + a[t] y[t-1], y[-1] = 0.

    Doubling (Hillis and Steele 1986): after k steps each position holds the recurrence over 2^k positions, so
    log2(S) vector operations give all of them. Costs O(S log S) multiplications; differentiable in a and b;
    where a is 0 nothing crosses.
    """
    check.shapes(a=(a, "... S"), b=(b, "... S"))
    if not reverse:
        return linear_scan(a.flip(-1), b.flip(-1)).flip(-1)
    span, size = 1, b.shape[-1]
    while span < size:
        b = b + a * F.pad(b[..., span:], (0, span))
        a = a * F.pad(a[..., span:], (0, span))
        span *= 2
    return b
