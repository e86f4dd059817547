"""What samples: an `Engine` record, and `gather_and_generate` over the ranks of a strategy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rft_fn import model as model_lib
from rft_fn import tree
from rft_fn.engine.gap import check_gap, explain_gap, logp_gap
from rft_fn.engine.groups import Filled, fill_groups
from rft_fn.engine.hf import hf
from rft_fn.types import Engine, Rollout, Sampling, Strategy

__all__ = [
    "Engine",
    "EngineConfig",
    "Filled",
    "check_gap",
    "explain_gap",
    "fill_groups",
    "gather_and_generate",
    "get_engine",
    "hf",
    "logp_gap",
]


@dataclass(frozen=True)
class EngineConfig:
    """The engine that samples."""

    type: str = "hf"
    """hf: transformers in this process"""
    batch: int = 64
    """sequences sampled at a time"""


def get_engine(config: EngineConfig | None, model: str | nn.Module, tokenizer: Any = None) -> Engine:
    """The engine of `config` with weights of `model`, a name as `model.load` takes or a
    module it may own and overwrite."""
    config = config or EngineConfig()
    if config.type != "hf":
        raise ValueError(f"engine type: expected hf, got {config.type!r}")
    if config.batch < 1:
        raise ValueError(f"engine batch: expected >= 1 sequences, got {config.batch}")
    if tokenizer is None and isinstance(model, nn.Module):
        raise ValueError("tokenizer: expected one, got None: a module does not know its tokenizer")
    return hf(model_lib.load(model), tokenizer or model_lib.load_tokenizer(str(model)), batch=config.batch)


def gather_and_generate(
    engine: Engine,
    strategy: Strategy,
    prompts: Sequence[Any],
    keys: Sequence[int],
    *,
    n: int,
    sampling: Sampling,
) -> Rollout:
    """The rollout of the global batch, the same on every rank: each rank samples its
    share of the prompts, in order.

    Keys belong to prompts, so the samples do not depend on how the prompts were shared out.
    """
    size = -(-len(prompts) // strategy.world)
    mine = slice(strategy.rank * size, (strategy.rank + 1) * size)
    rollout = engine.generate(prompts[mine], keys[mine], n=n, sampling=sampling)
    return strategy.gather(tree.replace(rollout, group=rollout.group + mine.start))
