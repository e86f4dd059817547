"""Optimizers of one's own: a pair of functions each, which `optim.chain` and `optim.partition` take as ours.

Parameters, gradients and states may be sharded tensors (DTensors): whatever is computed for each number works
on them as it stands; Muon, which needs whole matrices, puts them together.
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
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def step_of(m):
    """`orthogonal` of a momentum, sharded or not, with the size that AdamW's steps have."""
    whole = m.full_tensor() if isinstance(m, DTensor) else m
    u = orthogonal(whole) * 0.2 * max(whole.shape) ** 0.5
    return distribute_tensor(u, m.device_mesh, m.placements) if isinstance(m, DTensor) else u


def muon(lr, momentum=0.95):
    """Muon: along the momentum, with its singular values set to about 1 (arXiv 2502.16982)."""

    def init(params):
        return {"momentum": tree.map(torch.zeros_like, params)}

    def update(grads, state, params):
        m = tree.map(lambda m, g: momentum * m + g, state["momentum"], grads)
        return tree.map(lambda x: -lr * step_of(x), m), {"momentum": m}

    return optim.Transform(init, torch.no_grad()(update), {"name": "muon", "lr": lr, "momentum": momentum})
