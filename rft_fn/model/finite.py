"""The check of weights for NaN and inf, in one pass and without memory."""

import torch
from torch import Tensor

from rft_fn.model.quantize import whole

__all__ = ["is_finite", "require_finite"]


def is_finite(x: Tensor) -> bool:
    """Whether a tensor has neither NaN nor inf."""
    x = whole(x).detach()
    if not x.is_floating_point() or x.is_meta or not x.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())  # NaN is in the minimum of what holds it


def require_finite(what: str, name: str, x: Tensor) -> None:
    """ValueError that names a tensor with NaN or inf."""
    if not is_finite(x):
        raise ValueError(f"{what}: {name}: expected finite numbers, got NaN or inf")
