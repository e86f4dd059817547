"""Weights copied into a bound model: a new reference, an average, another model."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rft_fn.model.sharded import full, mix, put

__all__ = ["assign"]


@torch.no_grad()
def assign(
    params: Mapping[str, Tensor],
    source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    share: float = 1.0,
) -> None:
    """Copy `source` into the tensors of `params`, by name and in place.

    With a `share` in (0, 1] they go only that part of the way: params + share (source - params), in their
    own type. Tensors that `source` does not have keep their values. `params` are those of `bind` or of a
    state, sharded by FSDP2 or by ZeRO or whole; `source` is another model's params, sharded or not, a dict,
    or what `Strategy.export` gives. All ranks call it alike. Moments and masters in an optimizer's state do
    not follow. ValueError for a name or a shape that `params` does not have, for a source without a
    tensor, for another share, and for weights that a ZeRO optimizer holds. After an error from a mapping
    nothing has changed; after one from an iterable, only the tensors before it.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share: expected 0 < share <= 1, got {share}")
    pairs: Any = source
    if isinstance(source, Mapping):
        named: Any = source
        for name, x in named.items():
            _check(params, name, x)
        pairs = named.items()
    count = 0
    for name, x in pairs:
        _check(params, name, x)
        p, x = params[name], full(x.detach())
        if hasattr(p, "ds_id"):
            from deepspeed import zero

            with zero.GatheredParameters([p], modifier_rank=0):
                mix(p.data, x, share)
        else:
            put(p, x, share)
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
