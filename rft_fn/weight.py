"""Normalisation as data: the mask of the whole global batch in, the weight of each token out.

The total loss is `(w * loss).sum()`: the denominator is inside w, so any cut of the batch (micro-batches,
packs, ranks) adds up to the same gradient. Compute w on the global batch (or on a whole minibatch), before
anything is cut. Each function gives [B, S] in the default float type and 0 outside mask; a batch without a
single token in mask gives zeros. B counts the rows that have a token in mask, so an all-masked row changes
nothing.
"""

import torch
from torch import Tensor

from rft_fn import check

__all__ = ["constant", "masked_is", "seq_mean", "seq_sum", "token_mean", "truncated_is"]


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


def constant(mask: Tensor, length: int) -> Tensor:
    """1 / (B length) with a fixed length, e.g. max_new: Dr. GRPO's, without
    a bias by length (arXiv 2503.20783)."""
    if length <= 0:
        raise ValueError(f"length: expected > 0 tokens, got {length}")
    m, _, rows = _rows(mask)
    return m / (rows * length)


def _log_ratio(w: Tensor, old_logp: Tensor, logp: Tensor) -> Tensor:
    check.shapes(w=(w, "..."), old_logp=(old_logp, "..."), logp=(logp, "..."))
    return torch.where(w != 0, old_logp - logp, 0).clamp(-20, 20)


def truncated_is(w: Tensor, old_logp: Tensor, logp: Tensor, *, cap: float = 2.0) -> Tensor:
    """w min(pi_old / pi_sampler, cap): the mismatch of trainer (`old_logp`) and engine (`logp`, Rollout's
    own) as a weight."""
    return w * _log_ratio(w, old_logp, logp).exp().clamp(max=cap)


def masked_is(w: Tensor, old_logp: Tensor, logp: Tensor, *, cap: float = 2.0) -> Tensor:
    """w pi_old / pi_sampler where that ratio is <= cap, else 0: tokens that the engine
    got too wrong are left out."""
    ratio = _log_ratio(w, old_logp, logp).exp()
    return torch.where(ratio <= cap, w * ratio, 0)
