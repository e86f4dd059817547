"""AdamW, by torch's functional update."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from rft_fn import tree
from rft_fn.optim.schedules import Schedule, constant
from rft_fn.types import Transform

__all__ = ["AdamState", "Decays", "adamw"]


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
