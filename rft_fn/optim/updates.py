"""Updates added to parameters, by their names; of sharded tensors in the memory that this process has."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree

__all__ = ["apply_updates", "by_name", "local_parts"]


def local_parts(tensors: Any) -> list[Tensor]:
    """Return the leaves of a tree: plain tensors, and of sharded ones the shard of this process.

    A shard shares the memory of its tensor, so what is done to it in place is done to the tensor. Operations
    on single elements need no more, and a sharded tensor would work out anew, for every list of shapes, how
    the result is sharded. For use without gradients.
    """
    return [_local_part(x) for x in tree.leaves(tensors)]


def _local_part(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x.detach()


def by_name(params: Any, given: Any, what: str) -> Any:
    """Return `given`, a mapping of any type and order, with the type and order of `params`.

    The leaves of two trees belong together by their order, and a dict has another than a `Named`. ValueError
    unless it has the names of `params`; `what` names it. Unchanged for parameters that are no mapping.
    """
    if not isinstance(params, (tree.Named, dict)):
        return given
    if isinstance(given, tree.Named) and isinstance(params, tree.Named) and list(given) == list(params):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{what}: expected a mapping of the parameters' names to tensors, got {type(given).__name__}"
        )
    if given.keys() != params.keys():
        odd = sorted(given.keys() ^ params.keys())
        where = "without it" if odd[0] in params else "with it"
        raise ValueError(
            f"{what}: expected the names of the {len(params)} parameters, got {len(given)} {where}: {odd[0]}"
        )
    kind = tree.Named if isinstance(params, tree.Named) else dict
    return kind((name, given[name]) for name in params)


@torch.no_grad()
def apply_updates(params: Any, updates: Any) -> Any:
    """Add updates to parameters in place, by their names, and return the parameters."""
    updates = by_name(params, updates, "updates")
    ps, us = local_parts(params), local_parts(updates)
    if any(p.dtype != u.dtype for p, u in zip(ps, us)):
        # added in the wider type and rounded once
        for p, u in zip(ps, us):
            p.copy_(p.to(u.dtype) + u)
    elif ps:
        torch._foreach_add_(ps, us)
    return params
