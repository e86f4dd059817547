"""SGD and Lion, in the memory of the gradients."""

from typing import Any

import torch

from rft_fn import tree
from rft_fn.optim.adamw import Decays, Schedule, add_decay, constant, is_matrix
from rft_fn.optim.updates import by_name, local_parts
from rft_fn.types import Transform

__all__ = ["LionState", "SgdState", "lion", "sgd"]


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
    decays = mask or is_matrix

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
            add_decay(steps, params, decays, -rate * weight_decay)
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
    decays = mask or is_matrix

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
            add_decay(steps, params, decays, -rate * weight_decay)
        return updates, tree.replace(state, count=state.count + 1)

    spec = {"name": "lion", "lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay, "mask": mask}
    return Transform(init, torch.no_grad()(update), spec)
