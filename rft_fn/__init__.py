"""Reinforcement fine-tuning as pure functions over explicit state. `import rft_fn as rft`."""

from rft_fn import (  # isort: skip
    advantage, algorithm, check, ckpt, collect, data, dist, engine, faults, logprob, loss, metric, modality,
    model, optim, packing, reward, reward_shaping, rng, rollout, run, scan, segment, strategy, testing, tree,
    types, weight,
)  # fmt: skip
from rft_fn.types import (  # isort: skip
    Engine, Experience, Media, Packed, Rollout, Sampling, Strategy, TokenOut, TrainState, Transform,
    experience,
)  # fmt: skip

# a name that programs are written against: generation over ranks belongs to `collect` now
engine.gather_and_generate = collect.gather_and_generate  # type: ignore[attr-defined]

__version__ = "0.1.0"
__all__ = [
    "Engine", "Experience", "Media", "Packed", "Rollout", "Sampling", "Strategy", "TokenOut", "TrainState",
    "Transform", "advantage", "algorithm", "check", "ckpt", "collect", "data", "dist", "engine", "experience",
    "faults", "logprob", "loss", "metric", "modality", "model", "optim", "packing", "reward",
    "reward_shaping", "rng", "rollout", "run", "scan", "segment", "strategy", "testing", "tree", "types",
    "weight",
]  # fmt: skip
