"""Functions of `rft_fn.loss` as losses with metrics, and the tokens that they stop."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rft_fn.loss.kl import kl_k3
from rft_fn.loss.policy import ratio
from rft_fn.metric import kinds as metric
from rft_fn.metric.kinds import Metric
from rft_fn.types.batch import Packed, TokenOut

__all__ = ["LossWithMetrics", "Stopped", "per_token", "policy_metrics", "stopped", "token_ratio"]

# a `LossFn` with metrics: (out, b, **options of the loss that it adapts) -> (loss [T], metrics)
LossWithMetrics = Callable[..., tuple[Tensor, dict[str, Metric]]]

# (ratio [T], adv [T], **options of the loss) -> [T] bool, the tokens that a loss holds back
Stopped = Callable[..., Tensor]


def per_token(fn: Callable[..., Tensor], held: Stopped | None = None) -> LossWithMetrics:
    """Adapt a loss of tokens to a LossFn with metrics.

    `fn` takes (logp, old_logp, adv), all [T], and options, which the adapted loss takes too. Without `held`
    the tokens that count as stopped are those that get no gradient.
    """

    @wraps(fn)
    def loss_fn(out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
        def of(logp: Tensor) -> Tensor:
            return fn(logp, b.old_logp, b.adv, **options)

        rho = token_ratio(out, b)
        tokens = stopped(of, out, b) if held is None else held(rho, b.adv, **options)
        return of(out.logp), policy_metrics(out, b, rho, tokens)

    return loss_fn


def token_ratio(out: TokenOut, b: Packed) -> Tensor:
    """Return the probability ratio of each token [T], without gradient."""
    return ratio(out.logp.detach(), b.old_logp)


def stopped(of: Callable[[Tensor], Tensor], out: TokenOut, b: Packed) -> Tensor:
    """Mark the tokens that a loss of log-probs [T] -> [T] gives no gradient in spite of an advantage."""
    logp = out.logp.detach()
    gradient = torch.func.grad(lambda x: of(x).sum())(logp)
    return (gradient == 0) & (b.adv != 0) & logp.isfinite()


def policy_metrics(out: TokenOut, b: Packed, rho: Tensor, tokens: Tensor) -> dict[str, Metric]:
    """Return the share of stopped tokens, the KL to the old policy and the largest ratio."""
    return {
        "policy/clip_frac": metric.mean(tokens.double(), b.mask),
        "policy/kl_old": metric.mean(kl_k3(b.old_logp, out.logp.detach()), b.mask),
        "policy/ratio_max": metric.max(rho, b.mask),
    }
