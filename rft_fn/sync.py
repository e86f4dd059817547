"""Weight sync: the trained weights, full tensors one after the other, from a strategy to an engine.

`push` works for every strategy and every engine. The engine checks each tensor against its own model as it
arrives (rft_fn.engine.arrival); `push` checks that the engine took all that was sent.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

from rft_fn.types import Engine, Strategy, TrainState
from rft_fn.types.engine import Delivered

__all__ = ["push"]


class Shipment(Iterator[tuple[str, Tensor]]):
    """Weights on their way, counted as they are read: one full tensor in memory at a time."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]):
        self.weights = iter(weights)
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))  # names that are not sent
        self.names: set[str] = set()
        self.bytes = 0

    def __next__(self) -> tuple[str, Tensor]:
        name, x = next(self.weights)
        if name in self.names:
            raise ValueError(f"weights: {name}: expected each name once, got it twice")
        self.names.add(name)
        self.bytes += x.numel() * x.element_size()
        return name, x


def push(strategy: Strategy, state: TrainState, engine: Engine, *, version: int) -> Delivered:
    """Load the trained weights of `state` into `engine`; its rollouts carry `version` from then on.

    Every rank has to call it, because sharded tensors are put together by all ranks. Returns the engine's
    record of what it took. ValueError for weights that the engine's model does not have, or has in other
    shapes, for one that has not arrived and is not frozen, and for an engine that took less than was sent.
    """
    shipment = Shipment(strategy.export(state))
    delivered = engine.load(shipment, version=version)

    # an engine of another process may drop what it does not know, and answer that all is well
    sent = len(shipment.names)
    if delivered.tensors != sent or delivered.bytes != shipment.bytes:
        raise ValueError(
            f"sync: expected the engine to take {sent} tensors ({shipment.bytes} bytes), got "
            f"{delivered.tensors} ({delivered.bytes} bytes)"
        )
    if delivered.version != version:
        raise ValueError(f"sync: expected the engine to be at version {version}, got {delivered.version}")
    return delivered
