"""The policy losses of GRPO, PPO and REINFORCE.

A is the advantage and rho = pi / pi_old. At rho = 1 every loss has the gradient of -A logp. Log-ratios are
bounded to +-20 before exp (e^20 = 4.9e8), which no useful policy reaches. A token that both policies exclude
(-inf) has rho = 1 and no gradient. `surrogates` has the losses of other papers.
"""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.logprob.ratio import log_ratio

__all__ = ["MAX_LOG_RATIO", "Scalar", "between", "clipped", "ppo_clip", "ratio", "reinforce"]

Scalar = float | Tensor  # a tensor [] for sweeps
MAX_LOG_RATIO = 20.0


def between(x: Tensor, low: Scalar, high: Scalar) -> Tensor:
    """Clamp x to [low, high]."""
    return x.clamp(min=low).clamp(max=high)  # in two calls, because torch's clamp mixes no number and tensor


def ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Return the probability ratio pi / pi_old of each token, [*]."""
    return log_ratio(logp, old_logp, limit=MAX_LOG_RATIO).exp()


def clipped(rho: Tensor, adv: Tensor, low: Scalar, high: Scalar) -> Tensor:
    """Return the clipped surrogate of ratios, -min(rho A, clip(rho, 1 - low, 1 + high) A)."""
    return -torch.minimum(rho * adv, between(rho, 1 - low, 1 + high) * adv)


def ppo_clip(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    *,
    low: Scalar = 0.2,
    high: Scalar = 0.2,
    dual: float | None = None,
) -> Tensor:
    """Return PPO's clipped surrogate loss, [*].

        -min(rho A, clip(rho, 1 - low, 1 + high) A)

    arXiv 1707.06347. low < high is DAPO's clip-higher (arXiv 2503.14476). `dual` > 1 bounds the loss at
    -dual A where A < 0 (arXiv 1912.09729). At logp == old_logp the gradient is `reinforce`'s. ValueError
    for dual <= 1, which would turn the gradient off at rho = 1.

    Limits:
        low: the ratio is clipped at 1 - low
        high: the ratio is clipped at 1 + high
        dual: the loss is at most -dual A where A < 0; off by default
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    if dual is not None and dual <= 1:
        raise ValueError(f"dual: expected > 1, got {dual}")
    loss = clipped(ratio(logp, old_logp), adv, low, high)
    return loss if dual is None else torch.where(adv < 0, torch.minimum(loss, -dual * adv), loss)


def reinforce(logp: Tensor, adv: Tensor) -> Tensor:
    """Return the REINFORCE loss -A logp, [*].

    This is the score function estimator, valid only on-policy. Williams 1992.
    """
    check.shapes(logp=(logp, "..."), adv=(adv, "..."))
    return -adv * logp
