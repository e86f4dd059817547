"""Policy losses. With A the advantage and rho = pi / pi_old: at rho = 1 each has the gradient of -A logp.

Log-ratios are bounded to +-20 before exp (e^20 = 4.9e8), which no policy that means anything reaches. A token
that both policies exclude (-inf) has rho = 1 and no gradient.
"""

import math

import torch
from torch import Tensor

from rft_fn import check, segment
from rft_fn.logprob import log_ratio

__all__ = [
    "cispo", "cpgd", "dppo_kl", "dppo_tv", "gmpo", "gspo", "gspo_token", "kl_cov", "ppo_clip", "ratio",
    "reinforce", "sapo", "seq_ratio",
]  # fmt: skip

Scalar = float | Tensor  # a tensor [] where a sweep is wanted
_MAX_LOG_RATIO = 20.0


def _between(x: Tensor, low: Scalar, high: Scalar) -> Tensor:
    return x.clamp(min=low).clamp(max=high)  # one by one: torch's clamp takes two numbers or two tensors


def _log_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    return log_ratio(logp, old_logp, limit=_MAX_LOG_RATIO)


def _possible(logp: Tensor, old_logp: Tensor) -> Tensor:
    """logp, and 0 without a gradient where both policies exclude the token: 0 * -inf would be NaN."""
    return torch.where((logp == -torch.inf) & (old_logp == -torch.inf), 0, logp)


def ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """[*]: pi / pi_old = exp(logp - old_logp), the log-ratio bounded to +-20."""
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."))
    return _log_ratio(logp, old_logp).exp()


def seq_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, seq: Tensor, num_seqs: int) -> Tensor:
    """[T]: (pi(y) / pi_old(y))^(1 / |y|) of the token's sequence y: the geometric mean of its ratios."""
    check.shapes(logp=(logp, "T"), old_logp=(old_logp, "T"), mask=(mask, "T"), seq=(seq, "T"))
    mean = segment.mean(_log_ratio(logp, old_logp), mask, seq, num_seqs)
    return mean[seq].exp()


def _clipped(rho: Tensor, adv: Tensor, low: Scalar, high: Scalar) -> Tensor:
    return -torch.minimum(rho * adv, _between(rho, 1 - low, 1 + high) * adv)


def ppo_clip(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    *,
    low: Scalar = 0.2,
    high: Scalar = 0.2,
    dual: float | None = None,
) -> Tensor:
    """[*]: -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = pi / pi_old. PPO, arXiv 1707.06347.

    low < high is DAPO's clip-higher (arXiv 2503.14476). `dual` > 1 bounds the loss at -dual A where A < 0
    (arXiv 1912.09729). At logp == old_logp the gradient is that of -A logp (`reinforce`). ValueError for
    dual <= 1, which would turn the gradient off at rho = 1.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    if dual is not None and dual <= 1:
        raise ValueError(f"dual: expected > 1, got {dual}")
    loss = _clipped(ratio(logp, old_logp), adv, low, high)
    return loss if dual is None else torch.where(adv < 0, torch.minimum(loss, -dual * adv), loss)


def reinforce(logp: Tensor, adv: Tensor) -> Tensor:
    """[*]: -A logp: the score function estimator (Williams 1992). Right only
    for samples of the current policy."""
    check.shapes(logp=(logp, "..."), adv=(adv, "..."))
    return -adv * logp


def gspo(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    seq: Tensor,
    num_seqs: int,
    *,
    low: Scalar = 3e-4,
    high: Scalar = 4e-4,
) -> Tensor:
    """[T]: -min(s A, clip(s, 1 - low, 1 + high) A), s = `seq_ratio`. GSPO, arXiv 2507.18071.

    A sequence is clipped as a whole. The paper's objective is that under `weight.seq_mean`, with one
    advantage a sequence; under `token_mean` long sequences would count more than it wants.
    """
    check.shapes(logp=(logp, "T"), adv=(adv, "T"))
    return _clipped(seq_ratio(logp, old_logp, mask, seq, num_seqs), adv, low, high)


def gspo_token(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    seq: Tensor,
    num_seqs: int,
    *,
    low: Scalar = 3e-4,
    high: Scalar = 4e-4,
) -> Tensor:
    """[T]: GSPO with s[t] = sg(s) pi[t] / sg(pi[t]): the sequence's ratio in value, the token's own in
    gradient, so that advantages may differ between the tokens of a sequence (arXiv 2507.18071, section 4.3).

    With one advantage a sequence its value and gradient under `weight.seq_mean` are `gspo`'s.
    """
    check.shapes(logp=(logp, "T"), adv=(adv, "T"))
    s = seq_ratio(logp.detach(), old_logp, mask, seq, num_seqs)
    return _clipped(s * log_ratio(logp, logp.detach()).exp(), adv, low, high)


def gmpo(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    seq: Tensor,
    num_seqs: int,
    *,
    low: Scalar = 0.4,
    high: Scalar = 0.4,
) -> Tensor:
    """[T]: -A exp(mean over the sequence of d), d = log rho bounded above by `high` where A > 0 and below by
    -`low` where A < 0 [nats]: the geometric mean of clipped ratios. GMPO, arXiv 2507.20673.

    Without a bound it is `gspo` without one. The paper's objective is that under `weight.seq_mean`.
    """
    check.shapes(logp=(logp, "T"), old_logp=(old_logp, "T"), adv=(adv, "T"), mask=(mask, "T"), seq=(seq, "T"))
    d = _log_ratio(logp, old_logp)
    d = torch.where(adv > 0, d.clamp(max=high), d.clamp(min=-low))
    return -adv * segment.mean(d, mask, seq, num_seqs)[seq].exp()


def cispo(logp: Tensor, old_logp: Tensor, adv: Tensor, *, low: Scalar = 1.0, high: Scalar = 4.0) -> Tensor:
    """[*]: -sg(clip(rho, 1 - low, 1 + high)) A logp: the weight is clipped, and no token loses its gradient.

    CISPO, arXiv 2506.13585. low = 1 is no lower limit, as there; the paper gives no number for `high` (4 is
    ours). Systems differ: in TRL epsilon_high is the cap itself, so their 5 is 4 here.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    weight = _between(ratio(logp.detach(), old_logp), 1 - low, 1 + high)
    return -weight * adv * _possible(logp, old_logp)


def sapo(
    logp: Tensor, old_logp: Tensor, adv: Tensor, *, tau_pos: Scalar = 1.0, tau_neg: Scalar = 1.05
) -> Tensor:
    """[*]: -f(rho) A, f(rho) = 4 / tau sigmoid(tau (rho - 1)): a soft gate in place of the clip.

    tau is tau_pos where A > 0, else tau_neg; f' is 1 at rho = 1 and falls off on both sides. SAPO, arXiv
    2511.20347.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    rho = ratio(logp, old_logp)

    def gate(tau: Scalar) -> Tensor:
        return 4 / tau * torch.sigmoid(tau * (rho - 1))

    return -torch.where(adv > 0, gate(tau_pos), gate(tau_neg)) * adv


def _drift(logp: Tensor, old_logp: Tensor, cap: float = math.inf) -> Tensor:
    """[*]: rho - 1 - log rho, on samples of pi_old unbiased for KL(pi_old, pi), in value and in gradient
    (rho - 1) grad logp; that factor is bounded by `cap`."""
    d = _log_ratio(logp, old_logp)
    straight = d.detach().expm1().clamp(max=cap) * _possible(logp, old_logp)
    return (torch.expm1(d) - d).detach() + straight - straight.detach()


def cpgd(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    drift: Scalar = 0.1,
    cap: float = 4.0,
) -> Tensor:
    """[*]: -min(d A, clip(d, log(1 - low), log(1 + high)) A) + drift KL(pi_old, pi), d = log rho. CPGD, arXiv
    2505.12504.

    The policy gradient itself is clipped, so no ratio multiplies it; the drift (rho - 1 - log rho, its
    gradient's factor rho - 1 bounded by `cap`) pulls back what has gone too far. `drift` and `cap` are ours.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    d = _log_ratio(logp, old_logp)
    clipped = torch.minimum(d * adv, d.clamp(math.log(1 - low), math.log(1 + high)) * adv)
    return drift * _drift(logp, old_logp, cap) - clipped


def _trusted(logp: Tensor, old_logp: Tensor, adv: Tensor, outside: Tensor, cap: float) -> Tensor:
    """-sg(min(rho, cap)) A logp, 0 for tokens that are outside and would move further out."""
    d = _log_ratio(logp.detach(), old_logp)
    rho = torch.where((d * adv > 0) & outside, 0, d.exp().clamp(max=cap))
    return -rho * adv * _possible(logp, old_logp)


def dppo_tv(
    logp: Tensor, old_logp: Tensor, adv: Tensor, *, limit: Scalar = 0.15, cap: float = 20.0
) -> Tensor:
    """[*]: -sg(min(rho, cap)) A logp while |pi - pi_old| <= limit or the step leads back, else 0.

    The trust region is a bound on the total variation of "this token or another", so rare tokens may change
    by a large ratio and frequent ones may not. DPPO, arXiv 2602.04879.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    gap = (logp.detach().exp() - old_logp.exp()).abs()
    return _trusted(logp, old_logp, adv, gap > limit, cap)


def _log1mexp(logp: Tensor) -> Tensor:
    """log(1 - p), for p up to 1 - 1e-10."""
    return (-torch.expm1(logp)).clamp(min=1e-10).log()


def dppo_kl(
    logp: Tensor, old_logp: Tensor, adv: Tensor, *, limit: Scalar = 0.05, cap: float = 20.0
) -> Tensor:
    """[*]: `dppo_tv` with the KL of "this token or another" as the trust region [nats]:
    pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi)) <= limit. arXiv 2602.04879."""
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    new, p = logp.detach(), old_logp.exp()
    chosen = torch.where(p > 0, p * log_ratio(old_logp, new), 0)
    gap = chosen + (1 - p) * (_log1mexp(old_logp) - _log1mexp(new))
    return _trusted(logp, old_logp, adv, gap > limit, cap)


def kl_cov(logp: Tensor, old_logp: Tensor, adv: Tensor, chosen: Tensor, *, coef: Scalar = 1.0) -> Tensor:
    """[*]: -rho A + coef chosen KL(pi_old, pi): the few tokens in `chosen` (0 or 1), whose covariance of
    log-prob and advantage is the largest of the batch, are held back. KL-Cov, arXiv 2505.22617.

    `chosen` is data of the whole batch: `weight.top_share(weight.covariance(logp, adv, mask), mask,
    share=2e-3)`, carried to the loss by `experience(..., extra={"chosen": ...})`. (Clip-Cov drops such tokens
    instead: `weight.clip_cov`.)
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."), chosen=(chosen, "..."))
    return coef * chosen * _drift(logp, old_logp) - ratio(logp, old_logp) * adv
