"""Lion and Muon as transforms: a pair of functions each.

`optim.chain` and `optim.partition` take them like the library's. Tensors may be sharded (DTensors): Lion
works on each number alone, so it needs no change; Muon needs whole matrices, and puts them together.
"""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from rft_fn import optim, tree


def lion(lr, b1=0.9, b2=0.99, weight_decay=0.0):
    """Lion: the sign of an average of the gradients, of which a longer average is kept (arXiv 2302.06675)."""

    def init(params):
        return {"m": tree.map(torch.zeros_like, params)}

    def update(grads, state, params):
        toward = tree.map(lambda m, g: (b1 * m + (1 - b1) * g).sign(), state["m"], grads)
        updates = tree.map(lambda u, p: -lr * (u + weight_decay * p), toward, params)
        return updates, {"m": tree.map(lambda m, g: b2 * m + (1 - b2) * g, state["m"], grads)}

    spec = {"name": "lion", "lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return optim.Transform(init, torch.no_grad()(update), spec)


def orthogonal(g):
    """U V^T of a matrix g = U S V^T, nearly: five steps of a Newton-Schulz iteration."""
    x = g / (g.norm() + 1e-7)
    if x.shape[0] > x.shape[1]:  # the products below are of the smaller side
        return orthogonal(x.T).T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def step_of(m):
    """The step along a momentum, about as large as AdamW's. A sharded one is put together first."""
    if isinstance(m, DTensor):
        return distribute_tensor(step_of(m.full_tensor()), m.device_mesh, m.placements)
    return 0.2 * max(m.shape) ** 0.5 * orthogonal(m)


def muon(lr, momentum=0.95):
    """Muon: along the momentum, with its singular values set to about 1 (arXiv 2502.16982)."""

    def init(params):
        return {"momentum": tree.map(torch.zeros_like, params)}

    def update(grads, state, params):
        m = tree.map(lambda m, g: momentum * m + g, state["momentum"], grads)
        return tree.map(lambda x: -lr * step_of(x), m), {"momentum": m}

    return optim.Transform(init, torch.no_grad()(update), {"name": "muon", "lr": lr, "momentum": momentum})
