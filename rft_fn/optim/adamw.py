"""AdamW, in the memory of the gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.optim.in_place import InPlace
from rft_fn.optim.updates import by_name, local_parts
from rft_fn.types.training import Transform

__all__ = ["AdamState", "Decays", "Schedule", "adamw", "add_decay", "constant", "is_matrix"]


Schedule = Callable[[int], float]  # updates done -> the learning rate


def constant(lr: float) -> Schedule:
    """Return the schedule with the same learning rate at every step."""

    def schedule(step: int, /) -> float:
        return lr

    return schedule


Decays = Callable[[str, Tensor], bool]  # whether the parameter of a name decays


@tree.struct
class AdamState:
    """The moments of the gradients."""

    count: int  # updates done
    m: Any  # first moment, like params
    v: Any  # second moment, like params


def is_matrix(name: str, p: Tensor, /) -> bool:
    """Return whether a parameter has two dimensions or more: neither a norm nor a bias."""
    return p.dim() >= 2


def add_decay(steps: list[Tensor], params: Any, decays: Decays, scale: float) -> None:
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
    decays = mask or is_matrix

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
            add_decay(steps, params, decays, -rate * weight_decay)
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
