"""Advantage estimators: rewards in, advantages out.

None of them whitens, clips or reads a log-prob. Rewards are [N, G], for G responses to each of N prompts;
`grpo_by` and the other names in _by take rewards [B] and `Rollout.group` [B], for groups that differ in
size. A group of equal rewards has no preference to teach: its advantages are exactly 0, whatever the
rounding of a mean.
"""

from rft_fn.advantage.best_of_group import (
    best_against_worst,
    best_minus_second,
    max_at_k,
    pass_at_k,
)
from rft_fn.advantage.by_group import (
    cpgd_by,
    gdpo_by,
    grpo_by,
    opo_by,
    pass_at_k_by,
    quantile_by,
    rae,
    reinforce_pp_baseline_by,
    remax_by,
    rloo_by,
)
from rft_fn.advantage.groups import (
    grpo,
    opo,
    remax,
    rloo,
)
from rft_fn.advantage.of_groups import (
    a_star,
    cpgd,
    gdpo,
    gpg,
    lite_ppo,
    maxrl,
    quantile,
    reinforce_pp_baseline,
)
from rft_fn.advantage.of_tokens import (
    decoupled_gae,
    discounted_return,
    gae,
    length_adaptive_lambda,
    optimal_token_baseline,
    reinforce_pp,
    whiten,
)

__all__ = [
    "a_star", "best_against_worst", "best_minus_second", "cpgd", "cpgd_by", "decoupled_gae",
    "discounted_return", "gae", "gdpo", "gdpo_by", "gpg", "grpo", "grpo_by", "length_adaptive_lambda",
    "lite_ppo", "max_at_k", "maxrl", "opo", "opo_by", "optimal_token_baseline", "pass_at_k",
    "pass_at_k_by", "quantile", "quantile_by", "rae", "reinforce_pp", "reinforce_pp_baseline",
    "reinforce_pp_baseline_by", "remax", "remax_by", "rloo", "rloo_by", "whiten",
]  # fmt: skip
