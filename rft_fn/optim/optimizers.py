"""Schedules of learning rates, and optimizers in the memory of the gradients."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.optim.in_place import InPlace
from rft_fn.optim.updates import by_name, local_parts
from rft_fn.types import Transform

__all__ = [
    "AdamState", "Decays", "LionState", "Schedule", "SgdState", "adamw", "constant", "lion", "sgd",
    "warmup_cosine", "warmup_linear",
]  # fmt: skip


# ---------- learning rates as functions of the step


Schedule = Callable[[int], float]  # updates done -> the learning rate


def constant(lr: float) -> Schedule:
    """Return the schedule with the same learning rate at every step."""

    def schedule(step: int, /) -> float:
        return lr

    return schedule


def warmup_linear(
    lr: float, warmup: int, total: int, *, floor: float = 0.0, from_zero: bool = False
) -> Schedule:
    """Return a schedule of a linear warmup, then a linear decay.

    From lr / warmup up to lr in `warmup` steps, then down to floor * lr at step `total`, where it stays. With
    `from_zero` the warmup begins at 0 and reaches lr one step later, as that of transformers.
    """

    def decay(x: float) -> float:
        return floor + (1 - floor) * (1 - x)

    return _warmup(lr, warmup, total, decay, from_zero)


def warmup_cosine(
    lr: float, warmup: int, total: int, *, floor: float = 0.1, from_zero: bool = False
) -> Schedule:
    """Return a schedule of a linear warmup, then a cosine decay.

    From lr / warmup up to lr in `warmup` steps, then by half a cosine down to floor * lr at step `total`,
    where it stays; `from_zero` as in `warmup_linear`.
    """

    def decay(x: float) -> float:
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x))

    return _warmup(lr, warmup, total, decay, from_zero)


def _warmup(lr: float, warmup: int, total: int, decay: Callable[[float], float], from_zero: bool) -> Schedule:
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup: expected 0 <= warmup <= total = {total} steps, got {warmup}")

    def schedule(step: int, /) -> float:
        if step < warmup:
            return lr * (step + (not from_zero)) / warmup
        return lr * decay(min((step - warmup) / max(total - warmup, 1), 1.0))

    return schedule


# ---------- optimizers


Decays = Callable[[str, Tensor], bool]  # whether the parameter of a name decays


@tree.struct
class AdamState:
    """The moments of the gradients."""

    count: int  # updates done
    m: Any  # first moment, like params
    v: Any  # second moment, like params


@tree.struct
class SgdState:
    """The sum of the gradients."""

    count: int  # updates done
    momentum: Any = None  # like params; None without momentum


@tree.struct
class LionState:
    """The average of the gradients."""

    count: int  # updates done
    m: Any  # like params


def _is_matrix(name: str, p: Tensor, /) -> bool:
    return p.dim() >= 2


def _add_decay(steps: list[Tensor], params: Any, decays: Decays, scale: float) -> None:
    """Add scale * p to the steps of the parameters that decay."""
    named, values = tree.leaves_with_path(params), local_parts(params)
    pairs = [(step, x) for (name, p), step, x in zip(named, steps, values) if decays(name, p)]
    if pairs:
        torch._foreach_add_([step for step, _ in pairs], [x for _, x in pairs], alpha=scale)


# one piece, because its update and the same step in place share the numbers of one rule
def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Decays | None = None,
) -> Transform:
    """Make AdamW, with updates in the memory of the gradients.

        -lr (m_hat / (sqrt(v_hat) + eps) + weight_decay p)

    arXiv 1711.05101. `mask(name, parameter)` chooses the parameters that decay, by default all with two
    dimensions or more, so neither norms nor biases. The moments have the parameters' type. Equals
    torch.optim.AdamW to rounding. An update needs no more memory than a copy of one tensor.
    """
    schedule = lr if callable(lr) else constant(lr)
    decays = mask or _is_matrix

    def init(params: Any) -> AdamState:
        return AdamState(count=0, m=tree.map(torch.zeros_like, params), v=tree.map(torch.zeros_like, params))

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        rate = float(schedule(state.count))
        count = state.count + 1
        grads = by_name(params, grads, "grads")
        updates = tree.map(torch.Tensor.detach, grads)  # a gradient by torch.func may still have a graph
        steps, m, v = local_parts(updates), local_parts(state.m), local_parts(state.v)
        if steps:
            torch._foreach_lerp_(m, steps, 1 - b1)
            torch._foreach_mul_(v, b2)
            torch._foreach_addcmul_(v, steps, steps, 1 - b2)

            # the gradients are used up: the updates take their memory, after the denominators
            torch._foreach_copy_(steps, v)
            torch._foreach_sqrt_(steps)
            torch._foreach_div_(steps, (1 - b2**count) ** 0.5)
            torch._foreach_add_(steps, eps)
        for step, moment in zip(steps, m):
            step.copy_((moment * (-rate / (1 - b1**count))).div_(step))

        if weight_decay:
            _add_decay(steps, params, decays, -rate * weight_decay)
        return updates, tree.replace(state, count=count)

    def step(grads: Any, state: AdamState, params: Any, norm: Tensor, scale: Tensor | None) -> AdamState:
        count = state.count + 1
        lists = [local_parts(x) for x in (params, by_name(params, grads, "grads"), state.m, state.v)]
        if scale is not None and scale.dtype == torch.float64:  # the kernel takes a factor in float32
            torch._foreach_mul_(lists[1], scale)
            scale = None
        chosen = [bool(weight_decay) and decays(name, p) for name, p in tree.leaves_with_path(params)]
        for decay in set(chosen):
            p, g, m, v = ([x for x, own in zip(some, chosen) if own == decay] for some in lists)
            now = torch.full((), float(count), device=p[0].device)
            torch._fused_adamw_(
                p,
                g,
                m,
                v,
                [],
                [now] * len(p),
                lr=float(schedule(state.count)),
                beta1=b1,
                beta2=b2,
                weight_decay=weight_decay if decay else 0.0,
                eps=eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None if scale is None else 1 / scale,
                found_inf=None,
            )
        return tree.replace(state, count=count)

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
    update = torch.no_grad()(update)
    update.in_place = InPlace(step=step)  # type: ignore[attr-defined]
    return Transform(init, update, spec)


def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Decays | None = None,
) -> Transform:
    """Make stochastic gradient descent, with updates in the memory of the gradients.

        b = momentum b + g
        -lr (b + weight_decay p),    with nesterov -lr (g + momentum b + weight_decay p)

    The decay does not enter the momentum (arXiv 1711.05101), which that of torch.optim.SGD does; otherwise
    equal to it, to rounding. `mask` as in `adamw`. Without momentum there is no state but the count.
    ValueError unless 0 <= momentum < 1, and for nesterov without momentum.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum: expected 0 <= momentum < 1, got {momentum}")
    if nesterov and not momentum:
        raise ValueError("momentum: expected > 0 for nesterov, got 0")
    schedule = lr if callable(lr) else constant(lr)
    decays = mask or _is_matrix

    def init(params: Any) -> SgdState:
        return SgdState(count=0, momentum=tree.map(torch.zeros_like, params) if momentum else None)

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        rate = float(schedule(state.count))
        updates = tree.map(torch.Tensor.detach, by_name(params, grads, "grads"))
        steps, sums = local_parts(updates), local_parts(state.momentum)
        if sums:
            torch._foreach_mul_(sums, momentum)
            torch._foreach_add_(sums, steps)
        if nesterov:
            torch._foreach_add_(steps, sums, alpha=momentum)
        else:
            if sums:
                torch._foreach_copy_(steps, sums)
        if steps:
            torch._foreach_mul_(steps, -rate)
        if weight_decay:
            _add_decay(steps, params, decays, -rate * weight_decay)
        return updates, tree.replace(state, count=state.count + 1)

    spec = {
        "name": "sgd",
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "mask": mask,
    }
    return Transform(init, torch.no_grad()(update), spec)


def lion(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    mask: Decays | None = None,
) -> Transform:
    """Make Lion, with updates in the memory of the gradients.

        -lr (sign(b1 m + (1 - b1) g) + weight_decay p),    then m = b2 m + (1 - b2) g

    arXiv 2302.06675. Every number moves by lr, so a learning rate is 3 to 10 times smaller than adamw's, and
    the decay as much larger. Half of adamw's state. `mask` as in `adamw`. An update needs no more memory
    than a copy of one tensor.
    """
    schedule = lr if callable(lr) else constant(lr)
    decays = mask or _is_matrix

    def init(params: Any) -> LionState:
        return LionState(count=0, m=tree.map(torch.zeros_like, params))

    def update(grads: Any, state: LionState, params: Any) -> tuple[Any, LionState]:
        rate = float(schedule(state.count))
        updates = tree.map(torch.Tensor.detach, by_name(params, grads, "grads"))
        steps, m = local_parts(updates), local_parts(state.m)
        for step, moment in zip(steps, m):
            toward = moment.lerp(step, 1 - b1).sign_()
            moment.lerp_(step, 1 - b2)
            step.copy_(toward.mul_(-rate))
            del toward  # before the next one is made
        if weight_decay:
            _add_decay(steps, params, decays, -rate * weight_decay)
        return updates, tree.replace(state, count=state.count + 1)

    spec = {"name": "lion", "lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay, "mask": mask}
    return Transform(init, torch.no_grad()(update), spec)
