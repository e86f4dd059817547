"""Whole tensors and local parts of tensors that may be sharded (DTensors)."""

from typing import Any

from torch import Tensor

__all__ = ["full", "local", "mix", "put"]


def full(x: Tensor) -> Tensor:
    """Put a tensor together, which takes all ranks if it is sharded."""
    together = getattr(x, "full_tensor", None)
    return x if together is None else together()


def local(x: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    part = getattr(x, "to_local", None)
    return x if part is None else part()


def put(p: Any, whole: Any, share: float = 1.0) -> None:
    """Copy a whole tensor, or the slice of one in a file, into `p`; only a part if `p` is sharded.

    With a share below 1, p + share (whole - p).
    """
    if not hasattr(p, "device_mesh"):
        mix(p, whole[...], share)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    index = tuple(slice(start, start + n) for start, n in zip(offset, shape))
    part = local(p)
    if part.numel():
        mix(part, whole[index], share)


def mix(p: Tensor, x: Any, share: float) -> None:
    """Move `p` in place by a share of the way to x."""
    if share == 1:
        p.copy_(x)
    else:
        p.lerp_(x.to(p), share)
