"""A head whose vocabulary is sharded over ranks: what the shards of one row say of each other.

Every rank holds all tokens and its own rows of w. What crosses ranks is [T] numbers in the forward and
dh [T, D] in the backward, never logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """Which rows of the head this rank holds, and with whom it shares the rest."""

    start: int  # the vocabulary's number of the first local row
    size: int  # local rows
    total: int  # V of the whole head
    group: Any  # the process group of all shards

    def sum(self, x: Tensor) -> Tensor:
        """x, summed over the shards, in place."""
        torch.distributed.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """x, its largest over the shards, in place."""
        torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return x

    def local(self, y: Tensor) -> Tensor:
        """Labels y [T] as rows of this shard; -1 for a row of another one, -2 for one of none: never a column
        that a tile could have."""
        here = y - self.start
        elsewhere = torch.where((y >= 0) & (y < self.total), -1, -2)
        return torch.where((here >= 0) & (here < self.size), here, elsewhere)


def split(w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Shard | None]:
    """(local w, local bias, Shard) of a head that is a DTensor sharded over V; None for a plain one.

    Gradients flow back into the DTensors. ValueError for a placement that is not Shard(0) on one mesh axis.
    """
    kind = _dtensor()
    if kind is None or not isinstance(w, kind):
        return w, bias, None
    mesh, placement = w.device_mesh, w.placements[0]
    if mesh.ndim != 1 or not placement.is_shard(0):
        raise ValueError(
            f"w: expected a DTensor with Shard(0) on one mesh axis, got {w.placements} on {mesh.ndim} axes"
        )
    if bias is not None and (not isinstance(bias, kind) or bias.placements != w.placements):
        raise ValueError("bias: expected a DTensor sharded like w, got another placement or a plain tensor")
    each = -(-w.shape[0] // mesh.size())  # torch.chunk's rule: the last shards may be smaller, or empty
    start = min(mesh.get_local_rank() * each, w.shape[0])
    local = w.to_local()
    shard = Shard(start, local.shape[0], w.shape[0], mesh.get_group())
    return local, None if bias is None else bias.to_local(), shard


def _dtensor() -> type | None:
    if not torch.distributed.is_available():
        return None
    from torch.distributed.tensor import DTensor

    return DTensor
