"""Where the weights of a bound model are, and their way between the device and the host."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Mover", "Residence", "Where"]

Where = Literal["device", "host"]


class Mover(NamedTuple):
    """The copies of a tensor between a device and the host."""

    to_host: Callable[[Tensor], Tensor]
    to_device: Callable[[Tensor], Tensor]


def mover_of(device: torch.device) -> Mover | None:
    """The copies between `device` and the host; None for a CPU, whose memory is the host's."""
    if device.type == "cpu":
        return None
    return Mover(partial(Tensor.to, device="cpu"), partial(Tensor.to, device=device))


class Residence:
    """Where the weights of one bound model are.

    What moves is every parameter and buffer of the module, trained or not. The parameters stay the same
    objects, so a tree of them stays valid: whoever reads one finds its values on either side.
    """

    def __init__(self, root: nn.Module, module: nn.Module):
        self.root = root  # the module behind the apply
        self.module = module  # that was bound
        self.name = _name(module)
        self.on_host = False
        self.mover: Mover | None = None  # chosen by the device of the weights when they first leave it

    def require_device(self, what: str) -> None:
        """ValueError while the weights are on the host; `what` is the argument that brought them."""
        if self.on_host:
            raise ValueError(
                f"{what}: expected the weights of {self.name} on the device, got them on the host; call "
                'st.place(apply, "device") first'
            )

    def move(self, where: Where) -> None:
        """Move the weights there; nothing happens where they are there already.

        A move that fails on its way leaves a model that counts as on the host: moving it to the device again
        completes it.
        """
        if where not in ("device", "host"):
            raise ValueError(f"where: expected 'device' or 'host', got {where!r}")
        if where == "host" and not self.on_host:
            self.mover = self.mover or mover_of(next(self.root.parameters()).device)
            self.on_host = True
            if self.mover is not None:
                self.apply(self.mover.to_host)
                _return_memory()
        if where == "device" and self.on_host:
            if self.mover is not None:
                self.apply(self.mover.to_device)
            self.on_host = False

    def apply(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Put `copy` of each parameter and buffer in its place."""
        # as Module.to does it: FSDP2 then registers the shards that it finds in the new memory
        self.root._apply(copy)


def _name(module: nn.Module) -> str:
    """The class of a module, and the folder or name that it was loaded from."""
    origin = getattr(getattr(module, "config", None), "name_or_path", "")
    return f"{type(module).__name__} {origin}".strip()


def _return_memory() -> None:
    """Give the memory that torch keeps for itself back to the device, for engines that take theirs there."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
