"""Losses, one number per token.

They take and return [*], without average or mask. The average is in `w` (`rft_fn.weight`). `packing.pack`
sets every field to 0 outside mask and a bound model gives log-prob 0 there, so nothing here needs a guard.
`adv`, `old_logp`, `ref_logp` and `ret` are data and carry no gradient. A loss with one ratio per sequence
repeats its number on each token: under `weight.seq_mean` they add up to the mean over sequences. Limits and
coefficients may be tensors [], so that `torch.func.vmap` can sweep them.
"""

from rft_fn.loss.distill import (
    DIVERGENCES,
    divergence,
    forward_kl,
    jsd,
    skew_forward_kl,
    skew_reverse_kl,
    teacher_advantage,
    top_1_agreement,
    with_tail,
)
from rft_fn.loss.evaluate import token_gradient, without_gradient
from rft_fn.loss.kl import (
    adaptive_entropy,
    entropy_bonus,
    kl,
    kl_k1,
    kl_k2,
    kl_k3,
    reverse_kl,
    reverse_kl_top_k,
)
from rft_fn.loss.labelled import Labels, bco, kto
from rft_fn.loss.policy import ppo_clip, ratio, reinforce
from rft_fn.loss.preference import (
    apo_down,
    apo_zero,
    bco_pair,
    cpo,
    dpo,
    exo,
    hinge,
    ipo,
    length_desensitized,
    nca,
    online_dpo,
    orpo,
    robust_dpo,
    rpo,
    simpo,
    sppo,
)
from rft_fn.loss.preference_table import PREFERENCES, Preference
from rft_fn.loss.surrogates import (
    a_star,
    cispo,
    cpgd,
    dppo_kl,
    dppo_tv,
    dro,
    gmpo,
    gspo,
    gspo_token,
    kl_cov,
    proximal_logp,
    sapo,
    seq_ratio,
    vespo,
    with_observed,
)
from rft_fn.loss.targets import (
    bradley_terry,
    centering,
    hps,
    log_exp,
    nll,
    plackett_luce,
    score_bce,
    score_mse,
    value_clip,
)

__all__ = [
    "DIVERGENCES", "PREFERENCES", "Labels", "Preference", "a_star", "adaptive_entropy", "apo_down",
    "apo_zero", "bco", "bco_pair", "bradley_terry", "centering", "cispo", "cpgd", "cpo", "divergence",
    "dpo", "dppo_kl", "dppo_tv", "dro", "entropy_bonus", "exo", "forward_kl", "gmpo", "gspo",
    "gspo_token", "hinge", "hps", "ipo", "jsd", "kl", "kl_cov", "kl_k1", "kl_k2", "kl_k3", "kto",
    "length_desensitized", "log_exp", "nca", "nll", "online_dpo", "orpo", "plackett_luce", "ppo_clip",
    "proximal_logp", "ratio", "reinforce", "reverse_kl", "reverse_kl_top_k", "robust_dpo", "rpo", "sapo",
    "score_bce", "score_mse", "seq_ratio", "simpo", "skew_forward_kl", "skew_reverse_kl", "sppo",
    "teacher_advantage", "token_gradient", "top_1_agreement", "value_clip", "vespo", "with_observed",
    "with_tail", "without_gradient",
]  # fmt: skip
