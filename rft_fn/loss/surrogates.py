"""Policy losses of other papers: whole sequences, soft gates, trust regions, regressions.

A is the advantage and rho = pi / pi_old, bounded as in `policy`. At rho = 1 every loss has the gradient of
-A logp.
"""

import math

import torch
from torch import Tensor

from rft_fn import check, segment
from rft_fn.logprob import log_ratio
from rft_fn.loss.policy import MAX_LOG_RATIO, Scalar, between, clipped, ratio

__all__ = [
    "a_star", "cispo", "cpgd", "dppo_kl", "dppo_tv", "dro", "gmpo", "gspo", "gspo_token", "kl_cov",
    "proximal_logp", "sapo", "seq_ratio", "vespo", "with_observed",
]  # fmt: skip


def _possible(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Return logp, but 0 where both policies exclude the token.

    There it has no gradient either: 0 * -inf would be NaN.
    """
    return torch.where((logp == -torch.inf) & (old_logp == -torch.inf), 0, logp)


def seq_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, seq: Tensor, num_seqs: int) -> Tensor:
    """Return the geometric mean ratio of each token's sequence, [T].

    (pi(y) / pi_old(y))^(1 / |y|)
    """
    check.shapes(logp=(logp, "T"), old_logp=(old_logp, "T"), mask=(mask, "T"), seq=(seq, "T"))
    mean = segment.mean(log_ratio(logp, old_logp, limit=MAX_LOG_RATIO), mask, seq, num_seqs)
    return mean[seq].exp()


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
    """Return GSPO's loss [T], which clips whole sequences.

        -min(s A, clip(s, 1 - low, 1 + high) A),    s = seq_ratio

    It is the paper's objective under `weight.seq_mean`, with one advantage per sequence; under `token_mean`
    long sequences count more. arXiv 2507.18071.

    Limits:
        low: the sequence's ratio is clipped at 1 - low
        high: the sequence's ratio is clipped at 1 + high
    """
    check.shapes(logp=(logp, "T"), adv=(adv, "T"))
    return clipped(seq_ratio(logp, old_logp, mask, seq, num_seqs), adv, low, high)


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
    """Return GSPO's loss with advantages per token, [T].

        s[t] = sg(s) pi[t] / sg(pi[t]),    s = seq_ratio

    s[t] has the value of the sequence's ratio and the gradient of the token's. With one advantage per
    sequence, value and gradient under `weight.seq_mean` equal `gspo`'s. arXiv 2507.18071, section 4.3.

    Limits:
        low: the sequence's ratio is clipped at 1 - low
        high: the sequence's ratio is clipped at 1 + high
    """
    check.shapes(logp=(logp, "T"), adv=(adv, "T"))
    s = seq_ratio(logp.detach(), old_logp, mask, seq, num_seqs)
    return clipped(s * log_ratio(logp, logp.detach()).exp(), adv, low, high)


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
    """Return GMPO's loss [T], with the geometric mean of clipped ratios.

        -A exp(mean over the sequence of d)
        d = min(log rho, high) where A > 0, else max(log rho, -low)    [nats]

    Without limits it is `gspo` without limits. It is the paper's objective under `weight.seq_mean`. arXiv
    2507.20673.

    Limits:
        low: the log-ratio is clipped at -low
        high: the log-ratio is clipped at high
    """
    check.shapes(logp=(logp, "T"), old_logp=(old_logp, "T"), adv=(adv, "T"), mask=(mask, "T"), seq=(seq, "T"))
    d = log_ratio(logp, old_logp, limit=MAX_LOG_RATIO)
    d = torch.where(adv > 0, d.clamp(max=high), d.clamp(min=-low))
    return -adv * segment.mean(d, mask, seq, num_seqs)[seq].exp()


def cispo(logp: Tensor, old_logp: Tensor, adv: Tensor, *, low: Scalar = 1.0, high: Scalar = 4.0) -> Tensor:
    """Return CISPO's loss with clipped weights, [*].

    A token with a clipped weight keeps its gradient:

        -sg(clip(rho, 1 - low, 1 + high)) A logp

    low = 1 is no lower limit, as in the paper, which gives no number for `high`: 4 is ours. Systems differ:
    TRL's epsilon_high is the cap itself, so their 5 is 4 here. arXiv 2506.13585.

    Limits:
        low: the weight is clipped at 1 - low; 1 is no limit
        high: the weight is clipped at 1 + high
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    weight = between(ratio(logp.detach(), old_logp), 1 - low, 1 + high)
    return -weight * adv * _possible(logp, old_logp)


def sapo(
    logp: Tensor, old_logp: Tensor, adv: Tensor, *, tau_pos: Scalar = 1.0, tau_neg: Scalar = 1.05
) -> Tensor:
    """Return SAPO's loss with a soft gate, [*].

        -f(rho) A,    f(rho) = 4 / tau sigmoid(tau (rho - 1))

    tau is tau_pos where A > 0, else tau_neg. f' is 1 at rho = 1 and falls off on both sides. arXiv
    2511.20347.

    Limits:
        tau_pos: steepness of the gate where A > 0
        tau_neg: steepness of the gate where A <= 0
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    rho = ratio(logp, old_logp)

    def gate(tau: Scalar) -> Tensor:
        return 4 / tau * torch.sigmoid(tau * (rho - 1))

    return -torch.where(adv > 0, gate(tau_pos), gate(tau_neg)) * adv


def _drift(logp: Tensor, old_logp: Tensor, cap: float = math.inf) -> Tensor:
    """Return KL(pi_old, pi) from samples of pi_old, [*].

    This is rho - 1 - log rho, which is unbiased. Its gradient (rho - 1) grad logp is unbiased too; the
    factor rho - 1 is bounded by `cap`.
    """
    d = log_ratio(logp, old_logp, limit=MAX_LOG_RATIO)
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
    """Return CPGD's clipped policy gradient with a drift, [*].

        -min(d A, clip(d, log(1 - low), log(1 + high)) A) + drift KL(pi_old, pi),    d = log rho

    The policy gradient itself is clipped, so no ratio multiplies it. The KL (rho - 1 - log rho, with the
    factor rho - 1 of its gradient bounded by `cap`) pulls back what has gone too far. arXiv 2505.12504; the
    values of `drift` and `cap` are ours.

    Limits:
        low: the ratio is clipped at 1 - low
        high: the ratio is clipped at 1 + high
        drift: coefficient of KL(pi_old, pi)
        cap: bound of the factor rho - 1 in the gradient of that KL
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    d = log_ratio(logp, old_logp, limit=MAX_LOG_RATIO)
    least = math.log(1 - low) if low < 1 else -math.inf
    clipped = torch.minimum(d * adv, d.clamp(least, math.log(1 + high)) * adv)
    return drift * _drift(logp, old_logp, cap) - clipped


def _trusted(logp: Tensor, old_logp: Tensor, adv: Tensor, outside: Tensor, cap: float) -> Tensor:
    """Return DPPO's loss, given which tokens are outside of the trust region.

    This is -sg(min(rho, cap)) A logp, but 0 on tokens that are outside and would move further out.
    """
    d = log_ratio(logp.detach(), old_logp, limit=MAX_LOG_RATIO)
    rho = torch.where((d * adv > 0) & outside, 0, d.exp().clamp(max=cap))
    return -rho * adv * _possible(logp, old_logp)


def dppo_tv(
    logp: Tensor, old_logp: Tensor, adv: Tensor, *, limit: Scalar = 0.15, cap: float = 20.0
) -> Tensor:
    """Return DPPO's loss with a total variation trust region, [*].

        -sg(min(rho, cap)) A logp if |pi - pi_old| <= limit or the step leads back, else 0

    The trust region bounds the total variation of the choice "this token or another", so rare tokens may
    change by a large ratio and frequent ones may not. arXiv 2602.04879.

    Limits:
        limit: total variation outside of which a token stops
        cap: the ratio is at most cap
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    gap = (logp.detach().exp() - old_logp.exp()).abs()
    return _trusted(logp, old_logp, adv, gap > limit, cap)


def _log1mexp(logp: Tensor) -> Tensor:
    """Return log(1 - p), for p up to 1 - 1e-10."""
    return (-torch.expm1(logp)).clamp(min=1e-10).log()


def dppo_kl(
    logp: Tensor, old_logp: Tensor, adv: Tensor, *, limit: Scalar = 0.05, cap: float = 20.0
) -> Tensor:
    """Return DPPO's loss with a KL trust region, [*].

    As `dppo_tv`, with the KL of the choice "this token or another" [nats] in place of the total variation:

        pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi)) <= limit

    arXiv 2602.04879.

    Limits:
        limit: KL outside of which a token stops [nats]
        cap: the ratio is at most cap
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    new = logp.detach()
    p = old_logp.exp()
    chosen = torch.where(p > 0, p * log_ratio(old_logp, new), 0)
    gap = chosen + (1 - p) * (_log1mexp(old_logp) - _log1mexp(new))
    return _trusted(logp, old_logp, adv, gap > limit, cap)


def kl_cov(logp: Tensor, old_logp: Tensor, adv: Tensor, chosen: Tensor, *, coef: Scalar = 1.0) -> Tensor:
    """Return the KL-Cov loss, [*].

    A KL penalty holds back the tokens in `chosen`:

        -rho A + coef chosen KL(pi_old, pi)

    `chosen` (0 or 1) marks the few tokens with the largest covariance of log-prob and advantage in the
    batch: `weight.top_share(weight.covariance(logp, adv, mask), mask, share=2e-3)`, carried to the loss by
    `experience(..., extra={"chosen": ...})`. `weight.clip_cov` drops such tokens instead. arXiv 2505.22617.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."), chosen=(chosen, "..."))
    return coef * chosen * _drift(logp, old_logp) - ratio(logp, old_logp) * adv


def vespo(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    seq: Tensor,
    num_seqs: int,
    *,
    k_pos: Scalar = 2.0,
    lambda_pos: Scalar = 3.0,
    k_neg: Scalar = 3.0,
    lambda_neg: Scalar = 2.0,
) -> Tensor:
    """Return VESPO's loss [T], with soft weights of whole responses.

        -sg(W^k e^(lambda (1 - W))) A logp,    W = pi(y) / pi_old(y), without a root by the length

    k and lambda are k_pos and lambda_pos where A >= 0, else k_neg and lambda_neg. The weight is 1 at W = 1
    and falls to 0 on both sides, sooner for large ratios; log W is bounded to +-20. The paper sums over
    tokens (`weight.seq_sum`), TRL divides by the tokens of the batch. arXiv 2602.10693.

    Limits:
        k_pos: how fast the weight of a small ratio falls where A >= 0
        lambda_pos: how fast the weight of a large ratio falls where A >= 0
        k_neg: how fast the weight of a small ratio falls where A < 0
        lambda_neg: how fast the weight of a large ratio falls where A < 0
    """
    check.shapes(logp=(logp, "T"), old_logp=(old_logp, "T"), adv=(adv, "T"), mask=(mask, "T"), seq=(seq, "T"))
    total = segment.sum(log_ratio(logp.detach(), old_logp, limit=MAX_LOG_RATIO), mask, seq, num_seqs)
    d = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[seq]

    def weight(k: Scalar, lambda_: Scalar) -> Tensor:
        return (k * d + lambda_ * (1 - d.exp())).exp()

    kept = torch.where(adv >= 0, weight(k_pos, lambda_pos), weight(k_neg, lambda_neg))
    return -kept * adv * _possible(logp, old_logp)


def dro(logp: Tensor, old_logp: Tensor, adv: Tensor, *, beta: Scalar = 0.1) -> Tensor:
    """Return the DRO loss, [*].

        -(A logp - beta / 2 log(rho)^2)

    The policy gradient without a ratio, and a quadratic hold on the old policy. This is the form of tokens
    that verl and tinker have; the paper's is of whole responses, (r - V - beta log rho(y))^2 / 2 with a value
    that is learned (`a_star` is of that form). The number for beta is ours. arXiv 2405.19107.

    Limits:
        beta: strength of the hold on the old policy
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."), adv=(adv, "..."))
    d = log_ratio(logp, old_logp, limit=MAX_LOG_RATIO)
    return 0.5 * beta * d.square() - adv * _possible(logp, old_logp)


def a_star(
    logp: Tensor,
    ref_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    seq: Tensor,
    num_seqs: int,
    *,
    beta: Scalar = 1e-3,
) -> Tensor:
    """Return A*-PO's loss of whole responses on their tokens, [T].

        (beta log(pi(y) / ref(y)) - A)^2,    A = r - V*: `advantage.a_star`

    A regression: no ratio, no clip. It is the paper's objective under `weight.seq_mean`, with one advantage
    per response. arXiv 2505.20686. ValueError without ref_logp.

    Limits:
        beta: strength of the hold on the reference
    """
    check.given(ref_logp=ref_logp)
    check.shapes(logp=(logp, "T"), ref_logp=(ref_logp, "T"), adv=(adv, "T"), mask=(mask, "T"), seq=(seq, "T"))
    gap = segment.sum(log_ratio(logp, ref_logp, limit=MAX_LOG_RATIO), mask, seq, num_seqs)
    return (beta * gap[seq] - adv).square()


def proximal_logp(logp: Tensor, old_logp: Tensor, share: float | Tensor) -> Tensor:
    """Return log-probs of a policy between two others, without gradient, [*] nats.

        old + share (logp - old)

    `share` is a number or broadcasts against [*]: (v_prox - v_old) / (v - v_old) by the versions of the
    weights, where `old_logp` are the sampler's. It takes the place of a forward of the proximal policy in
    decoupled PPO: `weight.importance(w, prox, old_logp)` and `ppo_clip(logp, prox, adv)`. A-3PO, arXiv
    2512.06547; AReaL's `loglinear`.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."))
    share = torch.as_tensor(share, dtype=logp.dtype, device=logp.device).clamp(0, 1)
    return old_logp + share * log_ratio(logp.detach(), old_logp)


def with_observed(loss: Tensor, logp: Tensor, observed: Tensor) -> Tensor:
    """Return a loss of actions, with -logp on the tokens that an environment wrote, [*].

    ECHO: the policy also learns to predict what it observes. `observed` (0 or 1) comes from
    `experience(..., extra={"observed": ...})` of a rollout with `mask | observed` as mask, and the weight of
    each kind has its own count: `weight.token_mean(acted) + alpha * weight.token_mean(observed)`.
    """
    check.shapes(loss=(loss, "..."), logp=(logp, "..."), observed=(observed, "..."))
    return torch.where(observed > 0, -logp, loss)
