"""Copies between the host and a device: a pack in one piece."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from rft_fn import tree

__all__ = ["in_one_copy", "locked", "to_device"]

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
