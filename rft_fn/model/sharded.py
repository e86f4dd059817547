"""Whole tensors and local parts of tensors that may be sharded (DTensors)."""

from typing import Any

from torch import Tensor

__all__ = ["full", "local", "put"]


def full(x: Tensor) -> Tensor:
    """A tensor put together, which takes all ranks where it is sharded."""
    together = getattr(x, "full_tensor", None)
    if together is None:
        return x
    return together()


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    part = getattr(x, "to_local", None)
    if part is None:
        return x
    return part()


def put(p: Any, whole: Any) -> None:
    """Copy a whole tensor into `p`, or a part where `p` is sharded.

    `whole` may be the slice of a tensor in a file, which is read only as far as needed.
    """
    if not hasattr(p, "device_mesh"):
        p.copy_(whole[...])
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    index = tuple(slice(start, start + n) for start, n in zip(offset, shape))
    part = local(p)
    if part.numel():
        part.copy_(whole[index])
