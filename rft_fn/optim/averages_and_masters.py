"""Copies of the parameters that an optimizer state holds: averages, and float32 masters."""

from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.optim.in_place import InPlace, step_of
from rft_fn.optim.updates import apply_updates, by_name, local_parts
from rft_fn.precision import widen
from rft_fn.types import Transform

__all__ = ["EmaState", "MasterState", "ema", "master_weights"]


@tree.struct
class EmaState:
    """The exponential moving average of the parameters."""

    average: Any  # like params


@tree.struct
class MasterState:
    """Wide copies of parameters, and the wrapped state."""

    master: Any  # float32 copies of the parameters
    inner: Any  # the state of the wrapped transform


def ema(decay: float) -> Transform:
    """Keep an exponential moving average of the parameters.

    It must be the last transform in a chain, to see the final updates:

        average = decay average + (1 - decay) (params + updates)

    Updates pass through unchanged. The average is a leaf of the optimizer state, so it is saved, sharded
    and resumed with it; `ema_params` finds it. ValueError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay: expected 0 <= decay < 1, got {decay}")

    @torch.no_grad()
    def update(updates: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        # params + updates are the parameters after this update, added in two parts to need no copy
        average = local_parts(state.average)
        torch._foreach_mul_(average, decay)
        torch._foreach_add_(average, local_parts(params), alpha=1 - decay)
        torch._foreach_add_(average, local_parts(updates), alpha=1 - decay)
        return updates, state

    def follow(state: EmaState, params: Any) -> None:
        average, values = local_parts(state.average), local_parts(params)
        torch._foreach_mul_(average, decay)
        torch._foreach_add_(average, values, alpha=1 - decay)

    def start(p: Tensor) -> Tensor:
        # float32 at least: in bf16 (1 - decay) of a parameter is below the spacing of numbers
        return widen(p.detach().clone())

    def init(params: Any) -> EmaState:
        return EmaState(average=tree.map(start, params))

    update.in_place = InPlace(follow=follow)  # type: ignore[attr-defined]
    return Transform(init, update, {"name": "ema", "decay": decay})


def master_weights(tx: Transform) -> Transform:
    """Run a transform on float32 copies of parameters.

    The parameters are bf16 or fp16, and the copies are kept in the optimizer state. The updates are the
    difference between the rounded copy and the parameter, so steps that are too small for bf16 add up in
    the copy instead of being lost.
    """

    def init(params: Any) -> MasterState:
        master = tree.map(lambda p: p.detach().float().clone(), params)
        return MasterState(master=master, inner=tx.init(master))

    @torch.no_grad()
    def update(grads: Any, state: MasterState, params: Any) -> tuple[Any, MasterState]:
        wide, inner = tx.update(tree.map(lambda g: g.float(), grads), state.inner, state.master)
        wide = by_name(state.master, wide, "updates")
        apply_updates(state.master, wide)

        # the wide updates are used up, so their memory takes the differences to the narrow parameters
        narrow = tree.map(lambda u, m, p: u.copy_(m.to(p.dtype)).sub_(p), wide, state.master, params)
        return narrow, tree.replace(state, inner=inner)

    def step(grads: Any, state: MasterState, params: Any, norm: Tensor, scale: Tensor | None) -> MasterState:
        grads = tree.map(lambda g: g.float(), grads)
        inner = step_of(tx)(grads, state.inner, state.master, norm, scale)
        torch._foreach_copy_(local_parts(params), local_parts(state.master))
        return tree.replace(state, inner=inner)

    update.in_place = InPlace(step=step)  # type: ignore[attr-defined]
    return Transform(init, update, {"name": "master_weights", "tx": tx.spec})
