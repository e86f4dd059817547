"""Advantage estimators: rewards in, advantages out.

None of them whitens, clips or reads a log-prob. Rewards are [N, G], for G responses to each of N prompts;
`grpo_by` and the other names in _by take rewards [B] and `Rollout.group` [B], for groups that differ in
size. A group of equal rewards has no preference to teach: its advantages are exactly 0, whatever the
rounding of a mean.
"""

from rft_fn.advantage.by_group import (
    cpgd_by,
    gdpo_by,
    grpo_by,
    opo_by,
    pass_at_k_by,
    quantile_by,
    reinforce_pp_baseline_by,
    remax_by,
    rloo_by,
)
from rft_fn.advantage.groups import (
    cpgd,
    gdpo,
    grpo,
    opo,
    pass_at_k,
    quantile,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from rft_fn.advantage.of_tokens import (
    decoupled_gae,
    discounted_return,
    gae,
    length_adaptive_lambda,
    reinforce_pp,
    whiten,
)

__all__ = [
    "cpgd", "cpgd_by", "decoupled_gae", "discounted_return", "gae", "gdpo", "gdpo_by", "grpo", "grpo_by",
    "length_adaptive_lambda", "opo", "opo_by", "pass_at_k", "pass_at_k_by", "quantile", "quantile_by",
    "reinforce_pp", "reinforce_pp_baseline", "reinforce_pp_baseline_by", "remax", "remax_by", "rloo",
    "rloo_by", "whiten",
]  # fmt: skip
