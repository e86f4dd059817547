"""Optimizers, in the memory of the gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.optim.transforms import Schedule, by_name, constant, local_parts
from rft_fn.types import Transform

__all__ = ["AdamState", "Decays", "adamw"]


Decays = Callable[[str, Tensor], bool]  # whether the parameter of a name decays


@tree.struct
class AdamState:
    """The moments of the gradients."""

    count: int  # updates done
    m: Any  # first moment, like params
    v: Any  # second moment, like params


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
            for step, moment in zip(steps, v):
                step.copy_(moment)
            torch._foreach_sqrt_(steps)
            torch._foreach_div_(steps, (1 - b2**count) ** 0.5)
            torch._foreach_add_(steps, eps)
        for step, moment in zip(steps, m):
            step.copy_((moment * (-rate / (1 - b1**count))).div_(step))

        if weight_decay:
            named, values = tree.leaves_with_path(params), local_parts(params)
            pairs = [(d, x) for (name, p), d, x in zip(named, steps, values) if decays(name, p)]
            torch._foreach_add_([d for d, _ in pairs], [x for _, x in pairs], alpha=-rate * weight_decay)
        return updates, tree.replace(state, count=count)

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
