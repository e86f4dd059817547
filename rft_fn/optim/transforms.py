"""Transforms made of others: one after the other, or each on its own parameters."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rft_fn import tree
from rft_fn.optim.in_place import in_order
from rft_fn.optim.updates import by_name
from rft_fn.types import Transform

__all__ = ["PartitionState", "chain", "partition"]


def chain(*txs: Transform) -> Transform:
    """Apply transforms one after the other; the state is the tuple of their states."""

    def update(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple]:
        out = []
        for tx, s in zip(txs, state):
            updates, s = tx.update(grads, s, params)
            grads = by_name(params, updates, "updates")
            out.append(s)
        return grads, tuple(out)

    def init(params: Any) -> tuple:
        return tuple(tx.init(params) for tx in txs)

    update.in_place = in_order(txs)  # type: ignore[attr-defined]
    return Transform(init, update, {"name": "chain", "txs": tuple(tx.spec for tx in txs)})


@tree.struct
class PartitionState:
    """The state of `partition`: that of each transform, by its label."""

    inner: dict[str, Any]


def partition(label: Callable[[str, Tensor], str], **txs: Transform) -> Transform:
    """Step each parameter by the transform that `label(name, parameter)` names.

    Parameters are a mapping of names, as everywhere here. A transform sees only its own: a clip inside of
    one clips by their norm. ValueError at init for a label that is none of the transforms', and for a
    transform that gets no parameter.
    """

    def names_of(params: Any) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {name: [] for name in txs}
        for name, p in params.items():
            chosen = label(name, p)
            if chosen not in txs:
                raise ValueError(f"label: expected one of {', '.join(txs)} for {name}, got {chosen!r}")
            out[chosen].append(name)
        return out

    def select(named: Any, names: list[str]) -> tree.Named:
        return tree.Named((name, named[name]) for name in names)

    def init(params: Any) -> PartitionState:
        inner = {}
        for chosen, names in names_of(params).items():
            if not names:
                raise ValueError(f"{chosen}: expected parameters with this label, got none")
            inner[chosen] = txs[chosen].init(select(params, names))
        return PartitionState(inner=inner)

    def update(grads: Any, state: PartitionState, params: Any) -> tuple[Any, PartitionState]:
        updates, inner = tree.Named(), {}
        for chosen, names in names_of(params).items():
            own = select(params, names)
            part, inner[chosen] = txs[chosen].update(select(grads, names), state.inner[chosen], own)
            updates.update(by_name(own, part, "updates"))
        in_order = tree.Named((name, updates[name]) for name in params)
        return in_order, PartitionState(inner=inner)

    return Transform(init, update, {"name": "partition", "txs": {name: tx.spec for name, tx in txs.items()}})
