"""Reinforcement fine-tuning as pure functions over explicit state. `import rft_fn as rft`."""

try:
    from rft_fn import (  # isort: skip
        advantage, algorithm, check, ckpt, data, dist, engine, faults, log, logprob, loss, metric, modality,
        model, optim, packing, plot, reward, reward_shaping, rng, run, scan, segment, strategy, testing, tree,
        types, weight,
    )  # fmt: skip
except KeyboardInterrupt:
    import sys

    # torch takes seconds to load: a script that is stopped meanwhile ends as it would a little later
    if not hasattr(sys.modules["__main__"], "__file__"):
        raise
    print("stopped by SIGINT before the first step", file=sys.stderr)
    sys.exit(130)
from rft_fn.types import (  # isort: skip
    Engine, Experience, Media, Packed, Rollout, Sampling, Strategy, TokenOut, TrainState, Transform,
    experience,
)  # fmt: skip

__version__ = "0.1.0"
__all__ = [
    "Engine", "Experience", "Media", "Packed", "Rollout", "Sampling", "Strategy", "TokenOut", "TrainState",
    "Transform", "advantage", "algorithm", "check", "ckpt", "data", "dist", "engine", "experience", "faults",
    "log", "logprob", "loss", "metric", "modality", "model", "optim", "packing", "plot", "reward",
    "reward_shaping", "rng", "run", "scan", "segment", "strategy", "testing", "tree", "types", "weight",
]  # fmt: skip
