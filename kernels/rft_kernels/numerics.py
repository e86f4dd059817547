"""Types and precision that every engine shares."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def accumulate_dtype(h: Tensor, w: Tensor) -> torch.dtype:
    """Return the type that everything is computed and returned in."""
    if torch.float64 in (h.dtype, w.dtype):
        return torch.float64
    return torch.float32


def row_temperatures(temperature: float | Tensor, h: Tensor, w: Tensor) -> Tensor:
    """Return the temperature of each row: [T], in `accumulate_dtype`.

    Raises ValueError for a number that is not positive, and for a tensor that is neither [] nor [T].
    """
    dtype = accumulate_dtype(h, w)
    rows = h.shape[0]
    if isinstance(temperature, Tensor):
        if temperature.shape not in ((), (rows,)):
            raise ValueError(
                f"temperature: expected a number, [] or [T] = [{rows}], got {list(temperature.shape)}"
            )
        return temperature.to(h.device, dtype).expand(rows)
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number > 0, got {temperature}")
    return torch.full((rows,), float(temperature), dtype=dtype, device=h.device)


def exact_matmul(device_type: str) -> AbstractContextManager:
    """Return a context without autocast.

    Autocast rounds logits to 8 bits of mantissa, an error of 3e-2 in a log-probability.
    """
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
