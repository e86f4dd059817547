"""The slopes of a loss, which are all that its gradient is made of."""

import torch
from torch import Tensor

from rft_fn import check, packing, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.types import Experience, LossFn, TokenOut

__all__ = ["effective_size", "gains", "length_slope", "slopes", "stopped"]


def slopes(loss_fn: LossFn, exp: Experience, logp: Tensor) -> Tensor:
    """Return d (w * loss).sum() / d logp of each token [B, S], at the policy's log-probs `logp` [B, S].

    0 outside mask. The loss sees no other output of a model: what it adds by an entropy is an error of its
    own.
    """
    check.shapes(tokens=(exp.tokens, "B S"), logp=(logp, "B S"))
    rows = [i for i, any_ in enumerate(exp.mask[:, 1:].any(-1).tolist()) if any_]
    with_logp = tree.replace(exp, extra={**(exp.extra or {}), "logp at": logp}, media=None)
    b = packing.pack(with_logp, rows)
    assert b.extra is not None
    at = b.extra["logp at"].detach().requires_grad_()
    loss, _ = evaluate(loss_fn, TokenOut(logp=at), b)
    (slope,) = torch.autograd.grad((b.w * loss).sum(), at, materialize_grads=True)
    return packing.unpack([torch.where(b.mask, slope, 0)], [b], exp.mask)


def stopped(slope: Tensor, adv: Tensor, mask: Tensor) -> float:
    """Return the share of the tokens with an advantage that have no slope: the loss has stopped them."""
    check.shapes(slope=(slope, "B S"), adv=(adv, "B S"), mask=(mask, "B S"))
    learns = mask & (adv != 0)
    return float(((slope == 0) & learns).sum() / learns.sum().clamp(min=1))


def effective_size(push: Tensor) -> float:
    """Return Kish's effective sample size (sum x)^2 / sum x^2 of the pushes [B] of responses, >= 0."""
    push = push.double().abs()
    return float(push.sum().square() / push.square().sum().clamp(min=1e-300))


def length_slope(push: Tensor, length: Tensor) -> float:
    """Return the elasticity of the push of a response [B] in its length [B] tokens.

    It is the least-squares slope of log push over log length, over the responses with a push: 0 where a
    response counts the same at any length, 1 where every token does. NaN where all have one length.
    """
    check.shapes(push=(push, "B"), length=(length, "B"))
    has = (push != 0) & (length > 0)
    x, y = length[has].double().log(), push[has].double().abs().log()
    if not len(x) or bool((x == x[0]).all()):
        return float("nan")
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def gains(exp: Experience, slope: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-ratios, - slope / (w adv)) of the tokens with an advantage, [n] each."""
    has = exp.mask & (exp.adv != 0) & (exp.w != 0)
    return (logp - exp.old_logp)[has], -(slope / (exp.w * exp.adv))[has]
