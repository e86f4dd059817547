"""Updates added to parameters."""

from collections.abc import Mapping
from typing import Any

import torch

from rft_fn import tree
from rft_fn.optim.shards import local_parts

__all__ = ["apply_updates", "by_name"]


def by_name(params: Any, found: Any, what: str) -> Any:
    """Return `found`, a mapping of any type and order, as `params` is.

    The leaves of two trees belong together by their order, and a dict has another than a `Named`. ValueError
    unless it has the names of `params`; `what` names it. Parameters that are no mapping take it as it is.
    """
    if not isinstance(params, (tree.Named, dict)):
        return found
    if isinstance(found, tree.Named) and isinstance(params, tree.Named) and list(found) == list(params):
        return found
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{what}: expected a mapping of the parameters' names to tensors, got {type(found).__name__}"
        )
    if found.keys() != params.keys():
        odd = sorted(found.keys() ^ params.keys())
        where = "without it" if odd[0] in params else "with it"
        raise ValueError(
            f"{what}: expected the names of the {len(params)} parameters, got {len(found)} {where}: {odd[0]}"
        )
    kind = tree.Named if isinstance(params, tree.Named) else dict
    return kind((name, found[name]) for name in params)


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
