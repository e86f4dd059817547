"""Advantage estimators: rewards in, advantages out.

None of them whitens, clips or reads a log-prob. Rewards [N, G] are those of G responses to each of N
prompts. A group whose rewards are all equal has no preference to teach: its advantages are exactly 0,
whatever the rounding of a mean.
"""

from rft_fn.advantage.groups import cpgd, gdpo, grpo, opo, pass_at_k, reinforce_pp_baseline, remax, rloo
from rft_fn.advantage.tokens import (
    decoupled_gae,
    discounted_return,
    gae,
    length_adaptive_lambda,
    reinforce_pp,
    whiten,
)

__all__ = [
    "cpgd", "decoupled_gae", "discounted_return", "gae", "gdpo", "grpo", "length_adaptive_lambda", "opo",
    "pass_at_k", "reinforce_pp", "reinforce_pp_baseline", "remax", "rloo", "whiten",
]  # fmt: skip
