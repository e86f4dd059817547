"""Updates added to parameters."""

from typing import Any

import torch

from rft_fn.optim.shards import local_parts

__all__ = ["apply_updates"]


@torch.no_grad()
def apply_updates(params: Any, updates: Any) -> Any:
    """Add updates to parameters in place, and return the parameters."""
    ps, us = local_parts(params), local_parts(updates)
    if any(p.dtype != u.dtype for p, u in zip(ps, us)):
        # added in the wider type and rounded once
        for p, u in zip(ps, us):
            p.copy_(p.to(u.dtype) + u)
    elif ps:
        torch._foreach_add_(ps, us)
    return params
