"""Sending the trained weights to an engine, checked on the way."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rft_fn.sync.manifest import Expected, ManifestError, check_tensor, manifest_of, missing
from rft_fn.types import Engine, Strategy, TrainState
from rft_fn.types.engine import Delivered

__all__ = ["Shipment", "push"]


class Shipment(Iterator[tuple[str, Tensor]]):
    """Weights on their way, checked and counted as they are read: one full tensor in memory at a time.

    Each is compared with `manifest` before it is handed on, and what the manifest has must have come before
    the shipment ends. `dtype` is the type that floating tensors are sent in, where it is given; with `tied` a
    tied weight is sent under each of its names.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        manifest: Mapping[str, Expected] | None = None,
        *,
        dtype: torch.dtype | None = None,
        tied: bool = False,
    ):
        self.weights = iter(weights)
        self.manifest = manifest or {}
        self.dtype = dtype
        self.tied = tied
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))  # names that are not sent
        self.names: set[str] = set()
        self.bytes = 0
        self._waiting: deque[tuple[str, Tensor]] = deque()  # further names of a tied weight

    def __next__(self) -> tuple[str, Tensor]:
        if not self._waiting:
            self._waiting.extend(self._read())
        name, x = self._waiting.popleft()
        self.names.add(name)
        self.bytes += x.numel() * x.element_size()
        return name, x

    def _read(self) -> list[tuple[str, Tensor]]:
        """The next tensor, by one name or by all."""
        try:
            name, x = next(self.weights)
        except StopIteration:
            self._check_complete()
            raise
        except ValueError as error:  # an export refuses NaN and inf itself
            raise ManifestError(str(error)) from error
        if name in self.names:
            raise ManifestError(f"weights: {name}: expected each name once, got it twice")
        check_tensor(self.manifest, name, x)
        if self.dtype is not None and x.is_floating_point():
            x = x.to(self.dtype)

        # a name that comes by itself as well is not an alias
        names = [name]
        if self.tied and name in self.manifest:
            names += [other for other in self.manifest[name].names if other not in {name, *self.names}]
        return [(each, x) for each in names]

    def _check_complete(self) -> None:
        """ManifestError for a weight that has not been sent: the engine must not finish its load."""
        left_out = missing(self.manifest, self.names, self.frozen)
        if left_out:
            raise ManifestError(
                f"weights: {left_out[0]}: expected it among the weights that are sent, got {len(self.names)} "
                f"without it ({len(left_out)} missing in all)"
            )

    def drain(self) -> None:
        """Read the rest unseen: other ranks put sharded tensors together only if this one takes part."""
        for _ in self.weights:
            pass


def push(strategy: Strategy, state: TrainState, engine: Engine, *, version: int) -> Delivered:
    """Load the trained weights of `state` into `engine`; its rollouts carry `version` from then on.

    Every rank has to call it, because sharded tensors are put together by all ranks. The engine's status may
    ask for a `dtype` and for `tied` names. Returns the engine's record of what it took. ManifestError, which
    names the tensor, for weights that are not the module's own. ValueError for weights that the engine's
    model does not have, and for an engine that took less than was sent.
    """
    status = engine.status()
    wishes = {"dtype": status.get("dtype"), "tied": status.get("tied", False)}
    shipment = Shipment(strategy.export(state), manifest_of(state), **wishes)
    try:
        delivered = engine.load(shipment, version=version)
    except BaseException:
        if strategy.world > 1:
            shipment.drain()
        raise

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
