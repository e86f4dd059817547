"""Transforms: clipping, chains, averages and master weights, and what they share."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.optim.in_place import InPlace, in_order, step_of
from rft_fn.optim.updates import apply_updates, by_name, local_parts
from rft_fn.precision import widen
from rft_fn.types import Transform

__all__ = [
    "EmaState", "MasterState", "PartitionState", "chain", "clip_by_global_norm", "count", "ema",
    "ema_params", "global_norm", "master_weights", "partition", "parts",
]  # fmt: skip


# ---------- copies of the parameters that an optimizer state holds: averages, and float32 masters


@tree.struct
class EmaState:
    """The exponential moving average of the parameters."""

    average: Any  # like params


@tree.struct
class MasterState:
    """Wide copies of parameters, and the wrapped state."""

    master: Any  # float32 copies of the parameters
    inner: Any  # the state of the wrapped transform


def ema(decay: float) -> Transform:
    """Keep an exponential moving average of the parameters.

    It must be the last transform in a chain, to see the final updates:

        average = decay average + (1 - decay) (params + updates)

    Updates pass through unchanged. The average is a leaf of the optimizer state, so it is saved, sharded
    and resumed with it; `ema_params` finds it. ValueError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay: expected 0 <= decay < 1, got {decay}")

    @torch.no_grad()
    def update(updates: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        # params + updates are the parameters after this update, added in two parts to need no copy
        average = local_parts(state.average)
        torch._foreach_mul_(average, decay)
        torch._foreach_add_(average, local_parts(params), alpha=1 - decay)
        torch._foreach_add_(average, local_parts(updates), alpha=1 - decay)
        return updates, state

    def follow(state: EmaState, params: Any) -> None:
        average, values = local_parts(state.average), local_parts(params)
        torch._foreach_mul_(average, decay)
        torch._foreach_add_(average, values, alpha=1 - decay)

    def start(p: Tensor) -> Tensor:
        # float32 at least: in bf16 (1 - decay) of a parameter is below the spacing of numbers
        return widen(p.detach().clone())

    def init(params: Any) -> EmaState:
        return EmaState(average=tree.map(start, params))

    update.in_place = InPlace(follow=follow)  # type: ignore[attr-defined]
    return Transform(init, update, {"name": "ema", "decay": decay})


def master_weights(tx: Transform) -> Transform:
    """Run a transform on float32 copies of parameters.

    The parameters are bf16 or fp16, and the copies are kept in the optimizer state. The updates are the
    difference between the rounded copy and the parameter, so steps that are too small for bf16 add up in
    the copy instead of being lost.
    """

    def init(params: Any) -> MasterState:
        master = tree.map(lambda p: p.detach().float().clone(), params)
        return MasterState(master=master, inner=tx.init(master))

    @torch.no_grad()
    def update(grads: Any, state: MasterState, params: Any) -> tuple[Any, MasterState]:
        wide, inner = tx.update(tree.map(lambda g: g.float(), grads), state.inner, state.master)
        wide = by_name(state.master, wide, "updates")
        apply_updates(state.master, wide)

        # the wide updates are used up, so their memory takes the differences to the narrow parameters
        narrow = tree.map(lambda u, m, p: u.copy_(m.to(p.dtype)).sub_(p), wide, state.master, params)
        return narrow, tree.replace(state, inner=inner)

    def step(grads: Any, state: MasterState, params: Any, norm: Tensor, scale: Tensor | None) -> MasterState:
        grads = tree.map(lambda g: g.float(), grads)
        inner = step_of(tx)(grads, state.inner, state.master, norm, scale)
        torch._foreach_copy_(local_parts(params), local_parts(state.master))
        return tree.replace(state, inner=inner)

    update.in_place = InPlace(step=step)  # type: ignore[attr-defined]
    return Transform(init, update, {"name": "master_weights", "tx": tx.spec})


# ---------- transforms made of others: one after the other, or each on its own parameters


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
    """Step each parameter by one of several transforms: the one that `label(name, parameter)` names.

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


# ---------- what is inside an optimizer state, however its transforms are combined


def parts(opt: Any) -> tuple:
    """Return the states inside an optimizer state: of a chain, below master weights, or none."""
    if isinstance(opt, tuple):
        return opt
    if isinstance(opt, PartitionState):
        return tuple(opt.inner.values())
    if isinstance(opt, MasterState):
        return (opt.inner,)
    return ()


def _states(opt: Any) -> Iterator[Any]:
    """Yield an optimizer state and all states inside it, from the outermost."""
    yield opt
    for part in parts(opt):
        yield from _states(part)


def ema_params(opt: Any) -> Any:
    """Return the average of `ema` in an optimizer state; ValueError if there is none."""
    for state in _states(opt):
        if isinstance(state, EmaState):
            return state.average
    raise ValueError("opt: expected a state with optim.ema in its chain, found none")


def count(opt: Any) -> int:
    """Return the number of updates that `adamw`, `sgd` or `lion` has made, from an optimizer state.

    Its next learning rate is schedule(count). Unlike `TrainState.step` it leaves out updates that were
    skipped. ValueError if there is none of them.
    """
    for state in _states(opt):
        # tuples have a method of that name; the optimizer of a backend has the number
        if hasattr(state, "count") and not isinstance(state, tuple):
            return int(state.count)
    raise ValueError("opt: expected a state with optim.adamw in its chain, found none")


# ---------- gradients before an update: their norm, and a limit to it


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
