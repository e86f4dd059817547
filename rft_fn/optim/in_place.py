"""Steps of transforms that are taken in place, on a GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn.optim.updates import apply_updates, local_parts
from rft_fn.types.training import Transform

__all__ = ["InPlace", "in_order", "step_in_place", "step_of"]


class InPlace(NamedTuple):
    """What a transform does in a step that is taken in place: one of the three."""

    scale: Callable[[Tensor], Tensor] | None = None  # the norm of gradients [] -> a factor of them []
    # (grads, state, params, norm [] of the grads, a factor of the grads [] or None) -> state
    step: Callable[[Any, Any, Any, Tensor, Tensor | None], Any] | None = None
    follow: Callable[[Any, Any], None] | None = None  # (state, parameters after the step)


def step_in_place(tx: Transform, grads: Any, state: Any, params: Any, norm: Tensor) -> Any:
    """Take the step of `update` and `apply_updates` in place, and return the state; donates `grads`.

    It reads and writes memory less often than these two: clips are a factor, AdamW is torch's fused kernel,
    and 16-bit parameters are rounded from their masters. `norm` is the global norm of `grads`. Equal to the
    two to rounding. A transform that knows no step in place takes its usual one.
    """
    return step_of(tx)(grads, state, params, norm, None)


def step_of(tx: Transform) -> Callable[[Any, Any, Any, Tensor, Tensor | None], Any]:
    """Return the step of a transform in place: its own, or its update, added to the parameters."""
    own: InPlace | None = getattr(tx.update, "in_place", None)
    if own is not None and own.step is not None:
        return own.step

    def step(grads: Any, state: Any, params: Any, norm: Tensor, scale: Tensor | None) -> Any:
        if scale is not None:
            torch._foreach_mul_(local_parts(grads), scale)
        updates, state = tx.update(grads, state, params)
        apply_updates(params, updates)
        return state

    return step


def in_order(txs: tuple[Transform, ...]) -> InPlace | None:
    """Return the step of a chain in place: scales, one step, and what follows; None for another order."""
    parts = [getattr(tx.update, "in_place", None) or InPlace(step=step_of(tx)) for tx in txs]
    kinds = "".join("c" if x.scale else "s" if x.step else "f" for x in parts)
    if kinds.strip("c").rstrip("f") != "s":
        return None
    at = kinds.index("s")

    def step(grads: Any, state: tuple, params: Any, norm: Tensor, scale: Tensor | None) -> tuple:
        for part in parts[:at]:
            assert part.scale is not None
            factor = part.scale(norm if scale is None else norm * scale)
            scale = factor if scale is None else scale * factor
        new = step_of(txs[at])(grads, state[at], params, norm, scale)
        for part, its in zip(parts[at + 1 :], state[at + 1 :]):
            assert part.follow is not None
            part.follow(its, params)
        return (*state[:at], new, *state[at + 1 :])

    return InPlace(step=step)
