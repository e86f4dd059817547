"""Optimizers as values: a Transform is `init`, `update` and `spec`, in optax's manner.

`update(grads, state, params) -> (updates, state)` gives what is to be *added* to the parameters, so
transforms compose with `chain`; `apply_updates` adds in place. Gradients and states are donated: their memory
may be reused. `spec` describes the transform as plain data, for a backend whose optimizer is its own.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from rft_fn import tree
from rft_fn.types import Transform

__all__ = [
    "adamw", "apply_updates", "chain", "clip_by_global_norm", "constant", "count", "ema", "ema_params",
    "global_norm", "master_weights", "partition", "warmup_cosine", "warmup_linear",
]  # fmt: skip

Schedule = Callable[[int], float]  # updates done -> learning rate


@tree.struct
class AdamState:
    """Moments of the gradients."""

    count: int  # updates done
    m: Any  # first moment, like params
    v: Any  # second moment, like params


@tree.struct
class EmaState:
    """An average of the parameters."""

    average: Any  # like params


@tree.struct
class MasterState:
    """Wide copies of narrow parameters, and what the wrapped transform keeps."""

    master: Any  # float32 copies of the parameters
    inner: Any  # the state of the wrapped transform


def constant(lr: float) -> Schedule:
    """The same learning rate at every step."""
    return lambda step: lr


def warmup_linear(lr: float, warmup: int, total: int, *, floor: float = 0.0) -> Schedule:
    """From lr / warmup up to lr in `warmup` steps, then on a line to floor * lr at
    step `total`, and there it stays."""
    return _warmup(lr, warmup, total, lambda x: floor + (1 - floor) * (1 - x))


def warmup_cosine(lr: float, warmup: int, total: int, *, floor: float = 0.1) -> Schedule:
    """From lr / warmup up to lr in `warmup` steps, then half a cosine to floor * lr at
    step `total`, and there it stays."""
    return _warmup(lr, warmup, total, lambda x: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x)))


def _warmup(lr: float, warmup: int, total: int, decay: Callable[[float], float]) -> Schedule:
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup: expected 0 <= warmup <= total = {total} steps, got {warmup}")

    def schedule(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        return lr * decay(min((step - warmup) / max(total - warmup, 1), 1.0))

    return schedule


def global_norm(grads: Any) -> Tensor:
    """[] the 2-norm of all gradients together, a plain tensor also of sharded ones. 0 without any."""
    leaves = tree.leaves(grads)
    if not leaves:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(leaves))))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded gradients: over all ranks


def clip_by_global_norm(max_norm: float) -> Transform:
    """Scale all gradients by min(1, max_norm / norm), with the norm over *all* of
    them. ValueError unless max_norm > 0."""
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected > 0, got {max_norm}")

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        scale: Any = (max_norm / global_norm(grads).clamp(min=1e-30)).clamp(max=1.0)
        leaves = tree.leaves(grads)
        if any(hasattr(g, "full_tensor") for g in leaves):  # sharded ones mix with no plain tensor
            scale = float(scale)
        torch._foreach_mul_(leaves, scale)
        return grads, state

    return Transform(lambda params: (), update, {"name": "clip_by_global_norm", "max_norm": max_norm})


def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Callable[[str, Tensor], bool] | None = None,
) -> Transform:
    """AdamW (arXiv 1711.05101): -lr (m_hat / (sqrt(v_hat) + eps) + weight_decay
    p), by torch's own functional update.

    `mask(name, parameter)` says which parameters decay (default: matrices and above, so neither norms nor
    biases). The moments have the parameters' type. Equals torch.optim.AdamW to rounding.
    """
    schedule = lr if callable(lr) else constant(lr)
    decays = mask or (lambda name, p: p.dim() >= 2)

    def init(params: Any) -> AdamState:
        return AdamState(count=0, m=tree.map(torch.zeros_like, params), v=tree.map(torch.zeros_like, params))

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        rate = float(schedule(state.count))
        delta = tree.map(torch.zeros_like, params)
        # torch's update adds to the "parameters" it is given: on zeros it leaves the step alone
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
        if weight_decay:
            pairs = [(d, p) for (name, p), d in zip(_named(params), tree.leaves(delta)) if decays(name, p)]
            torch._foreach_add_(
                [d for d, _ in pairs], [p.detach() for _, p in pairs], alpha=-rate * weight_decay
            )
        return delta, tree.replace(state, count=state.count + 1)

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


def _named(params: Any) -> list[tuple[str, Tensor]]:
    return list(tree.leaves_with_path(params))


def chain(*txs: Transform) -> Transform:
    """The transforms one after the other; the state is the tuple of their states."""

    def update(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple]:
        out = []
        for tx, s in zip(txs, state):
            grads, s = tx.update(grads, s, params)
            out.append(s)
        return grads, tuple(out)

    return Transform(
        lambda params: tuple(tx.init(params) for tx in txs),
        update,
        {"name": "chain", "txs": tuple(tx.spec for tx in txs)},
    )


def ema(decay: float) -> Transform:
    """Last in a chain: lets the updates through and keeps average = decay average +
    (1 - decay) (params + updates).

    The average is a leaf of the optimizer state, so it is saved, sharded and resumed with it; `ema_params`
    finds it.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay: expected 0 <= decay < 1, got {decay}")

    @torch.no_grad()
    def update(updates: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        average = tree.leaves(state.average)
        torch._foreach_mul_(average, decay)
        torch._foreach_add_(average, [p.detach() for p in tree.leaves(params)], alpha=1 - decay)
        torch._foreach_add_(average, tree.leaves(updates), alpha=1 - decay)
        return updates, state

    def start(p: Tensor) -> Tensor:
        # float32 at least: in bf16 (1 - decay) of a parameter is below the spacing of numbers
        copy = p.detach().clone()
        return copy.float() if copy.dtype in (torch.bfloat16, torch.float16) else copy

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
    """The states that an optimizer state is made of: those of a chain, that below masters, or none."""
    if isinstance(opt, tuple):
        return opt
    if isinstance(opt, PartitionState):
        return tuple(opt.inner.values())
    if isinstance(opt, MasterState):
        return (opt.inner,)
    return ()


def ema_params(opt: Any) -> Any:
    """The average that `ema` keeps, found in an optimizer state. ValueError if there is none."""
    if isinstance(opt, EmaState):
        return opt.average
    for part in parts(opt):
        try:
            return ema_params(part)
        except ValueError:
            continue
    raise ValueError("opt: expected a state with optim.ema in its chain, found none")


def count(opt: Any) -> int:
    """Updates that `adamw` has made, found in an optimizer state: its next learning rate is schedule(count).

    Unlike `TrainState.step` it leaves out updates that were skipped. ValueError if there is no adamw.
    """
    if hasattr(opt, "count") and not isinstance(opt, tuple):  # also of an optimizer that a backend holds
        return int(opt.count)
    for part in parts(opt):
        try:
            return count(part)
        except ValueError:
            continue
    raise ValueError("opt: expected a state with optim.adamw in its chain, found none")


def master_weights(tx: Transform) -> Transform:
    """`tx` on float32 copies of bf16 or fp16 parameters, kept in the optimizer state.

    The updates that come out are the difference between the rounded copy and the parameter, so steps that are
    too small for bf16 add up in the copy instead of being lost.
    """

    def init(params: Any) -> MasterState:
        master = tree.map(lambda p: p.detach().float().clone(), params)
        return MasterState(master=master, inner=tx.init(master))

    @torch.no_grad()
    def update(grads: Any, state: MasterState, params: Any) -> tuple[Any, MasterState]:
        wide, inner = tx.update(tree.map(lambda g: g.float(), grads), state.inner, state.master)
        apply_updates(state.master, wide)
        # the difference to the narrow parameters, in the memory of the wide updates, which are used up
        narrow = tree.map(lambda u, m, p: u.copy_(m.to(p.dtype)).sub_(p), wide, state.master, params)
        return narrow, tree.replace(state, inner=inner)

    return Transform(init, update, {"name": "master_weights", "tx": tx.spec})


@torch.no_grad()
def apply_updates(params: Any, updates: Any) -> Any:
    """params + updates, in place; the same params come back."""
    ps = [p.detach() for p in tree.leaves(params)]
    us = tree.leaves(updates)
    if any(p.dtype != u.dtype for p, u in zip(ps, us)):
        for p, u in zip(ps, us):
            p.copy_(p.to(u.dtype) + u)
    elif ps:
        torch._foreach_add_(ps, us)
    return params
