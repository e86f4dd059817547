"""Normalisation as data: the mask of the whole global batch in, the weight of each token out.

The total loss is `(w * loss).sum()`: the denominator is inside w, so any cut of the batch (micro-batches,
packs, ranks) adds up to the same gradient. Compute w on the global batch (or on a whole minibatch), before
anything is cut. Each function gives [B, S] in the default float type and 0 outside mask; a batch without a
single token in mask gives zeros. B counts the rows that have a token in mask, so an all-masked row changes
nothing.

What corrects or selects tokens is a function from weights to weights, and composes: `w` in first place, `w`
out. None of them renormalises: the denominator stays that of the batch.

    w = weight.token_mean(mask)
    w = weight.truncated_is(w, old_logp, rollout.logp)            # old_logp: the trainer's own score
    w = weight.high_entropy(w, entropy, mask, share=0.2)
"""

import math

import torch
from torch import Tensor

from rft_fn import check, rng
from rft_fn.logprob import log_ratio

__all__ = [
    "clip_cov", "constant", "covariance", "high_entropy", "icepop", "importance", "importance_seq",
    "masked_is", "masked_is_seq", "off_policy_mask", "pair_mean", "seq_mean", "seq_sum", "token_mean",
    "top_share", "truncated_is", "truncated_is_seq",
]  # fmt: skip

_MOST = 1e6  # nats: beyond every log-ratio of tokens that both policies can draw


def _rows(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mask as float [B, S], tokens of each row [B, 1] >= 1, rows with a token [] >= 1)."""
    check.shapes(mask=(mask, "B S"))
    m = mask.to(torch.get_default_dtype())
    tokens = m.sum(-1, keepdim=True)
    return m, tokens.clamp(min=1), (tokens > 0).sum().clamp(min=1)


def token_mean(mask: Tensor) -> Tensor:
    """1 / tokens of the batch: every token counts the same (DAPO, arXiv 2503.14476)."""
    m, _, _ = _rows(mask)
    return m / m.sum().clamp(min=1)


def seq_mean(mask: Tensor) -> Tensor:
    """1 / (B tokens of the row): the mean over sequences of the mean over tokens (GRPO, arXiv 2402.03300)."""
    m, tokens, rows = _rows(mask)
    return m / (tokens * rows)


def seq_sum(mask: Tensor) -> Tensor:
    """1 / B: the mean over sequences of the sum over tokens: the policy gradient as the theorem has it."""
    m, _, rows = _rows(mask)
    return m / rows


def pair_mean(mask: Tensor) -> Tensor:
    """1 / (pairs, tokens of the pair): the mean over pairs of a loss that stands on each token of its pair.

    Rows 2i and 2i + 1 are a pair; one without a token in mask does not count. ValueError for an odd B.
    """
    if len(mask) % 2:
        raise ValueError(f"mask: expected an even number of rows, two a pair, got {len(mask)}")
    m, _, _ = _rows(mask)
    tokens = m.view(len(mask) // 2, -1).sum(-1)  # [pairs]
    pairs = (tokens > 0).sum().clamp(min=1)
    each = 1 / (tokens.clamp(min=1) * pairs)
    return m * each.repeat_interleave(2).unsqueeze(-1)


def constant(mask: Tensor, length: int) -> Tensor:
    """1 / (B length) with a fixed length, e.g. max_new: Dr. GRPO's, without
    a bias by length (arXiv 2503.20783)."""
    if length <= 0:
        raise ValueError(f"length: expected > 0 tokens, got {length}")
    m, _, rows = _rows(mask)
    return m / (rows * length)


def _log_ratio(old_logp: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """[...] nats, 0 outside mask. Finite above: the sum over a response that the policy excludes (-inf) stays
    -inf, whatever the sampler's log-probs are."""
    check.shapes(old_logp=(old_logp, "..."), logp=(logp, "..."), mask=(mask, "..."))
    return torch.where(mask, log_ratio(old_logp, logp), 0).clamp(max=_MOST)


def _ratio(w: Tensor, old_logp: Tensor, logp: Tensor) -> Tensor:
    check.shapes(w=(w, "..."), old_logp=(old_logp, "..."))
    return _log_ratio(old_logp, logp, w != 0).clamp(-20, 20).exp()


def _seq_ratio(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """[B, 1]: the ratio of whole responses, the product over their tokens."""
    check.shapes(w=(w, "B S"), mask=(mask, "B S"))
    return _log_ratio(old_logp, logp, mask).sum(-1, keepdim=True).clamp(-20, 20).exp()


def importance(w: Tensor, old_logp: Tensor, logp: Tensor) -> Tensor:
    """[...]: w pi_old / pi_sampler, token by token, the log-ratio bounded to +-20.

    With `old_logp` the proximal policy's, scored by the trainer, and `loss.ppo_clip` around it, this is
    decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): stale samples, clipped about a fresh policy.
    """
    return w * _ratio(w, old_logp, logp)


def truncated_is(w: Tensor, old_logp: Tensor, logp: Tensor, *, cap: float = 2.0) -> Tensor:
    """[...]: w min(pi_old / pi_sampler, cap): the mismatch of trainer (`old_logp`) and engine (`logp`,
    Rollout's own) as a weight. TIS."""
    return w * _ratio(w, old_logp, logp).clamp(max=cap)


def masked_is(w: Tensor, old_logp: Tensor, logp: Tensor, *, cap: float = 2.0) -> Tensor:
    """[...]: w pi_old / pi_sampler where that ratio is <= cap, else 0: tokens that the engine
    got too wrong are left out."""
    return icepop(w, old_logp, logp, low=0.0, high=cap)


def icepop(w: Tensor, old_logp: Tensor, logp: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """[...]: w pi_old / pi_sampler where that ratio is in [low, high], else 0: IcePop's band, which leaves
    out tokens wrong in either direction (arXiv 2510.18855)."""
    rho = _ratio(w, old_logp, logp)
    return torch.where((rho >= low) & (rho <= high), w * rho, 0)


def importance_seq(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """[B, S]: w times the ratio of the whole response, prod over mask of pi_old / pi_sampler: the only
    correction here without bias, and of a variance that grows with the length."""
    return w * _seq_ratio(w, old_logp, logp, mask)


def truncated_is_seq(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """[B, S]: w min(ratio of the whole response, cap)."""
    return w * _seq_ratio(w, old_logp, logp, mask).clamp(max=cap)


def masked_is_seq(w: Tensor, old_logp: Tensor, logp: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """[B, S]: w times the ratio of the whole response where that is <= cap, else 0 for all its tokens."""
    rho = _seq_ratio(w, old_logp, logp, mask)
    return torch.where(rho <= cap, w * rho, 0)


def off_policy_mask(
    w: Tensor, old_logp: Tensor, logp: Tensor, adv: Tensor, mask: Tensor, *, limit: float
) -> Tensor:
    """[B, S]: w, but 0 for a response with adv < 0 whose mean log(pi_sampler / pi_old) is above `limit`
    [nats a token]: what the policy has already left need not be pushed further away.

    `old_logp` is the policy's that is updated. DeepSeek-V3.2, arXiv 2512.02556; the paper gives no number.
    adv [B, S] or [B, 1].
    """
    check.shapes(w=(w, "B S"), mask=(mask, "B S"), adv=(adv[..., :1], "B 1"))
    tokens = mask.sum(-1, keepdim=True).clamp(min=1)
    gone = -_log_ratio(old_logp, logp, mask).sum(-1, keepdim=True) / tokens > limit
    return torch.where(gone & (adv < 0), 0, w)


def top_share(x: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """[B, S] bool: the ceil(share tokens) largest x of the whole batch in mask; ties go to the first."""
    check.shapes(x=(x, "B S"), mask=(mask, "B S"))
    if not 0 < share <= 1:
        raise ValueError(f"share: expected 0 < share <= 1, got {share}")
    ranked = torch.where(mask, x, -torch.inf).flatten().sort(descending=True, stable=True).indices
    rank = ranked.argsort()  # the inverse of a permutation
    count = (mask.sum().double() * share - 1e-9).ceil()  # 0.2 * 15 is 3.0000000000000004
    return mask & (rank.view_as(mask) < count)


def high_entropy(w: Tensor, entropy: Tensor, mask: Tensor, *, share: float = 0.2) -> Tensor:
    """[B, S]: w on the `share` of the batch's tokens with the highest entropy, 0 on the others. arXiv
    2506.01939: the forks of an argument are few, and they alone carry the learning.

    Over the batch and not over each response, and the denominator in w stays, both as in the paper.
    """
    check.shapes(w=(w, "B S"), entropy=(entropy, "B S"))
    return torch.where(top_share(entropy, mask, share=share), w, 0)


def covariance(logp: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    """[B, S]: (logp - mean)(adv - mean), means over mask, 0 outside: each token's part in the covariance that
    drives the entropy down (arXiv 2505.22617)."""
    check.shapes(logp=(logp, "B S"), adv=(adv, "B S"), mask=(mask, "B S"))
    tokens = mask.sum().clamp(min=1)
    centre = lambda x: x - torch.where(mask, x, 0).sum() / tokens  # noqa: E731
    return torch.where(mask, centre(logp) * centre(adv), 0)


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
    """[B, S]: w, but 0 on ceil(share tokens) tokens drawn by `key` from those whose `covariance` lies in
    [low, high], or on all of these where they are fewer. Clip-Cov, arXiv 2505.22617."""
    check.shapes(w=(w, "B S"), cov=(cov, "B S"), mask=(mask, "B S"))
    inside = mask & (cov >= low) & (cov <= high)
    drawn = torch.zeros(mask.shape, device=mask.device)
    # a number for each token in mask and none for padding: the draw does not depend on the padded length
    drawn[mask] = torch.rand(int(mask.sum()), generator=rng.generator(key)).to(mask.device)
    count = math.ceil(share * int(mask.sum()) - 1e-9)
    ranked = torch.where(inside, drawn, -1.0).flatten().sort(descending=True, stable=True).indices
    dropped = torch.zeros_like(mask).flatten()
    dropped[ranked[:count]] = True
    return torch.where(dropped.view_as(mask) & inside, 0, w)
