"""Divergences and entropy. Which estimator has the right value and which the right gradient is not the same
question; `rft_fn.testing.check_kl_gradient` answers the second."""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.logprob import log_ratio

__all__ = ["entropy_bonus", "kl", "kl_k1", "kl_k2", "kl_k3", "reverse_kl", "reverse_kl_top_k"]

_MAX_LOG_RATIO = 60.0  # e^60 = 1.1e26, finite in float32 with its square's root to spare


def _log_ratio(logp: Tensor, ref_logp: Tensor) -> Tensor:
    check.given(ref_logp=ref_logp)
    check.shapes(logp=(logp, "..."), ref_logp=(ref_logp, "..."))
    return log_ratio(logp, ref_logp, limit=_MAX_LOG_RATIO)


def kl_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[*]: log(pi / ref): unbiased for KL(pi, ref). As a loss its expected gradient is *zero*: for the
    reward, or to log."""
    return _log_ratio(logp, ref_logp)


def kl_k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[*]: log(pi / ref)^2 / 2: biased as a value, but on samples of pi its expected
    gradient is that of KL(pi, ref)."""
    return 0.5 * _log_ratio(logp, ref_logp).square()


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[*]: ref / pi - 1 + log(pi / ref) >= 0: unbiased, low variance (Schulman 2020). Its expected gradient
    is that of the *forward* KL(ref, pi): use `kl` where KL(pi, ref) is wanted."""
    d = _log_ratio(logp, ref_logp)
    return torch.expm1(-d) + d


def kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[*]: the value of k3 with the gradient of k2: right value and, on samples of pi, right expected
    gradient of KL(pi, ref). With a teacher's log-probs as ref_logp: on-policy distillation from samples."""
    grad = kl_k2(logp, ref_logp)
    return kl_k3(logp, ref_logp).detach() + grad - grad.detach()


def reverse_kl(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """[..., V], [..., V] -> [...] nats: sum over the vocabulary of pi (log pi - log teacher), exactly.

    On-policy distillation with whole distributions (arXiv 2306.13649): no sampling noise, at the price of
    logits. A word that pi excludes (-inf) counts 0, one that only the teacher does counts 60 nats.
    """
    check.shapes(logp=(logp, "... V"), teacher_logp=(teacher_logp, "... V"))
    return _terms(logp, teacher_logp).sum(-1)


def _terms(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """pi log(pi / teacher) of each word: 0 where pi excludes it, 60 pi where only the teacher does."""
    gap = log_ratio(logp, teacher_logp)
    return logp.exp() * gap.nan_to_num(torch.nan, _MAX_LOG_RATIO, 0.0)


def reverse_kl_top_k(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """[..., K], [..., K] -> [...] nats: the reverse KL over K words of which both log-probs are known, all
    others as one word more.

    Lumping words together only lowers a KL, so this is a bound from below that grows with K and is exact when
    the rest has no mass. Which K words (the policy's own likeliest, say) is the caller's choice, the same for
    both. Words that are excluded (-inf, e.g. by top_p) count as in `reverse_kl`.
    """
    check.shapes(logp=(logp, "... K"), teacher_logp=(teacher_logp, "... K"))
    rest, teacher_rest = ((1 - x.exp().sum(-1)).clamp(min=1e-9) for x in (logp, teacher_logp))
    return _terms(logp, teacher_logp).sum(-1) + rest * (rest.log() - teacher_rest.log())


def entropy_bonus(entropy: Tensor) -> Tensor:
    """[*] nats: -H, to be added with a small coefficient: `loss + 0.01 * entropy_bonus(out.entropy)`."""
    check.given(entropy=entropy)
    return -entropy
