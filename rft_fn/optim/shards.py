"""Sharded tensors, as the memory that this process has of them."""

from typing import Any

from torch import Tensor

from rft_fn import tree

__all__ = ["local_parts"]


def local_parts(tensors: Any) -> list[Tensor]:
    """The leaves of a tree: plain tensors as they are, of sharded ones the shard of this process.

    A shard shares the memory of its tensor, so what is done to it in place is done to the tensor. Operations
    on single elements need no more, and a sharded tensor would work out anew, for every list of shapes, how
    the result is sharded. For use without gradients.
    """
    return [_local_part(x) for x in tree.leaves(tensors)]


def _local_part(x: Any) -> Tensor:
    if hasattr(x, "to_local"):
        return x.to_local()
    return x.detach()
