"""Copies between the host and a device: a pack in one piece, weights through page-locked memory."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rft_fn import tree

__all__ = ["LockedCopies", "Mover", "in_one_copy", "locked", "mover_of", "to_device"]

T = TypeVar("T")


_ALIGNMENT = 16  # bytes: what a kernel that reads in vectors expects of a pointer


def locked(size: int) -> Tensor:
    """Return host memory [size] of bytes that a device copies to and from without the CPU.

    It is pageable where the system locks none: copies are slower then, and wait.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no driver, or a limit to such memory
        return torch.empty(size, dtype=torch.uint8)


def to_device(x: T, device: torch.device) -> T:
    """Return a tree of tensors on a device; to a GPU all tensors of the host go in one copy.

    Nobody waits for the copy. What is on the device already stays the same tensor.
    """
    if device.type != "cuda":
        return tree.map(lambda leaf: leaf.to(device), x)
    return in_one_copy(x, lambda buffer: buffer.to(device, non_blocking=True))


def in_one_copy(x: T, copy: Callable[[Tensor], Tensor]) -> T:
    """Return a tree with its tensors of the host as views of one buffer, after `copy` of that buffer."""
    host = [leaf for leaf in tree.leaves(x) if leaf.device.type == "cpu"]
    starts = [0]
    for leaf in host:
        starts.append(starts[-1] + -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT)
    if not starts[-1]:
        return x

    # torch gives the locked memory to nobody else before the copy is done
    buffer = locked(starts[-1])
    for start, leaf in zip(starts, host):
        _view(buffer, start, leaf).copy_(leaf)
    moved = copy(buffer)
    views = iter([_view(moved, start, leaf) for start, leaf in zip(starts, host)])
    return tree.map(lambda leaf: next(views) if leaf.device.type == "cpu" else leaf, x)


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes of a buffer from `start` on as a tensor with the shape and type of `like`."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


class Mover(NamedTuple):
    """The copies of a tensor between a device and the host, which are there after `finish`."""

    to_host: Callable[[Tensor], Tensor]
    to_device: Callable[[Tensor], Tensor]
    finish: Callable[[], None] = lambda: None


def mover_of(device: torch.device) -> Mover | None:
    """Return the copies between `device` and the host; None for a CPU, which has the host's memory."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        with suppress(RuntimeError):  # no stream without a driver
            copies = LockedCopies(device, torch.cuda.Stream(device))
            return Mover(copies.to_host, copies.to_device, copies.finish)
    return Mover(lambda x: x.to("cpu"), lambda x: x.to(device))


_FIRST, _LAST = 1 << 25, 1 << 30  # bytes of the pieces of host memory, each twice as large as the one before


class LockedCopies:
    """Copies between a GPU and locked memory, on a stream next to the one that computes.

    Tensors are copied one after the other while the host goes on. After `finish` what went to the host may be
    read, and the device computes with what came when that is there; the host waits only for the first. Memory
    is not used again before its copy is done: torch's allocators know the stream. Tensors of the host lie in
    pieces of powers of two, since torch rounds each piece up to one.
    """

    def __init__(self, device: torch.device, stream: Any):
        self.device = device
        self.stream = stream
        self.piece = torch.empty(0, dtype=torch.uint8)
        self.used = 0
        self.size = _FIRST
        self.leaving = False

    def to_host(self, x: Any) -> Tensor:
        """Start a copy into locked memory and return it; the tensor itself if it is there already."""
        if hasattr(x, "to_local"):
            return _like(x, self.to_host(x.to_local()))
        if x.device.type != self.device.type:
            return x
        if not _is_plain(x):
            return x.to("cpu")
        out = self._room(x)
        self._copy(out, x)
        x.record_stream(self.stream)
        self.leaving = True
        return out

    def to_device(self, x: Any) -> Tensor:
        """Start a copy to the device and return it; the tensor itself if it is there already."""
        if hasattr(x, "to_local"):
            return _like(x, self.to_device(x.to_local()))
        if x.device.type != "cpu":
            return x
        if not _is_plain(x):
            return x.to(self.device)
        out = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        self._copy(out, x)
        out.record_stream(self.stream)
        return out

    def finish(self) -> None:
        """Make the device wait for all copies, and the host for the copies to the host."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if self.leaving:
            self.stream.synchronize()
        self.leaving = False
        self.piece = torch.empty(0, dtype=torch.uint8)
        self.used, self.size = 0, _FIRST

    def _copy(self, out: Tensor, x: Tensor) -> None:
        """Begin a copy after all that the device was told to compute: it made x, or last used the memory."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(self.stream):
            out.copy_(x, non_blocking=True)

    def _room(self, x: Tensor) -> Tensor:
        """Return locked memory for a tensor, in the present piece or a new one."""
        size = -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size >= _LAST:
            return _view(locked(x.nbytes), 0, x)
        if self.used + size > len(self.piece):
            while self.size < size:
                self.size *= 2
            self.piece, self.used = locked(self.size), 0
            self.size = min(2 * self.size, _LAST)
        self.used += size
        return _view(self.piece, self.used - size, x)


def _is_plain(x: Tensor) -> bool:
    """Return whether a tensor is its numbers in order, and nothing else, as one in low precision is not."""
    return type(x) in (Tensor, nn.Parameter) and x.is_contiguous()


def _like(x: Any, local: Tensor) -> Tensor:
    """Return a sharded tensor with another shard, on whatever device."""
    return type(x)(local, x._spec, requires_grad=False)
