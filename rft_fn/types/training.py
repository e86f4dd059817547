"""The state of training, and the gradient transformations that update it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rft_fn import tree

__all__ = ["TrainState", "Transform", "TransformInit", "TransformUpdate"]


class TransformInit(Protocol):
    """Makes the state of a transform."""

    def __call__(self, params: Any, /) -> Any:
        """Return the state before the first update.

        It is a tree of tensors on the devices of `params`.
        """
        ...


class TransformUpdate(Protocol):
    """One step of a transform."""

    def __call__(self, grads: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        """Return (updates, state one step on).

        The updates are to be added to `params`: a mapping of any type with the same names. `grads` and
        `state` are donated: both may be changed in place. `params` are only read.
        """
        ...


class Transform(NamedTuple):
    """A gradient transformation as a value.

    It is a pair of functions and a description, as in optax.
    """

    init: TransformInit
    update: TransformUpdate
    spec: Mapping[str, Any]  # plain data, for backends that bring their optimizer along


@tree.struct
class TrainState:
    """Everything that an update needs and changes. Donated to `Strategy.update`."""

    params: Any  # tree.Named of tensors
    opt: Any  # what tx.init made of them
    step: int  # updates done
    skipped: int = 0  # latest updates in a row without finite gradients
    tx: Transform = tree.static()
    module: Any = tree.static(default=None)  # the owner of the params: an export reads its frozen weights
    residence: Any = tree.static(default=None)  # a model.residence.Residence; None: always on the device
