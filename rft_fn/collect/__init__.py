"""Collects rollouts: sampled and judged by all ranks, and checked against the trainer."""

from rft_fn.collect.asynchronous import AsyncSampler, due, sample_ahead, version_of
from rft_fn.collect.batches import Batch, Collector, Source, collector
from rft_fn.collect.engine_check import Depth, depths, gaps_of, random_prompts
from rft_fn.collect.engine_worker import EngineWorker, Weights
from rft_fn.collect.episodes import Played
from rft_fn.collect.importance import CORRECTIONS, correction
from rft_fn.collect.inference_engine import (
    inference_engine_status,
    setup_inference_engine,
    sleep_inference_engine,
    update_engine_weights,
    wakeup_inference_engine,
)
from rft_fn.collect.judging import check_reward, gather_and_judge, gather_and_judge_rows
from rft_fn.collect.mismatch import (
    MISMATCH,
    check_mismatch,
    explain_mismatch,
    gap_limit,
    logp_mismatch,
    mismatch_metrics,
    noise_floor,
    staleness,
)
from rft_fn.collect.partial import Waiting, sample_partial
from rft_fn.collect.turns import play
from rft_fn.collect.varied_groups import VariedGroups, judged_groups, sample_varied_groups
from rft_fn.engine import gather_and_generate

__all__ = [
    "AsyncSampler", "Batch", "Collector", "Depth", "Played", "Source", "check_reward", "collector", "depths",
    "due", "gaps_of", "gather_and_generate", "gather_and_judge", "gather_and_judge_rows",
    "inference_engine_status", "play", "random_prompts", "sample_ahead", "sample_partial",
    "sample_varied_groups", "setup_inference_engine", "sleep_inference_engine", "update_engine_weights",
    "version_of", "wakeup_inference_engine",
]  # fmt: skip
