"""Metrics that merge over packs and ranks.

They merge in any order, without a mean of means.
"""

from rft_fn.metric.bins import Calibration, calibration, reliability
from rft_fn.metric.metrics import (
    OF_REWARD,
    Max,
    Mean,
    Metric,
    Sum,
    average,
    max,
    mean,
    merge,
    mismatch,
    pairs,
    pass_at_k,
    policy,
    preference,
    ranking,
    results,
    rollout,
    router,
    spread,
    sum,
)

__all__ = [
    "average", "calibration", "max", "mean", "merge", "pairs", "pass_at_k", "policy", "preference",
    "ranking", "reliability", "results", "rollout", "router", "spread", "sum",
]  # fmt: skip
