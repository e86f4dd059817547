"""Weights copied into a bound model: a new reference, an average, another model's parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["assign", "full", "local", "put"]


# ---------- whole tensors and local parts of tensors that may be sharded (DTensors)


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


# ---------- weights copied into a bound model: a new reference, an average, another model's parameters


@torch.no_grad()
def assign(params: Mapping[str, Tensor], source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Copy `source` into the tensors of `params`, by name and in place.

    Tensors that `source` does not have keep their values. `params` are those of `bind` or of a state, sharded
    by FSDP2 or by ZeRO or whole; `source` is another model's params, sharded or not, a dict, or what
    `Strategy.export` gives. All ranks call it alike. Moments and masters in an optimizer's state do not
    follow. ValueError for a name or a shape that `params` does not have, for a source without a tensor, and
    for weights that a ZeRO optimizer holds. After an error from a mapping nothing has changed; after one from
    an iterable, only the tensors before it.
    """
    pairs: Any = source
    if isinstance(source, Mapping):
        named: Any = source
        for name, x in named.items():
            _check(params, name, x)
        pairs = named.items()
    count = 0
    for name, x in pairs:
        _check(params, name, x)
        _assign_one(params[name], x.detach())
        count += 1
    if not count:
        raise ValueError("source: expected a tensor or more, got none (an export is read only once)")


def _check(params: Mapping[str, Tensor], name: str, x: Tensor) -> None:
    if name not in params:
        raise ValueError(f"source: expected names among {list(params)[:2]} ..., got {name}")
    p = params[name]
    want = list(getattr(p, "ds_shape", p.shape))
    if list(getattr(x, "ds_shape", x.shape)) != want:
        raise ValueError(f"source: {name}: expected {want}, got {list(x.shape)}")
    if hasattr(p, "_hp_mapping") or hasattr(p, "_z3_optimizer"):
        raise ValueError(
            f"params: {name}: expected a model without an optimizer under ZeRO, whose engine holds the "
            "weights that count; st.restore gives it others"
        )


def _assign_one(p: Tensor, x: Tensor) -> None:
    x = full(x)
    if hasattr(p, "ds_id"):
        from deepspeed import zero

        with zero.GatheredParameters([p], modifier_rank=0):
            p.data.copy_(x)
    else:
        put(p, x)
