"""A head with its vocabulary sharded over ranks, and what its shards exchange.

Every rank holds all tokens and its own rows of w. What crosses ranks is [T] numbers in the forward and
dh [T, D] in the backward, never logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """The rows of the head that this rank holds, and the ranks with the others."""

    start: int  # the vocabulary's number of the first local row
    size: int  # local rows
    total: int  # V of the whole head
    group: Any  # the process group of all shards

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over the shards, in place."""
        torch.distributed.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Take the largest x over the shards, in place."""
        torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return x


def local_labels(y: Tensor, shard: Shard | None) -> Tensor:
    """Return labels y [R] as rows of this rank's head.

    -1 for a row of another shard, -2 for a row of none: never a column that a tile could have.
    """
    if shard is None:
        return y
    here = y - shard.start
    elsewhere = torch.where((y >= 0) & (y < shard.total), -1, -2)
    return torch.where((here >= 0) & (here < shard.size), here, elsewhere)


def sum_over(shard: Shard | None, x: Tensor) -> Tensor:
    """Sum x over the shards in place, if there are any."""
    if shard is None:
        return x
    return shard.sum(x)


def split(w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Shard | None]:
    """Return (local w, local bias, Shard) of a head with w [V, D] that may be a DTensor.

    The Shard is None for a plain tensor.

    Gradients flow back into the DTensors. ValueError for a placement that is not Shard(0) on one mesh axis.
    """
    if not torch.distributed.is_available():
        return w, bias, None
    from torch.distributed.tensor import DTensor

    if not isinstance(w, DTensor):
        return w, bias, None
    mesh = w.device_mesh
    if mesh.ndim != 1 or not w.placements[0].is_shard(0):
        raise ValueError(
            f"w: expected a DTensor with Shard(0) on one mesh axis, got {w.placements} on {mesh.ndim} axes"
        )
    local_bias = None
    if bias is not None:
        if not isinstance(bias, DTensor) or bias.placements != w.placements:
            raise ValueError(
                "bias: expected a DTensor sharded like w, got another placement or a plain tensor"
            )
        local_bias = bias.to_local()

    # torch.chunk's rule: the last shards may be smaller, or empty.
    rows_each = -(-w.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * rows_each, w.shape[0])
    local_w = w.to_local()
    return local_w, local_bias, Shard(start, local_w.shape[0], w.shape[0], mesh.get_group())
