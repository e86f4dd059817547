"""Inputs of blocks that wait in memory of the host from their forward to their backward."""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Moved", "OnHost"]


class Moved:
    """An input of a block in pinned memory of the host, copied beside the computation in both directions.

    When the backward takes one, the one of the block before it is on its way.
    """

    def __init__(self, x: Tensor, before: "Moved | None"):
        self.device = x.device
        self.before: Any = _nothing if before is None else weakref.ref(before)
        self.here: Tensor | None = None  # on its way back, or there
        self.send(x)

    def send(self, x: Tensor) -> None:
        """Start the copy to the host."""
        stream = _stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host = torch.empty_like(x, device="cpu", pin_memory=True)
            self.host.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is free when the copy is done

    def fetch(self) -> Tensor:
        """Return a copy on the device, which may still be on its way."""
        with torch.cuda.stream(_stream(self.device)):
            return self.host.to(self.device, non_blocking=True)

    def wait(self, x: Tensor) -> None:
        """Have the computation wait for the copies that have been started."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(_stream(self.device))
        x.record_stream(stream)

    def back(self) -> Tensor:
        """Return the input on its device, and start the copy of the one before it."""
        x = self.fetch() if self.here is None else self.here
        self.here = None
        self.wait(x)
        before = self.before()
        if before is not None and before.here is None:
            before.here = before.fetch()
        return x


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class OnHost:
    """A checkpointing function that keeps its inputs on the host between forward and backward.

    On a CPU they stay where they are.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.moved: Any = None  # in place of `Moved`, on a device without values
        self.last: Any = _nothing

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        with saved_tensors_hooks(self.pack, self.unpack):
            return self.function(forward, *args)

    def pack(self, x: Tensor) -> Any:
        """Move an input of a block."""
        kind = self.moved or (Moved if x.is_cuda else None)
        if kind is None or not x.is_floating_point() or not x.numel():  # torch 2.11 keeps an empty one too
            return x
        moved = kind(x, self.last())
        self.last = weakref.ref(moved)
        return moved

    def unpack(self, kept: Any) -> Tensor:
        """Return an input of a block on its device."""
        return kept.back() if isinstance(kept, Moved) else kept


def _nothing() -> None:
    return None
