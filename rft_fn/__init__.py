"""Reinforcement fine-tuning as pure functions over explicit state. `import rft_fn as rft`."""

# isort: skip_file
from functools import partial
from sys import modules
from types import ModuleType
from typing import TYPE_CHECKING

# L0: values; torch and optree alone
from rft_fn import check, precision, rng, tree, types

# L1: mathematics
from rft_fn import advantage, algorithm, logprob, loss, metric, optim, packing, reward_shaping, rollout, scan
from rft_fn import segment, testing, weight

# L2: the model as a function, prompts, and what turns responses into numbers
from rft_fn import data, environment, hub, modality, model, reward

# L3: effects; each room may use those before it
from rft_fn import dist, ckpt, memory, strategy, engine, sync, collect, run, tools, migrate
from rft_fn.types import Engine, Experience, Media, Packed, Rollout, Sampling, Strategy, TokenOut, TrainState
from rft_fn.types import Transform, experience

# programs are written against this name; generation over ranks belongs to `collect`
engine.gather_and_generate = collect.gather_and_generate  # type: ignore[attr-defined]

__version__ = "0.1.0"
__all__ = [
    "Engine", "Experience", "Media", "Packed", "Rollout", "Sampling", "Strategy", "TokenOut",
    "TrainState", "Transform", "advantage", "algorithm", "check", "ckpt", "collect", "data", "engine",
    "environment", "experience", "logprob", "loss", "memory", "metric", "modality", "model", "optim",
    "packing", "reward", "reward_shaping", "rng", "rollout", "run", "scan", "segment", "strategy", "sync",
    "testing", "tree", "types", "weight",
]  # fmt: skip

# dir() and completion show the names that are listed; all others can be used too
__dir__ = partial(sorted, __all__)
_rooms = [x for x in globals().values() if isinstance(x, ModuleType)]
for _room in _rooms:
    _room.__dir__ = partial(sorted, _room.__all__)

# a name that only another system has is answered with ours
if not TYPE_CHECKING:
    for _room in [modules[__name__], *_rooms]:
        if _room is run:
            continue
        _room.__getattr__ = types.hints.answers(_room)
