"""The bias of a loss as an estimator of the policy gradient, by enumeration."""

from typing import NamedTuple

import torch
from torch import Tensor

from rft_fn.loss.evaluate import evaluate
from rft_fn.testing.policy_losses import enumerated
from rft_fn.types import LossFn, Packed, TokenOut

__all__ = ["LossBias", "loss_bias"]


class LossBias(NamedTuple):
    """The expected gradient of a loss compared with that of E[R], sampled by a policy `gap` nats away."""

    gap: float  # deviation of the logits of the policy that sampled
    bias: float  # |E[gradient] - gradient of E[R]| / |gradient of E[R]|
    cosine: float
    norm_ratio: float


def loss_bias(
    loss_fn: LossFn, *, gap: float = 0.0, length: int = 3, vocab: int = 3, seed: int = 0
) -> LossBias:
    """Compute the exact bias of a loss on samples of another policy.

    The vocab^length sequences x of a tabular policy q are a batch, each with the weight q(x) on its tokens,
    a random reward R and the advantage R - E_q[R]. A loss that is the policy gradient on-policy has no bias
    at a gap of 0; what a clip or a ratio of single tokens leaves out appears at larger ones. The batch is the
    expectation, so a loss that depends on its pack has the bias of this pack.
    """
    world = enumerated(length, vocab, seed, gap)
    rows, steps = world.logp.shape
    p, q = world.old_logp.sum(-1).exp(), world.logp.sum(-1).exp()
    (want,) = torch.autograd.grad((p * world.reward).sum(), world.theta, retain_graph=True)
    adv = world.reward - (q * world.reward).sum() / q.sum()

    def flat(x: Tensor) -> Tensor:
        return x.expand(rows, steps).flatten()

    tokens = torch.zeros(rows * steps, dtype=torch.long)
    b = Packed(
        tokens=tokens,
        target=tokens,
        pos=flat(torch.arange(steps)[None]),
        seq=flat(torch.arange(rows)[:, None]),
        mask=torch.ones(rows * steps, dtype=torch.bool),
        old_logp=flat(world.logp),
        adv=flat(adv[:, None]),
        w=flat(q[:, None]),
        ref_logp=flat(world.old_logp.detach()),
        num_seqs=rows,
        rows=tuple(range(rows)),
    )
    out = TokenOut(logp=flat(world.old_logp), entropy=flat(world.entropy))
    loss, _ = evaluate(loss_fn, out, b)
    total = (b.w * loss).sum() + 0 * world.theta.sum()  # a gradient that is cut is 0
    got = -torch.autograd.grad(total, world.theta)[0].flatten()
    want = want.flatten()
    return LossBias(
        gap=gap,
        bias=float((got - want).norm() / want.norm()),
        cosine=float(torch.nn.functional.cosine_similarity(got, want, dim=0)),
        norm_ratio=float(got.norm() / want.norm()),
    )
