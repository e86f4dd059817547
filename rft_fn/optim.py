"""Optimizers as values, in the manner of optax.

A `Transform` is `init`, `update` and `spec`. `update(grads, state, params) -> (updates, state)` returns
what is to be added to the parameters, so transforms compose with `chain`; `apply_updates` adds in place.
Gradients and states are donated: their memory may be reused. `spec` describes the transform as plain data,
for backends that bring their optimizer along.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from rft_fn import tree
from rft_fn.precision import widen
from rft_fn.types import Transform

__all__ = [
    "adamw", "apply_updates", "chain", "clip_by_global_norm", "constant", "count", "ema", "ema_params",
    "global_norm", "partition", "warmup_cosine", "warmup_linear",
]  # fmt: skip


class Schedule(Protocol):
    """A learning rate that depends on the step."""

    def __call__(self, step: int, /) -> float:
        """The learning rate after `step` updates."""
        ...


class Decays(Protocol):
    """Chooses the parameters that decay."""

    def __call__(self, name: str, p: Tensor, /) -> bool:
        """Whether the parameter of that name decays."""
        ...


@tree.struct
class AdamState:
    """The moments of the gradients."""

    count: int  # updates done
    m: Any  # first moment, like params
    v: Any  # second moment, like params


@tree.struct
class EmaState:
    """The exponential moving average of the parameters."""

    average: Any  # like params


@tree.struct
class MasterState:
    """Wide copies of parameters, and the wrapped state."""

    master: Any  # float32 copies of the parameters
    inner: Any  # the state of the wrapped transform


def constant(lr: float) -> Schedule:
    """The same learning rate at every step."""

    def schedule(step: int, /) -> float:
        return lr

    return schedule


def warmup_linear(lr: float, warmup: int, total: int, *, floor: float = 0.0) -> Schedule:
    """A linear warmup followed by a linear decay.

    From lr / warmup up to lr in `warmup` steps, then down to floor * lr at step `total`, where it stays.
    """

    def decay(x: float) -> float:
        return floor + (1 - floor) * (1 - x)

    return _warmup(lr, warmup, total, decay)


def warmup_cosine(lr: float, warmup: int, total: int, *, floor: float = 0.1) -> Schedule:
    """A linear warmup followed by a cosine decay.

    From lr / warmup up to lr in `warmup` steps, then by half a cosine down to floor * lr at step `total`,
    where it stays.
    """

    def decay(x: float) -> float:
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x))

    return _warmup(lr, warmup, total, decay)


def _warmup(lr: float, warmup: int, total: int, decay: Callable[[float], float]) -> Schedule:
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup: expected 0 <= warmup <= total = {total} steps, got {warmup}")

    def schedule(step: int, /) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        return lr * decay(min((step - warmup) / max(total - warmup, 1), 1.0))

    return schedule


def global_norm(grads: Any) -> Tensor:
    """The global norm [] of gradients.

    This is the 2-norm of all of them together, 0 if there are none; a plain tensor, also for sharded
    gradients.
    """
    leaves = tree.leaves(grads)
    if not leaves:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(leaves))))
    if hasattr(norm, "full_tensor"):  # sharded gradients: over all ranks
        return norm.full_tensor()
    return norm


def clip_by_global_norm(max_norm: float) -> Transform:
    """Clip gradients by their global norm.

    Scales all of them by min(1, max_norm / norm). ValueError unless max_norm > 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected > 0, got {max_norm}")

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        scale: Any = (max_norm / global_norm(grads).clamp(min=1e-30)).clamp(max=1.0)
        leaves = tree.leaves(grads)
        if any(hasattr(g, "full_tensor") for g in leaves):  # no mixing of sharded and plain tensors
            scale = float(scale)
        torch._foreach_mul_(leaves, scale)
        return grads, state

    return Transform(lambda params: (), update, {"name": "clip_by_global_norm", "max_norm": max_norm})


def _is_matrix(name: str, p: Tensor, /) -> bool:
    return p.dim() >= 2


def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Decays | None = None,
) -> Transform:
    """AdamW, by torch's functional update.

        -lr (m_hat / (sqrt(v_hat) + eps) + weight_decay p)

    arXiv 1711.05101. `mask(name, parameter)` chooses the parameters that decay, by default those of two
    dimensions or more, so neither norms nor biases. The moments have the parameters' type. Equals
    torch.optim.AdamW to rounding.
    """
    schedule = lr if callable(lr) else constant(lr)
    decays = mask or _is_matrix

    def init(params: Any) -> AdamState:
        return AdamState(count=0, m=tree.map(torch.zeros_like, params), v=tree.map(torch.zeros_like, params))

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        rate = float(schedule(state.count))

        # torch's update adds to the "parameters" that it gets: on zeros the sum is the step alone
        delta = tree.map(torch.zeros_like, params)
        torch_adamw(
            tree.leaves(delta),
            tree.leaves(grads),
            tree.leaves(state.m),
            tree.leaves(state.v),
            [],
            [torch.tensor(float(state.count)) for _ in tree.leaves(delta)],
            foreach=True,
            amsgrad=False,
            beta1=b1,
            beta2=b2,
            lr=rate,
            weight_decay=0.0,
            eps=eps,
            maximize=False,
        )

        # torch's decay would shrink the zeros, not the parameters
        if weight_decay:
            named = list(tree.leaves_with_path(params))
            pairs = [(d, p) for (name, p), d in zip(named, tree.leaves(delta)) if decays(name, p)]
            steps = [d for d, _ in pairs]
            torch._foreach_add_(steps, [p.detach() for _, p in pairs], alpha=-rate * weight_decay)
        return delta, tree.replace(state, count=state.count + 1)

    # for backends that have their own AdamW
    spec = {
        "name": "adamw",
        "lr": lr,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "weight_decay": weight_decay,
        "mask": mask,
    }
    return Transform(init, torch.no_grad()(update), spec)


def chain(*txs: Transform) -> Transform:
    """Apply transforms one after the other.

    The state is the tuple of their states.
    """

    def update(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple]:
        out = []
        for tx, s in zip(txs, state):
            grads, s = tx.update(grads, s, params)
            out.append(s)
        return grads, tuple(out)

    def init(params: Any) -> tuple:
        return tuple(tx.init(params) for tx in txs)

    return Transform(init, update, {"name": "chain", "txs": tuple(tx.spec for tx in txs)})


def ema(decay: float) -> Transform:
    """Keep an exponential moving average of the parameters.

    It has to be the last transform in a chain, to see the final updates:

        average = decay average + (1 - decay) (params + updates)

    Updates pass through unchanged. The average is a leaf of the optimizer state, so it is saved, sharded
    and resumed with it; `ema_params` finds it. ValueError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay: expected 0 <= decay < 1, got {decay}")

    @torch.no_grad()
    def update(updates: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        # params + updates are the parameters after this update, added in two parts to need no copy
        average = tree.leaves(state.average)
        torch._foreach_mul_(average, decay)
        torch._foreach_add_(average, [p.detach() for p in tree.leaves(params)], alpha=1 - decay)
        torch._foreach_add_(average, tree.leaves(updates), alpha=1 - decay)
        return updates, state

    def start(p: Tensor) -> Tensor:
        # float32 at least: in bf16 (1 - decay) of a parameter is below the spacing of numbers
        return widen(p.detach().clone())

    def init(params: Any) -> EmaState:
        return EmaState(average=tree.map(start, params))

    return Transform(init, update, {"name": "ema", "decay": decay})


@tree.struct
class PartitionState:
    """Of `partition`: the state of each transform, by its label."""

    inner: dict[str, Any]


def partition(label: Callable[[str, Tensor], str], **txs: Transform) -> Transform:
    """Each parameter by one of several transforms: the one that `label(name, parameter)` names.

    Parameters are a mapping of names, as everywhere here. A transform sees only its own: a clip inside of
    one clips by the norm of those. ValueError at init for a label that is none of the transforms', and for a
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
            mine, own = select(grads, names), select(params, names)
            found, inner[chosen] = txs[chosen].update(mine, state.inner[chosen], own)
            updates.update(found)
        in_order = tree.Named((name, updates[name]) for name in params)
        return in_order, PartitionState(inner=inner)

    return Transform(init, update, {"name": "partition", "txs": {name: tx.spec for name, tx in txs.items()}})


def parts(opt: Any) -> tuple:
    """The states inside an optimizer state.

    They are those of a chain, that below master weights, or none.
    """
    if isinstance(opt, tuple):
        return opt
    if isinstance(opt, PartitionState):
        return tuple(opt.inner.values())
    if isinstance(opt, MasterState):
        return (opt.inner,)
    return ()


def _states(opt: Any) -> Iterator[Any]:
    """An optimizer state and all states inside it, from the outermost."""
    yield opt
    for part in parts(opt):
        yield from _states(part)


def ema_params(opt: Any) -> Any:
    """The average of `ema` in an optimizer state.

    ValueError if there is none.
    """
    for state in _states(opt):
        if isinstance(state, EmaState):
            return state.average
    raise ValueError("opt: expected a state with optim.ema in its chain, found none")


def count(opt: Any) -> int:
    """The updates that `adamw` has made, from an optimizer state.

    Its next learning rate is schedule(count). Unlike `TrainState.step` it leaves out updates that were
    skipped. ValueError if there is no adamw.
    """
    for state in _states(opt):
        # tuples have a method of that name; the optimizer of a backend has the number
        if hasattr(state, "count") and not isinstance(state, tuple):
            return int(state.count)
    raise ValueError("opt: expected a state with optim.adamw in its chain, found none")


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
        apply_updates(state.master, wide)

        # the wide updates are used up, so their memory takes the differences to the narrow parameters
        narrow = tree.map(lambda u, m, p: u.copy_(m.to(p.dtype)).sub_(p), wide, state.master, params)
        return narrow, tree.replace(state, inner=inner)

    return Transform(init, update, {"name": "master_weights", "tx": tx.spec})


@torch.no_grad()
def apply_updates(params: Any, updates: Any) -> Any:
    """Add updates to parameters in place, and return the parameters."""
    ps = [p.detach() for p in tree.leaves(params)]
    us = tree.leaves(updates)
    if any(p.dtype != u.dtype for p, u in zip(ps, us)):
        # added in the wider type and rounded once
        for p, u in zip(ps, us):
            p.copy_(p.to(u.dtype) + u)
    elif ps:
        torch._foreach_add_(ps, us)
    return params
