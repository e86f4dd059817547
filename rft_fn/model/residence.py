"""Where the weights of a bound model are, and their way between the device and the host."""

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rft_fn.model.copies import Mover, mover_of

__all__ = ["Residence", "Where"]


Where = Literal["device", "host"]


class Residence:
    """Where the weights of one bound model are, and the optimizer of one that is trained.

    Every parameter and buffer of the module moves, trained or not. The tensors stay the same objects, so a
    tree of them stays valid: whoever reads one gets its values on either side.
    """

    def __init__(self, root: nn.Module, module: nn.Module):
        self.root = root  # the module that the apply calls
        self.module = module  # that was bound
        origin = getattr(getattr(module, "config", None), "name_or_path", "")
        self.name = f"{type(module).__name__} {origin}".strip()
        self.on_host = False
        self.mover: Mover | None = None  # chosen by the device of the weights when anything first leaves it
        self.trained = False
        self.bound: weakref.ref[Any] | None = None  # the apply of a model that is trained
        self.opt: list[Tensor] = []  # the optimizer's tensors that move, of the newest state
        self.opt_on_host = False

    def require_device(self, what: str) -> None:
        """Raise ValueError while the weights are on the host; `what` is the argument with them."""
        if self.on_host:
            raise ValueError(
                f"{what}: expected the weights of {self.name} on the device, got them on the host; call "
                'st.place(apply, "device") first'
            )

    def move(self, where: Where) -> None:
        """Move the weights there; do nothing if they are there already.

        A move that fails on its way leaves a model that counts as on the host: moving it to the device
        again completes it.
        """
        if where not in ("device", "host"):
            raise ValueError(f"where: expected 'device' or 'host', got {where!r}")
        if where == "host" and not self.on_host:
            self._choose_mover()
            self.on_host = True
            if self.mover is not None:
                self._moved(self.apply, self.mover.to_host)
                _return_memory()
        if where == "device" and self.on_host:
            if self.mover is not None:
                self._moved(self.apply, self.mover.to_device)
            self.on_host = False

    def move_opt(self, where: Where) -> None:
        """Move the optimizer's tensors there; do nothing if they are there already."""
        if where == "host" and self.opt and not self.opt_on_host:
            self._choose_mover()
            self.opt_on_host = True
            if self.mover is not None:
                self._moved(self._apply_opt, self.mover.to_host)
                _return_memory()
        if where == "device" and self.opt_on_host:
            if self.mover is not None:
                self._moved(self._apply_opt, self.mover.to_device)
            self.opt_on_host = False

    def _choose_mover(self) -> None:
        self.mover = self.mover or mover_of(next(self.root.parameters()).device)

    def _moved(
        self, apply: Callable[[Callable[[Tensor], Tensor]], None], copy: Callable[..., Tensor]
    ) -> None:
        """Put copies in the places of tensors, and see that they are there, also where one fails."""
        assert self.mover is not None
        try:
            apply(copy)
        finally:
            self.mover.finish()

    def apply(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Put `copy` of each parameter and buffer in its place."""
        # as Module.to does it: FSDP2 then registers the shards that it finds in the new memory
        self.root._apply(copy)

    def _apply_opt(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Put `copy` of each tensor of the optimizer in its place."""
        for x in self.opt:
            moved = copy(x)
            if is_traceable_wrapper_subclass(x):  # a DTensor, as Module.to does it
                torch.utils.swap_tensors(x, moved)
            else:
                x.data = moved


def _return_memory() -> None:
    """Give back what is free on the device, for engines, which take their memory there."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
