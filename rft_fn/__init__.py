"""Reinforcement fine-tuning as pure functions over explicit state. `import rft_fn as rft`."""

# isort: skip_file
from importlib import import_module
from typing import TYPE_CHECKING

# a room is imported when it is first used
if TYPE_CHECKING:
    # L0: values; torch and optree only
    from rft_fn import check, limits, precision, rng, tree, types

    # L1: mathematics
    from rft_fn import advantage, algorithm, analysis, logprob, loss, metric, optim, packing, reward_shaping
    from rft_fn import rollout, sampling, scan, segment, testing, weight

    # L2: the model as a function, prompts, and what turns responses into numbers
    from rft_fn import border, cache_folder, confined, cores, data, environment, file_digest, foreign_json
    from rft_fn import hub, modality, model, opened, option_help, parsing, patience, reward, sandbox
    from rft_fn import text, user_files

    # L3: effects; each room may use those before it
    from rft_fn import dist, ckpt, memory, strategy, engine, sync, collect, run, tools
    from rft_fn import migrate
    from rft_fn.types import Engine, Experience, Media, Packed, Rollout, Sampling, Strategy, TokenOut
    from rft_fn.types import TrainState, Transform, experience

__version__ = "0.1.0"
__all__ = [
    "Engine", "Experience", "Media", "Packed", "Rollout", "Sampling", "Strategy", "TokenOut", "TrainState",
    "Transform", "advantage", "algorithm", "analysis", "ckpt", "collect", "data", "engine", "environment",
    "experience", "limits", "logprob", "loss", "memory", "metric", "modality", "model", "optim", "packing",
    "reward", "reward_shaping", "rng", "rollout", "run", "scan", "segment", "strategy", "sync", "testing",
    "tree", "types", "weight",
]  # fmt: skip
_UNLISTED = (
    "border", "cache_folder", "check", "confined", "cores", "dist", "file_digest", "foreign_json", "hub",
    "migrate", "opened", "option_help", "parsing", "patience", "precision", "sampling", "sandbox", "text",
    "tools", "user_files",
)  # fmt: skip
_OF_TYPES = (
    "Engine", "Experience", "Media", "Packed", "Rollout", "Sampling", "Strategy", "TokenOut", "TrainState",
    "Transform", "experience",
)  # fmt: skip


def __dir__() -> list[str]:
    """Return the names that are listed, for completion; the others can be used too."""
    return sorted(__all__)


if not TYPE_CHECKING:  # where every name would be an attribute

    def __getattr__(name: str) -> object:
        """Return a room or a value of `types`; ours is the answer to a name that another library has."""
        if name in _OF_TYPES:
            return getattr(import_module("rft_fn.types"), name)
        if name in __all__ or name in _UNLISTED:
            return import_module(f"rft_fn.{name}")
        from rft_fn.migrate import names

        names.unknown(__name__, {**names.STRATEGY, **names.ROOT}, name)
