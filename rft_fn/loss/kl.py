"""KL divergences and entropy.

The estimator with the right value need not have the right gradient; `rft_fn.testing.check_kl_gradient` tests
the gradient.
"""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.logprob.ratio import log_ratio

__all__ = [
    "adaptive_entropy", "divergence_terms", "entropy_bonus", "kl", "kl_k1", "kl_k2", "kl_k3",
    "reverse_kl", "reverse_kl_top_k",
]  # fmt: skip

_MAX_LOG_RATIO = 60.0  # e^60 = 1.1e26 is finite in float32


def kl_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the k1 estimator of KL(pi, ref), [*] nats.

    This is log(pi / ref), which is unbiased. As a loss its expected gradient is zero: use it in the reward
    or for logging. The log-ratio is bounded to +-60.
    """
    check.given(ref_logp=ref_logp)
    check.shapes(logp=(logp, "..."), ref_logp=(ref_logp, "..."))
    return log_ratio(logp, ref_logp, limit=_MAX_LOG_RATIO)


def kl_k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the k2 estimator of KL(pi, ref), [*] nats.

    This is log(pi / ref)^2 / 2. It is biased in value, but on samples of pi its expected gradient is that
    of KL(pi, ref).
    """
    return 0.5 * kl_k1(logp, ref_logp).square()


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the k3 estimator of KL(pi, ref), [*] nats.

    This is ref / pi - 1 + log(pi / ref) >= 0, unbiased with low variance (Schulman 2020). Its expected
    gradient is that of the forward KL(ref, pi): use `kl` as a loss for KL(pi, ref).
    """
    d = kl_k1(logp, ref_logp)
    return torch.expm1(-d) + d


def kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return KL(pi, ref) as a loss term, [*] nats.

    It has the value of k3 and the gradient of k2. On samples of pi both are right in expectation. With a
    teacher's log-probs as ref_logp it is on-policy distillation from samples.
    """
    grad = kl_k2(logp, ref_logp)
    return kl_k3(logp, ref_logp).detach() + grad - grad.detach()


def reverse_kl(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Return the exact KL(pi, teacher) of distributions, [..., V] -> [...] nats.

        sum of pi (log pi - log teacher)

    On-policy distillation without sampling noise, at the price of logits (arXiv 2306.13649). A word that pi
    excludes (-inf) counts 0, one that only the teacher excludes counts 60 nats.
    """
    check.shapes(logp=(logp, "... V"), teacher_logp=(teacher_logp, "... V"))
    return divergence_terms(logp, teacher_logp).sum(-1)


def divergence_terms(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Return pi log(pi / teacher) of each word: 0 if pi excludes it, 60 pi if only the teacher does."""
    gap = log_ratio(logp, teacher_logp)
    return logp.exp() * gap.nan_to_num(torch.nan, _MAX_LOG_RATIO, 0.0)


def reverse_kl_top_k(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Return the KL over K words, a lower bound, [..., K] -> [...].

    All other words count as one. Lumping words together only lowers a KL, so the bound grows with K and is
    exact if the rest has no mass. The caller chooses the K words (for example the policy's likeliest), the
    same for both. Excluded words (-inf, e.g. by top_p) count as in `reverse_kl`.
    """
    check.shapes(logp=(logp, "... K"), teacher_logp=(teacher_logp, "... K"))
    rest = _rest(logp)
    return divergence_terms(logp, teacher_logp).sum(-1) + rest * (rest.log() - _rest(teacher_logp).log())


def _rest(logp: Tensor) -> Tensor:
    """Return the mass of all other words, [..., K] -> [...]."""
    return (1 - logp.exp().sum(-1)).clamp(min=1e-9)


def adaptive_entropy(coef: float, entropy: float, *, target: float, delta: float) -> tuple[float, float]:
    """Return the coefficient of the entropy bonus in this step, and the one to start the next with.

        in this step:   coef if entropy <= target, else 0
        in the next:    coef + delta if entropy <= target, else max(coef - delta, 0)

    `entropy` [nats] is the policy's mean over the step's tokens before its update. The bonus grows while the
    entropy is below the target, and counts only there. Skywork-OR1, arXiv 2505.22312, with delta = 0.005.
    ValueError unless target and delta are > 0.
    """
    for name, x in (("target", target), ("delta", delta)):
        if not x > 0:
            raise ValueError(f"{name}: expected > 0, got {x}")
    if entropy <= target:
        return coef, coef + delta
    return 0.0, max(coef - delta, 0.0)


def entropy_bonus(entropy: Tensor) -> Tensor:
    """Return the negative entropy -H, [*] nats.

    Add it with a small coefficient: `loss + 0.01 * entropy_bonus(out.entropy)`.
    """
    check.given(entropy=entropy)
    return -entropy
