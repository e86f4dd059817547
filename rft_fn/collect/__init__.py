"""How rollouts come about: sampled and judged by all ranks, and checked against the trainer."""

from rft_fn.collect.dynamic_sampling import VariedGroups, sample_varied_groups
from rft_fn.collect.generate import gather_and_generate
from rft_fn.collect.inference import (
    inference_engine_status,
    setup_inference_engine,
    sleep_inference_engine,
    update_engine_weights,
    wakeup_inference_engine,
)
from rft_fn.collect.judging import check_reward, gather_and_judge
from rft_fn.collect.mismatch import check_mismatch, explain_mismatch, logp_mismatch

__all__ = [
    "VariedGroups", "check_mismatch", "check_reward", "explain_mismatch", "gather_and_generate",
    "gather_and_judge", "inference_engine_status", "logp_mismatch", "sample_varied_groups",
    "setup_inference_engine", "sleep_inference_engine", "update_engine_weights", "wakeup_inference_engine",
]  # fmt: skip
