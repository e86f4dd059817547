"""Where the models of a strategy are, on the device or on the host, and which of them may be used.

With offload_models a model is on the device from the call that needs it:

* generate: no trained model, after `make_room`;
* score: the weights; those of a model that only scores leave with the end of the call;
* grad: the weights; update: the optimizer too; both stay until the next `make_room`;
* export: the weights; a push to an engine makes room before and after.

With adam_offload or fsdp_cpu_offload the optimizer works on the host, and does not move.
"""

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.model.copies import mover_of
from rft_fn.model.residence import Residence, Where
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Apply, TrainState

__all__ = [
    "Placing", "move_opt", "require_device", "require_own_apply", "residence_below", "residence_of",
]  # fmt: skip


# ---------- the model that a function or a state is of


def residence_of(apply: Apply) -> Residence:
    """Return the place of a bound model's weights; ValueError for an apply that no strategy gave."""
    residence = getattr(apply, "residence", None)
    if residence is None:
        raise ValueError(f"apply: expected one that st.init or st.bind gave, got {type(apply).__name__}")
    return residence


def residence_below(apply: Apply) -> Residence | None:
    """Return the place of the weights that a function scores with, such as one without adapters, or None."""
    return getattr(inspect.unwrap(apply), "residence", None)


def require_own_apply(state: TrainState, apply: Apply) -> None:
    """Raise ValueError for an apply that `init` did not return with this state or with its original."""
    residence = getattr(apply, "residence", None)
    own = residence is not None and residence is state.residence
    if state.residence is None:  # a fork, or a state of ZeRO, which knows its own
        own = residence is not None and (state.module is None or residence.module is state.module)
    if not own:
        got = getattr(apply, "__name__", type(apply).__name__)
        if residence is not None:
            got = f"that of another {residence.name}"
        raise ValueError(
            f"apply: expected the one that init gave with this state, got {got}; a model that computes "
            "something else is a module of its own: apply, state = st.init(module, tx)"
        )


def require_device(state: TrainState) -> None:
    """Raise ValueError for a state with weights on the host."""
    if state.residence is not None:
        state.residence.require_device("state")


def move_opt(state: TrainState, device: str | torch.device) -> TrainState:
    """Move the optimizer's tensors to a device. Donates `state`."""
    mover = mover_of(next(iter(state.params.values())).device)
    to_host = torch.device(device).type == "cpu"

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if mover is None:
            return x.to(device)
        return mover.to_host(x) if to_host else mover.to_device(x)

    new = tree.map(lambda x: x, tree.replace(state, opt=tree.map(move, state.opt)))
    if mover is not None:
        mover.finish()
    tree.donate(state)
    return new


# ---------- what moves by itself


class Placing:
    """Moves the models of one strategy to where a call needs them; does nothing without offload_models."""

    def __init__(self, config: StrategyConfig):
        self.on = config.offload_models
        self.moves_opt = not config.adam_offload
        self.trained: list[weakref.ref[Residence]] = []  # of models that someone still has

    def rest(self, residence: Residence) -> None:
        """Leave a model that only scores on the host."""
        if self.on:
            residence.move("host")

    def begin(self, residence: Residence, state: TrainState) -> None:
        """Know a model that is trained, and its first state."""
        residence.trained = True
        if self.on:
            self.trained.append(weakref.ref(residence))
            self.follow(state)

    def follow(self, state: TrainState) -> None:
        """Know the newest state of a model: the tensors of its optimizer move from now on."""
        if not self.on or not self.moves_opt or state.residence is None:
            return
        weights = {id(x) for x in state.params.values()}  # they move anyway
        found = {id(x): x for x in tree.leaves(state.opt) if isinstance(x, Tensor) and id(x) not in weights}
        state.residence.opt = list(found.values())

    def bring(self, residence: Residence | None, *, opt: bool = False) -> None:
        """Move weights to the device, with `opt` their optimizer too."""
        if not self.on or residence is None:
            return
        residence.move("device")
        if opt:
            residence.move_opt("device")

    @contextmanager
    def brought(self, residence: Residence | None) -> Iterator[None]:
        """Have weights on the device in the block; a model that only scores is then where it was before."""
        if not self.on or residence is None:
            yield
            return
        leaves = residence.on_host and not residence.trained
        try:
            self.bring(residence)
            yield
        finally:
            if leaves:
                residence.move("host")

    def move_opt(self, state: TrainState, where: Where) -> None:
        """Move the optimizer of a state."""
        if self.on and state.residence is not None:
            state.residence.move_opt(where)

    def make_room(self) -> None:
        """Move all trained models with their optimizers to the host."""
        known = [(ref, ref()) for ref in self.trained]
        self.trained = [ref for ref, residence in known if residence is not None]
        for _, residence in known:
            if residence is not None:
                residence.move_opt("host")
                residence.move("host")
