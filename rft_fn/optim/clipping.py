"""The global norm of gradients, and a limit to it."""

from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.optim.in_place import InPlace
from rft_fn.optim.updates import local_parts
from rft_fn.types import Transform

__all__ = ["clip_by_global_norm", "global_norm"]


def global_norm(grads: Any) -> Tensor:
    """Return the global norm [] of gradients.

    This is the 2-norm of all of them together, 0 if there are none; a plain tensor, also for sharded
    gradients.
    """
    leaves = tree.leaves(grads)
    if not leaves:
        return torch.zeros(())
    by_groups: dict[tuple[Any, ...], list[Any]] = {}
    for x in leaves:
        by_groups.setdefault(_sharded_over(x), []).append(x)
    norms = [_norm_of(some, groups) for groups, some in by_groups.items()]
    return torch.linalg.vector_norm(torch.stack(norms))


def _sharded_over(x: Any) -> tuple[Any, ...]:
    """Return the process groups that have a tensor in shards; () for a plain one."""
    if not hasattr(x, "device_mesh"):
        return ()
    return tuple(x.device_mesh.get_group(i) for i, place in enumerate(x.placements) if place.is_shard())


def _norm_of(tensors: list[Any], groups: tuple[Any, ...]) -> Tensor:
    """Return the 2-norm [] of tensors that the same groups share."""
    norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(local_parts(tensors)))))
    for group in groups:
        square = norm.square()
        torch.distributed.all_reduce(square, group=group)
        norm = square.sqrt()
    return norm


def clip_by_global_norm(max_norm: float) -> Transform:
    """Clip gradients by their global norm.

    Scales all of them by min(1, max_norm / norm). ValueError unless max_norm > 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected > 0, got {max_norm}")

    def factor(norm: Tensor) -> Tensor:
        return (max_norm / norm.clamp(min=1e-30)).clamp(max=1.0)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        torch._foreach_mul_(local_parts(grads), factor(global_norm(grads)))
        return grads, state

    update.in_place = InPlace(scale=factor)  # type: ignore[attr-defined]
    return Transform(lambda params: (), update, {"name": "clip_by_global_norm", "max_norm": max_norm})
