"""Metrics that merge over packs and ranks in any order, without a mean of means."""

from rft_fn.metric.by_depth import GAP_AT, by_depth, told, turn_of
from rft_fn.metric.calibration import (
    Calibration,
    calibration,
    reliability,
)
from rft_fn.metric.kinds import (
    Max,
    Mean,
    Metric,
    SampleSize,
    Sum,
    average,
    effective_share,
    max,
    mean,
    merge,
    results,
    sum,
)
from rft_fn.metric.of_evaluation import bootstrap, maj_at_k
from rft_fn.metric.of_model import (
    mismatch,
    policy,
    router,
)
from rft_fn.metric.of_pairs import (
    labelled,
    pairs,
    preference,
    ranking,
)
from rft_fn.metric.of_rollout import (
    OF_REWARD,
    pass_at_k,
    rollout,
    spread,
)

__all__ = [
    "average", "bootstrap", "calibration", "effective_share", "labelled", "maj_at_k", "max", "mean", "merge",
    "pairs", "pass_at_k", "policy", "preference", "ranking", "reliability", "results", "rollout", "router",
    "spread", "sum",
]  # fmt: skip
