"""The definition in plain differentiable operations: slow, and with logits of T V numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_kernels.numerics import accumulate_dtype, exact_matmul


def log_prob(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None,
    softcap: float | None,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp, entropy and lse, each [T], from whole logits.

    h [T, D], w [V, D], y [T], scale [T] = 1 / temperature.

    Composes with every torch.func transform, and can be differentiated any number of times.
    """
    # A where on the outputs alone would let a NaN of an ignored row through to the gradient of w.
    h = torch.where((y != ignore_index)[:, None], h, 0)
    return outputs(logits(h, w, bias, softcap) * scale[:, None], y, ignore_index)


def outputs(z: Tensor, y: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp, entropy and lse, each [T], of logits z [T, V] and labels y [T]."""
    last = z.shape[1] - 1
    log_p = z.log_softmax(1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0)).sum(1)  # p log p is 0 where p is 0, also if log p is -inf
    logp = log_p.gather(1, y.long().clamp(0, last)[:, None])[:, 0]

    # Ignored rows are 0, and rows of any other label without a column are NaN.
    live = y != ignore_index
    inside = (y >= 0) & (y <= last)

    def marked(x: Tensor) -> Tensor:
        return torch.where(live, torch.where(inside, x, torch.nan), 0)

    return marked(logp), marked(entropy), marked(z.logsumexp(1))


def logits(h: Tensor, w: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Return cap(h wᵀ + bias) as [T, V], in float32 or float64."""
    dtype = accumulate_dtype(h, w)
    with exact_matmul(h.device.type):
        z = h.to(dtype) @ w.to(dtype).T
    if bias is not None:
        z = z + bias.to(dtype)
    if softcap is None:
        return z
    return softcap * torch.tanh(z / softcap)
