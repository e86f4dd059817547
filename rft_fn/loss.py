"""Losses: one number a token, [*] in and [*] out, no averaging and no mask.

The average is in `w` (`rft_fn.weight`); `packing.pack` sets every field to 0 outside mask and a bound model
gives log-prob 0 there, so nothing here needs a guard. `adv`, `old_logp`, `ref_logp`, `ret` are data: they
carry no gradient. Log-ratios are bounded to +-20 before exp in policy losses (e^20 = 4.9e8), which no policy
that means anything reaches.
"""

import torch
from torch import Tensor

from rft_fn import check

__all__ = ["kl", "kl_k1", "kl_k2", "kl_k3", "nll", "ppo_clip", "ratio", "reinforce", "value_clip"]

_MAX_LOG_RATIO = 20.0
_MAX_LOG_RATIO_KL = 60.0  # e^60 = 1.1e26, finite in float32 with its square's root to spare


def ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """[*]: pi / pi_old = exp(logp - old_logp), the log-ratio bounded to +-20."""
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."))
    return (logp - old_logp).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def ppo_clip(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> Tensor:
    """[*]: -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = pi / pi_old. PPO, arXiv 1707.06347.

    low < high is DAPO's clip-higher (arXiv 2503.14476). `dual` > 1 bounds the loss at -dual A where A < 0
    (arXiv 1912.09729). At logp == old_logp the gradient is that of -A logp (`reinforce`).
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    rho = ratio(logp, old_logp)
    loss = -torch.minimum(rho * adv, rho.clamp(1 - low, 1 + high) * adv)
    return loss if dual is None else torch.where(adv < 0, torch.minimum(loss, -dual * adv), loss)


def reinforce(logp: Tensor, adv: Tensor) -> Tensor:
    """[*]: -A logp: the score function estimator (Williams 1992). Right only
    for samples of the current policy."""
    check.shapes(logp=(logp, "..."), adv=(adv, "..."))
    return -adv * logp


def nll(logp: Tensor) -> Tensor:
    """[*]: -logp, nats: supervised fine-tuning, and the PTX term."""
    return -logp


def value_clip(value: Tensor, old_value: Tensor, ret: Tensor, *, clip: float = 0.2) -> Tensor:
    """[*]: max((V - R)^2, (V_c - R)^2) / 2 with V_c = V_old + clip(V - V_old, +-clip): PPO's critic."""
    check.shapes(value=(value, "..."), old_value=(old_value, "..."), ret=(ret, "..."))
    near = old_value + (value - old_value).clamp(-clip, clip)
    return 0.5 * torch.maximum((value - ret).square(), (near - ret).square())


def _log_ratio_to_ref(logp: Tensor, ref_logp: Tensor) -> Tensor:
    check.shapes(logp=(logp, "..."), ref_logp=(ref_logp, "..."))
    return (logp - ref_logp).clamp(-_MAX_LOG_RATIO_KL, _MAX_LOG_RATIO_KL)


def kl_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[*]: log(pi / ref): unbiased for KL(pi, ref). As a loss its expected gradient is *zero*: for the
    reward, or to log."""
    return _log_ratio_to_ref(logp, ref_logp)


def kl_k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[*]: log(pi / ref)^2 / 2: biased as a value, but on samples of pi its expected
    gradient is that of KL(pi, ref)."""
    return 0.5 * _log_ratio_to_ref(logp, ref_logp).square()


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[*]: ref / pi - 1 + log(pi / ref) >= 0: unbiased, low variance (Schulman 2020). Its expected gradient
    is that of the *forward* KL(ref, pi): use `kl` where KL(pi, ref) is wanted."""
    d = _log_ratio_to_ref(logp, ref_logp)
    return torch.expm1(-d) + d


def kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[*]: the value of k3 with the gradient of k2: right value and, on samples of pi, right expected
    gradient of KL(pi, ref)."""
    grad = kl_k2(logp, ref_logp)
    return kl_k3(logp, ref_logp).detach() + grad - grad.detach()
