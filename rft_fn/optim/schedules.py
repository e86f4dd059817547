"""Learning rates as functions of the step: a warmup, then a decay."""

import math
from collections.abc import Callable

from rft_fn.optim.adamw import Schedule

__all__ = ["warmup_cosine", "warmup_linear"]


def warmup_linear(
    lr: float, warmup: int, total: int, *, floor: float = 0.0, from_zero: bool = False
) -> Schedule:
    """Return a schedule of a linear warmup, then a linear decay.

    From lr / warmup up to lr in `warmup` steps, then down to floor * lr at step `total`, where it stays. With
    `from_zero` the warmup begins at 0 and reaches lr one step later, as that of transformers.
    """

    def decay(x: float) -> float:
        return floor + (1 - floor) * (1 - x)

    return _warmup(lr, warmup, total, decay, from_zero)


def warmup_cosine(
    lr: float, warmup: int, total: int, *, floor: float = 0.1, from_zero: bool = False
) -> Schedule:
    """Return a schedule of a linear warmup, then a cosine decay.

    From lr / warmup up to lr in `warmup` steps, then by half a cosine down to floor * lr at step `total`,
    where it stays; `from_zero` as in `warmup_linear`.
    """

    def decay(x: float) -> float:
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x))

    return _warmup(lr, warmup, total, decay, from_zero)


def _warmup(lr: float, warmup: int, total: int, decay: Callable[[float], float], from_zero: bool) -> Schedule:
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup: expected 0 <= warmup <= total = {total} steps, got {warmup}")

    def schedule(step: int, /) -> float:
        if step < warmup:
            return lr * (step + (not from_zero)) / warmup
        return lr * decay(min((step - warmup) / max(total - warmup, 1), 1.0))

    return schedule
