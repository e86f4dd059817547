"""Optimizers with updates that change none of their arguments, for gradients through updates."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.optim.adamw import AdamState, constant
from rft_fn.optim.sgd_and_lion import SgdState
from rft_fn.optim.updates import by_name
from rft_fn.types import Transform

__all__ = ["pure"]


def pure(tx: Transform) -> Transform:
    """Return `tx` with an update that donates nothing and can be differentiated.

    It takes and returns new tensors, so that `torch.func.grad` goes through it: meta-gradients, fast weights,
    a learning rate that is a tensor []. Parameters are any mapping of names, and so are updates; add them as
    {name: p + updates[name]}. For adamw, sgd, clip_by_global_norm and chains of these: the same numbers to
    rounding. Where every gradient of a weight was 0, AdamW's update has a derivative of 0. Memory: a step
    keeps its gradients, its moments and its updates for the backward. ValueError for another transform.
    """
    spec = tx.spec
    if spec["name"] == "chain":
        parts = [_of_spec(inner) for inner in spec["txs"]]

        def update(grads: Any, state: tuple, params: Any) -> tuple[Any, tuple]:
            out = []
            for part, own in zip(parts, state):
                grads, new = part(grads, own, params)
                out.append(new)
            return grads, tuple(out)

        return Transform(tx.init, update, spec)
    return Transform(tx.init, _of_spec(spec), spec)


Update = Callable[[Any, Any, Any], tuple[Any, Any]]  # (grads, state, params) -> (updates, state)


def _of_spec(spec: Mapping[str, Any]) -> Update:
    """Return the pure update of a transform with this spec."""
    if spec["name"] == "chain":
        return pure(Transform(lambda params: (), lambda g, s, p: (g, s), spec)).update
    if spec["name"] not in _UPDATES:
        known = ", ".join(_UPDATES)
        raise ValueError(
            f"tx: expected a chain of {known}, got {spec['name']}, whose update is only in place"
        )
    make = _UPDATES[spec["name"]]

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return make(spec, by_name(params, grads, "grads"), state, params)

    return update


def _rate(spec: Mapping[str, Any], count: int) -> Any:
    lr = spec["lr"]
    return (lr if callable(lr) else constant(lr))(count)


def _with_decay(spec: Mapping[str, Any], updates: Any, params: Any, rate: Any) -> Any:
    """Add the weight decay to updates, of the parameters that decay."""
    if not spec["weight_decay"]:
        return updates
    decays = spec["mask"] or (lambda name, p: p.dim() >= 2)
    scale = rate * spec["weight_decay"]
    return type(updates)(
        (n, u - scale * params[n] if decays(n, params[n]) else u) for n, u in updates.items()
    )


def _adamw(spec: Mapping[str, Any], grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
    rate, count = _rate(spec, state.count), state.count + 1
    b1, b2 = spec["b1"], spec["b2"]
    m = tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, grads)
    v = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.v, grads)

    def update(m: Tensor, v: Tensor) -> Tensor:
        # the root has no derivative at 0, and a `where` on only its result would keep 0 * inf
        some = v > 0
        root = torch.where(some, torch.where(some, v, 1).sqrt(), 0) / (1 - b2**count) ** 0.5
        return -rate / (1 - b1**count) * m / (root + spec["eps"])

    updates = _with_decay(spec, tree.map(update, m, v), params, rate)
    return updates, tree.replace(state, count=count, m=m, v=v)


def _sgd(spec: Mapping[str, Any], grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
    rate, momentum = _rate(spec, state.count), spec["momentum"]
    sums, steps = state.momentum, grads
    if momentum:
        sums = tree.map(lambda b, g: momentum * b + g, state.momentum, grads)
        steps = tree.map(lambda b, g: g + momentum * b, sums, grads) if spec["nesterov"] else sums
    updates = _with_decay(spec, tree.map(lambda s: -rate * s, steps), params, rate)
    return updates, tree.replace(state, count=state.count + 1, momentum=sums)


def _clip(spec: Mapping[str, Any], grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    square = sum((g * g).sum() for g in tree.leaves(grads))
    large = square > spec["max_norm"] ** 2
    factor = torch.where(large, spec["max_norm"] / torch.where(large, square, 1).sqrt(), 1)
    return tree.map(lambda g: g * factor, grads), state


_UPDATES = {"adamw": _adamw, "sgd": _sgd, "clip_by_global_norm": _clip}
