"""Corrections of weights for samples of another policy, and selections of tokens and responses.

Each takes w and returns a new w, so they compose. None of them renormalises: the denominator stays that of
the batch. In corrections `old_logp` is the trainer's log-prob pi_old and `logp` is `Rollout.logp`, the
sampler's pi_sampler. Log-ratios are bounded to +-20 before exp.
"""

import math

import torch
from torch import Tensor

from rft_fn import check, rng
from rft_fn.logprob import log_ratio
from rft_fn.loss.policy import MAX_LOG_RATIO, ratio

__all__ = [
    "clip_cov", "covariance", "geometric_mask", "high_entropy", "icepop", "importance", "importance_seq",
    "masked_is", "masked_is_seq", "off_policy_mask", "row_max", "row_mean", "row_sum",
    "second_moment_mask", "self_normalized", "top_share", "truncated_is", "truncated_is_seq",
    "trust_region_mask", "within",
]  # fmt: skip

_MOST = 1e6  # nats, beyond every log-ratio of tokens that both policies can draw


def _token_ratio(w: Tensor, old_logp: Tensor, logp: Tensor) -> Tensor:
    """Return the ratio pi_old / pi_sampler of each token [...], or 1 where w is 0."""
    check.shapes(w=(w, "..."), old_logp=(old_logp, "..."), logp=(logp, "..."))
    return torch.where(w != 0, ratio(old_logp, logp), 1)


def _seq_log_ratio(old_logp: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """Return the log-ratio of whole responses, [B, 1] nats.

    This is the sum of log(pi_old / pi_sampler) over mask.
    """
    check.shapes(old_logp=(old_logp, "..."), logp=(logp, "..."), mask=(mask, "..."))
    each = torch.where(mask, log_ratio(old_logp, logp), 0)
    # with no +inf in the sum, a response that the policy excludes (-inf) stays excluded
    return each.clamp(max=_MOST).sum(-1, keepdim=True)


def _seq_ratio(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """Return the probability ratio of whole responses, [B, 1]."""
    check.shapes(w=(w, "B S"), mask=(mask, "B S"))
    return _seq_log_ratio(old_logp, logp, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance(w: Tensor, old_logp: Tensor, logp: Tensor) -> Tensor:
    """Weigh by importance sampling per token, [...].

    Multiplies w by pi_old / pi_sampler. With `old_logp` of the proximal policy, scored by the trainer, and
    `loss.ppo_clip` around it, this is decoupled PPO: stale samples, clipped about a fresh policy. arXiv
    2110.00641; AReaL, arXiv 2505.24298.
    """
    return w * _token_ratio(w, old_logp, logp)


def truncated_is(w: Tensor, old_logp: Tensor, logp: Tensor, *, cap: float = 2.0) -> Tensor:
    """Weigh by truncated importance sampling (TIS) per token, [...].

    Multiplies w by min(pi_old / pi_sampler, cap), which corrects the mismatch of trainer and engine.
    """
    return w * _token_ratio(w, old_logp, logp).clamp(max=cap)


def masked_is(w: Tensor, old_logp: Tensor, logp: Tensor, *, cap: float = 2.0) -> Tensor:
    """Weigh by masked importance sampling per token, [...].

    Multiplies w by pi_old / pi_sampler, and drops tokens with a ratio above the cap.
    """
    return icepop(w, old_logp, logp, low=0.0, high=cap)


def icepop(w: Tensor, old_logp: Tensor, logp: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """Weigh by IcePop's band of ratios per token, [...].

    Multiplies w by pi_old / pi_sampler, and drops tokens with a ratio outside [low, high]. arXiv
    2510.18855.
    """
    rho = _token_ratio(w, old_logp, logp)
    return torch.where((rho >= low) & (rho <= high), w * rho, 0)


def importance_seq(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """Weigh by importance sampling per response, [B, S].

    Multiplies w by the product of the ratios of a response. This is the only correction here without bias;
    its variance grows with the length.
    """
    return w * _seq_ratio(w, old_logp, logp, mask)


def truncated_is_seq(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """Weigh by truncated importance sampling per response, [B, S].

    Multiplies w by min(ratio of the response, cap).
    """
    return w * _seq_ratio(w, old_logp, logp, mask).clamp(max=cap)


def masked_is_seq(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """Weigh by masked importance sampling per response, [B, S].

    Multiplies w by the ratio of the response, and drops responses with a ratio above the cap.
    """
    rho = _seq_ratio(w, old_logp, logp, mask)
    return torch.where(rho <= cap, w * rho, 0)


def self_normalized(w: Tensor, before: Tensor) -> Tensor:
    """Scale corrected weights so that their sum is what it was `before` the correction, [B, S].

        w sum(before) / sum(w)

    The mean ratio, or what is left of it after a mask, is then 1: the size of a step does not hang on how far
    the sampler is away. verl's batch normalisation. All 0 stays so. Biased, and it needs the whole batch.
    """
    check.shapes(w=(w, "B S"), before=(before, "B S"))
    total = w.sum()
    return w * (before.sum() / torch.where(total != 0, total, 1))


def within(w: Tensor, x: Tensor, *, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Drop what has a number outside [low, high], [B, S].

    `x` [B, S] is of tokens, or [B, 1] of whole responses (`row_mean`, `row_sum`, `row_max`). Chained, each
    mask narrows the one before it; k1, k2 and k3 of the sampler to the trainer are `loss.kl_k1(logp,
    old_logp)` and so on:

        w = within(w, row_mean(loss.kl_k3(logp, old_logp), mask), high=0.01)    # whole responses
        w = within(w, loss.kl_k2(logp, old_logp), high=2.0)                     # and single tokens
    """
    check.shapes(w=(w, "B S"), x=(x.expand(w.shape), "B S"))
    return torch.where((x >= low) & (x <= high), w, 0)


def row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over the tokens in mask of each row, [B, S] -> [B, 1]."""
    check.shapes(x=(x, "B S"), mask=(mask, "B S"))
    return torch.where(mask, x, 0).sum(-1, keepdim=True)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens in mask of each row, [B, S] -> [B, 1]; 0 without any."""
    return row_sum(x, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def row_max(x: Tensor, mask: Tensor) -> Tensor:
    """Return the largest over the tokens in mask of each row, [B, S] -> [B, 1]; 0 without any."""
    check.shapes(x=(x, "B S"), mask=(mask, "B S"))
    top = torch.where(mask, x, -torch.inf).amax(-1, keepdim=True)
    return torch.where(mask.any(-1, keepdim=True), top, 0)


def geometric_mask(
    w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor, *, low: float = 0.99, high: float = 1.01
) -> Tensor:
    """Drop responses by the geometric mean of their ratios, [B, S].

    w is set to 0 unless (pi_old(y) / pi_sampler(y))^(1 / |y|) is in [low, high]; it is not multiplied. A long
    response is judged as a short one, where the product of `masked_is_seq` drops nearly all of them. The
    limits are SkyRL's.
    """
    mean = row_mean(log_ratio(old_logp, logp).nan_to_num(0.0, _MOST, -_MOST), mask)
    return within(w, mean, low=math.log(low) if low > 0 else -math.inf, high=math.log(high))


def trust_region_mask(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor, *, limit: float) -> Tensor:
    """Drop responses with any token far from the sampler, [B, S].

    w is set to 0 on a response unless log(pi_old / pi_sampler)^2 / 2, which estimates the KL of a token, is
    at most `limit` on all of its tokens: one token outside voids the bound of the whole. Trust region
    masking, arXiv 2512.23075, whose divergence is exact where the sampler's distributions are at hand.
    """
    gap = log_ratio(old_logp, logp).nan_to_num(0.0, _MOST, -_MOST)
    return within(w, row_max(0.5 * gap.square(), mask), high=limit)


def second_moment_mask(
    w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor, *, limit: float = 0.04
) -> Tensor:
    """Drop the tokens with the largest log-ratios until their mean square is at most a limit, [B, S].

    Over the whole batch: the tokens in mask are sorted by log(pi_old / pi_sampler)^2, and the most are kept
    whose mean is at most `limit`. M2PO, arXiv 2510.01161, with its 0.04; its loss on what is left is the
    unclipped ratio: `ppo_clip(low=1, high=inf)`. The authors' code caps ratios instead, AReaL's drops.
    """
    gap = log_ratio(old_logp, logp).nan_to_num(0.0, _MOST, -_MOST)
    check.shapes(w=(w, "B S"), mask=(mask, "B S"), old_logp=(gap, "B S"))
    size = gap.double().square()
    ranked = torch.where(mask, size, torch.inf).flatten().sort().values
    mean = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1, device=w.device)
    return torch.where(_least(size, mask, (mean <= limit).sum()), w, 0)


def off_policy_mask(
    w: Tensor, old_logp: Tensor, logp: Tensor, adv: Tensor, mask: Tensor, *, limit: float
) -> Tensor:
    """Drop bad responses that the policy has left, [B, S].

    w is set to 0 on responses with adv < 0 whose mean log(pi_sampler / pi_old) exceeds `limit` [nats per
    token]: they need not be pushed further away. `old_logp` is that of the policy being updated; adv is [B,
    S] or [B, 1]. DeepSeek-V3.2, arXiv 2512.02556, which gives no number for the limit.
    """
    check.shapes(w=(w, "B S"), mask=(mask, "B S"), adv=(adv[..., :1], "B 1"))
    tokens = mask.sum(-1, keepdim=True).clamp(min=1)
    gone = -_seq_log_ratio(old_logp, logp, mask) / tokens > limit
    return torch.where(gone & (adv < 0), 0, w)


def top_share(x: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """Mark the tokens with the largest x, [B, S] bool.

    Chooses ceil(share tokens) tokens in mask, over the whole batch. Ties go to the first. ValueError unless
    0 < share <= 1.
    """
    check.shapes(x=(x, "B S"), mask=(mask, "B S"))
    if not 0 < share <= 1:
        raise ValueError(f"share: expected 0 < share <= 1, got {share}")
    count = (mask.sum().double() * share - 1e-9).ceil().long()  # 0.2 * 15 is 3.0000000000000004
    return _least(-x, mask, count)


def _least(x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Mark the `count` [] smallest x in mask, [B, S] bool; ties go to the first."""
    # a sort of the numbers alone: kthvalue would be faster, and wants a count that the host has read
    ranked = torch.where(mask, x, torch.inf).flatten().sort().values
    last = ranked.gather(0, (count - 1).clamp(min=0).unsqueeze(0))
    below, equal = mask & (x < last), mask & (x == last)
    return below | (equal & (equal.flatten().cumsum(0).view_as(mask) <= count - below.sum()))


def high_entropy(w: Tensor, entropy: Tensor, mask: Tensor, *, share: float = 0.2) -> Tensor:
    """Keep the tokens with the highest entropy, [B, S].

    The few tokens at which an argument forks carry most of the learning. `share` is of the tokens of the
    batch, not of each response, and the denominator in w stays, both as in the paper. arXiv 2506.01939.
    """
    check.shapes(w=(w, "B S"), entropy=(entropy, "B S"))
    return torch.where(top_share(entropy, mask, share=share), w, 0)


def covariance(logp: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    """Return each token's covariance of log-prob and advantage, [B, S].

        (logp - mean)(adv - mean), means over mask; 0 outside

    This covariance drives the entropy down. arXiv 2505.22617.
    """
    check.shapes(logp=(logp, "B S"), adv=(adv, "B S"), mask=(mask, "B S"))
    tokens = mask.sum().clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        return x - torch.where(mask, x, 0).sum() / tokens

    return torch.where(mask, centred(logp) * centred(adv), 0)


def clip_cov(
    w: Tensor,
    cov: Tensor,
    mask: Tensor,
    key: int,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """Drop random tokens by Clip-Cov, [B, S].

    `key` draws ceil(share tokens) tokens to drop from those with `cov` in [low, high], or all of these if
    they are fewer. `covariance` gives cov. arXiv 2505.22617.
    """
    check.shapes(w=(w, "B S"), cov=(cov, "B S"), mask=(mask, "B S"))
    inside = mask & (cov >= low) & (cov <= high)
    count = math.ceil(share * int(mask.sum()) - 1e-9)

    # only tokens in mask get a number, so the draw does not depend on the padded length
    drawn = torch.zeros(mask.shape, device=mask.device)
    drawn[mask] = torch.rand(int(mask.sum()), generator=rng.generator(key)).to(mask.device)

    return torch.where(_least(-drawn, inside, inside.sum().clamp(max=count)), 0, w)
