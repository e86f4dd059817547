"""How rollouts come about: sampled and judged by all ranks, and checked against the trainer."""

from rft_fn.collect.dynamic_sampling import VariedGroups, sample_varied_groups
from rft_fn.collect.generate import gather_and_generate
from rft_fn.collect.judging import check_reward, gather_and_judge
from rft_fn.collect.mismatch import check_mismatch, explain_mismatch, logp_mismatch

__all__ = [
    "check_mismatch", "check_reward", "gather_and_generate", "gather_and_judge", "sample_varied_groups",
]  # fmt: skip
