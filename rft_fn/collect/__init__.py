"""How rollouts come about: sampled and judged by all ranks, and checked against the trainer."""

from rft_fn.collect.dynamic_sampling import Filled, fill_groups
from rft_fn.collect.generate import gather_and_generate
from rft_fn.collect.judging import check_reward, gather_and_judge
from rft_fn.collect.mismatch import check_gap, explain_gap, logp_gap

__all__ = [
    "Filled", "check_gap", "check_reward", "explain_gap", "fill_groups", "gather_and_generate",
    "gather_and_judge", "logp_gap",
]  # fmt: skip
