"""The state of training, and the transformation of gradients that moves it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rft_fn import tree

__all__ = ["TrainState", "Transform", "TransformInit", "TransformUpdate"]


class TransformInit(Protocol):
    """Makes the state of a transform."""

    def __call__(self, params: Any, /) -> Any:
        """The state before the first update, a tree of tensors on the devices of `params`."""
        ...


class TransformUpdate(Protocol):
    """One step of a transform."""

    def __call__(self, grads: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        """(updates, state): what to add to `params`, by the same names, and the state one step on.

        `grads` and `state` are donated: both may be changed in place. `params` are only read.
        """
        ...


class Transform(NamedTuple):
    """A transformation of gradients as a value: a pair of functions and a description (as in optax)."""

    init: TransformInit
    update: TransformUpdate
    spec: Mapping[str, Any]  # plain data: what a backend with an optimizer of its own lowers


@tree.struct
class TrainState:
    """Everything that an update needs and changes. Donated to `Strategy.update`."""

    params: Any  # tree.Named of tensors
    opt: Any  # what tx.init made of them
    step: int  # updates done
    skipped: int = 0  # updates in a row, up to now, whose gradients were not finite
    tx: Transform = tree.static()
    module: Any = tree.static(default=None)  # that the params are of: an export reads what it does not train
