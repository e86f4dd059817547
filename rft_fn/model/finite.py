"""The check of weights for NaN and inf, in one pass and without memory."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rft_fn.model.quantize import whole

__all__ = ["is_finite", "require_all_finite", "require_finite"]


def is_finite(x: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor inf."""
    x = whole(x).detach()
    if not x.is_floating_point() or x.is_meta or not x.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())  # NaN is in the minimum of what holds it


def require_finite(what: str, name: str, x: Tensor) -> None:
    """Raise ValueError that names a tensor with NaN or inf."""
    if not is_finite(x):
        raise ValueError(f"{what}: {name}: expected finite numbers, got NaN or inf")


def require_all_finite(what: str, pairs: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError that names the first tensor with NaN or inf; a device is waited for once."""
    floats = [x.detach() for _, x in pairs if x.is_floating_point() and x.numel()]
    largest = torch._foreach_norm(floats, math.inf) if floats else []  # NaN is the largest of what holds it
    if floats and not bool(torch.isfinite(torch.stack(list(largest))).all()):
        for name, x in pairs:
            require_finite(what, name, x)
