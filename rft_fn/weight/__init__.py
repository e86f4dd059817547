"""Token weights, which hold the normalisation of a batch as data.

The total loss is `(w * loss).sum()`: the denominator is inside w, so any cut of the batch (micro-batches,
packs, ranks) adds up to the same gradient. Compute w on the whole global batch, or on a whole minibatch,
before it is cut. Normalisers turn mask [B, S] bool into w [B, S] of the default float type, 0 outside mask.
B counts the rows that have a token in mask, so a row without one changes nothing; a batch without any gives
zeros.

Corrections and selections take w first and return a new w, so they compose. None of them renormalises: the
denominator stays that of the batch.

    w = weight.token_mean(mask)
    w = weight.truncated_is(w, old_logp, rollout.logp)            # old_logp: scored by the trainer
    w = weight.high_entropy(w, entropy, mask, share=0.2)

In corrections `old_logp` is the trainer's log-prob pi_old and `logp` is `Rollout.logp`, the sampler's
pi_sampler. Log-ratios are bounded to +-20 before exp.
"""

from rft_fn.weight.averages import (
    constant,
    get_weight,
    pair_mean,
    seq_mean,
    seq_sum,
    token_mean,
    unit_mean,
    unit_sum,
)
from rft_fn.weight.reweighting import (
    clip_cov,
    covariance,
    geometric_mask,
    high_entropy,
    icepop,
    importance,
    importance_seq,
    masked_is,
    masked_is_seq,
    off_policy_mask,
    row_max,
    row_mean,
    row_sum,
    second_moment_mask,
    self_normalized,
    top_share,
    truncated_is,
    truncated_is_seq,
    trust_region_mask,
    within,
)

__all__ = [
    "clip_cov", "constant", "covariance", "geometric_mask", "get_weight", "high_entropy", "icepop",
    "importance", "importance_seq", "masked_is", "masked_is_seq", "off_policy_mask", "pair_mean",
    "row_max", "row_mean", "row_sum", "second_moment_mask", "self_normalized", "seq_mean", "seq_sum",
    "token_mean", "top_share", "truncated_is", "truncated_is_seq", "trust_region_mask", "unit_mean",
    "unit_sum", "within",
]  # fmt: skip
