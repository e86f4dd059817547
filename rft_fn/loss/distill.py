"""Divergences of a student from its teacher, one number per token, and advantages by a teacher.

Arguments are log-probs of words, the student's first: of all V words, or of K words and `with_tail`. Each
divergence is a sum over words, without the noise of samples. In a KL(p, m) a word that p excludes (-inf)
counts 0, and one that only m excludes counts 60 nats times p.

`with_tail` lumps all other words together, which only lowers a divergence. The error is at most

    jsd                              M log 2, with M = beta T + (1 - beta) S
    skew_forward_kl (alpha > 0)      T log(M / (alpha T)), with M = alpha T + (1 - alpha) S
    skew_reverse_kl (alpha > 0)      S log(M / (alpha S)), with M = alpha S + (1 - alpha) T
    reverse_kl, forward_kl           2 r S and 2 r T, where |log pi - log teacher| <= r in the tail

for tails of mass S (student) and T (teacher).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rft_fn import check, scan
from rft_fn.logprob import log_ratio
from rft_fn.loss.kl import divergence_terms, reverse_kl

__all__ = [
    "DIVERGENCES", "Divergence", "divergence", "forward_kl", "jsd", "skew_forward_kl", "skew_reverse_kl",
    "teacher_advantage", "top_1_agreement", "with_tail",
]  # fmt: skip

Divergence = Callable[[Tensor, Tensor], Tensor]  # (student, teacher) log-probs [..., V] -> [...]

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd", "skew_reverse_kl", "skew_forward_kl")
"""The names that `divergence` knows."""


def divergence(name: str, *, beta: float = 0.5, alpha: float = 0.1) -> Divergence:
    """Return the divergence of this name as a function of (student, teacher) log-probs.

    `beta` is of jsd, `alpha` of the skewed ones. ValueError for another name, and for a number outside of
    its limits.
    """
    if name == "reverse_kl":
        return reverse_kl
    if name == "forward_kl":
        return forward_kl
    if name == "jsd":
        _check_share("beta", beta, most=1.0)
        return partial(jsd, beta=beta)
    if name in ("skew_reverse_kl", "skew_forward_kl"):
        _check_share("alpha", alpha, most=0.999)
        return partial(skew_reverse_kl if name == "skew_reverse_kl" else skew_forward_kl, alpha=alpha)
    raise ValueError(f"divergence: expected one of {', '.join(DIVERGENCES)}, got {name!r}")


def forward_kl(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Return KL(teacher, pi), [..., V] -> [...] nats.

        sum of teacher (log teacher - log pi)

    It covers all that the teacher does, as the cross-entropy to its samples does in expectation.
    """
    check.shapes(logp=(logp, "... V"), teacher_logp=(teacher_logp, "... V"))
    return divergence_terms(teacher_logp, logp).sum(-1)


def jsd(logp: Tensor, teacher_logp: Tensor, *, beta: float = 0.5) -> Tensor:
    """Return the generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649), [..., V] -> [...] nats.

        beta KL(teacher, m) + (1 - beta) KL(pi, m),    m = beta teacher + (1 - beta) pi

    It is at most log 2. At beta 0 and 1 that would be 0: there it is `forward_kl` and `reverse_kl`, the
    limits of jsd / beta and jsd / (1 - beta), as in TRL.
    """
    check.given(logp=logp, teacher_logp=teacher_logp)
    check.shapes(logp=(logp, "... V"), teacher_logp=(teacher_logp, "... V"))
    if beta == 0:
        return forward_kl(logp, teacher_logp)
    if beta == 1:
        return reverse_kl(logp, teacher_logp)
    m = _mixture(teacher_logp, logp, beta)
    of_teacher = divergence_terms(teacher_logp, m).sum(-1)
    return beta * of_teacher + (1 - beta) * divergence_terms(logp, m).sum(-1)


def skew_forward_kl(logp: Tensor, teacher_logp: Tensor, *, alpha: float = 0.1) -> Tensor:
    """Return KL(teacher, alpha teacher + (1 - alpha) pi) (DistiLLM, 2402.03898), [..., V] -> [...] nats.

    It is at most log(1 / alpha), and `forward_kl` at alpha 0.
    """
    check.shapes(logp=(logp, "... V"), teacher_logp=(teacher_logp, "... V"))
    return divergence_terms(teacher_logp, _mixture(teacher_logp, logp, alpha)).sum(-1)


def skew_reverse_kl(logp: Tensor, teacher_logp: Tensor, *, alpha: float = 0.1) -> Tensor:
    """Return KL(pi, alpha pi + (1 - alpha) teacher) (DistiLLM, 2402.03898), [..., V] -> [...] nats.

    It is at most log(1 / alpha), and `reverse_kl` at alpha 0.
    """
    check.shapes(logp=(logp, "... V"), teacher_logp=(teacher_logp, "... V"))
    return divergence_terms(logp, _mixture(logp, teacher_logp, alpha)).sum(-1)


def with_tail(logp: Tensor) -> Tensor:
    """Append the log of the mass that K words leave, [..., K] -> [..., K + 1].

    The mass is 1e-9 at least. So any divergence of all words is one of K words and the rest.
    """
    check.shapes(logp=(logp, "... K"))
    rest = (1 - logp.exp().sum(-1, keepdim=True)).clamp(min=1e-9)
    return torch.cat([logp, rest.log()], -1)


def top_1_agreement(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Return 1 where both have the same likeliest word, else 0, [..., V] -> [...]."""
    check.shapes(logp=(logp, "... V"), teacher_logp=(teacher_logp, "... V"))
    return (logp.argmax(-1) == teacher_logp.argmax(-1)).to(logp.dtype)


def teacher_advantage(
    logp: Tensor, teacher_logp: Tensor, mask: Tensor, *, gamma: float = 0.0, normalize: bool = False
) -> Tensor:
    """Return the advantage of sampled tokens by their teacher, [B, S], 0 outside mask.

        A[t] = sum over s >= t of gamma^(s - t) (log teacher[s] - log pi[s])

    `logp` and `teacher_logp` [B, S] are of the sampled tokens, and are data. With a policy-gradient loss the
    expected gradient is that of the reverse KL: gamma 0 of each token's (on-policy distillation from samples;
    MOPD, arXiv 2601.02780), gamma 1 of the whole response's (MiniLLM's reverse KL to go, arXiv 2306.08543).
    `normalize` divides by the sum of gamma^(s - t), so that it is a mean over the tokens to come. Tokens
    outside mask are skipped. Log-ratios are bounded to +-60.
    """
    check.shapes(logp=(logp, "B S"), teacher_logp=(teacher_logp, "B S"), mask=(mask, "B S"))
    gain = torch.where(mask, log_ratio(teacher_logp, logp, limit=60.0), 0).detach()
    decay = torch.ones_like(gain).masked_fill(mask, gamma)
    to_go = scan.linear_scan(decay, gain)
    if normalize:
        to_go = to_go / scan.linear_scan(decay, mask.to(gain.dtype)).clamp(min=1)
    return torch.where(mask, to_go, 0)


def _mixture(first: Tensor, second: Tensor, share: float) -> Tensor:
    """Return log(share p + (1 - share) q) of log-probs; -inf, without a gradient, where both are."""
    if share == 0:
        return second
    both = (first == -torch.inf) & (second == -torch.inf)
    p = torch.where(both, 0, first) + math.log(share)
    q = torch.where(both, 0, second) + math.log1p(-share)
    return torch.where(both, -torch.inf, torch.logaddexp(p, q))


def _check_share(name: str, value: float, *, most: float) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name}: expected 0 to {most:g}, got {value}")
