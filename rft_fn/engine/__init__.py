"""What samples: an `Engine` record, and `gather_and_generate` over the ranks of a strategy."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from rft_fn import dist, tree
from rft_fn import model as model_lib
from rft_fn.engine.gap import check_gap, explain_gap, logp_gap
from rft_fn.engine.groups import Filled, fill_groups
from rft_fn.engine.hf import hf
from rft_fn.engine.judging import check_reward, gather_and_judge
from rft_fn.types import Engine, EngineConfig, Rollout, Sampling, Strategy

__all__ = [
    "Engine",
    "EngineConfig",
    "Filled",
    "check_config",
    "check_gap",
    "check_reward",
    "explain_gap",
    "fill_groups",
    "gather_and_generate",
    "gather_and_judge",
    "get_engine",
    "hf",
    "logp_gap",
]


def check_config(config: EngineConfig) -> None:
    """ValueError for an engine that does not exist, or an option that it cannot honour. Builds nothing."""
    if config.type != "hf":
        raise ValueError(f"engine type: expected hf, got {config.type!r}")
    if config.tp_size != 1 or config.mem_util:
        raise ValueError(
            f"engine_tp_size, engine_mem_util: expected 1 and 0 for hf, which has one process and takes "
            f"what it needs, got {config.tp_size} and {config.mem_util}"
        )


def get_engine(config: EngineConfig | None, model: str | nn.Module, tokenizer: Any = None) -> Engine:
    """The engine of `config` with weights of `model`, a name or a module that it may overwrite.

    ValueError for what `check_config` refuses, before anything is loaded.
    """
    config = config or EngineConfig()
    check_config(config)
    if tokenizer is None and isinstance(model, nn.Module):
        raise ValueError("tokenizer: expected one, got None: a module does not know its tokenizer")
    tokenizer = tokenizer or model_lib.load_tokenizer(str(model))
    return hf(model_lib.load(model, quantize="none"), tokenizer, batch=config.batch, sleep=config.sleep)


def gather_and_generate(
    engine: Engine,
    strategy: Strategy,
    prompts: Sequence[Any],
    keys: Sequence[int],
    *,
    n: int,
    sampling: Sampling,
    sleep_engine: bool = True,
) -> Rollout:
    """The rollout of the global batch, the same on every rank: each rank samples its
    share of the prompts, in order.

    Keys belong to prompts, so the samples do not depend on how the prompts were shared out. The engine is
    woken before, and sent to sleep after unless `sleep_engine` is False.
    """
    size = -(-len(prompts) // strategy.world)
    mine = slice(strategy.rank * size, (strategy.rank + 1) * size)
    idle = mine.start >= len(prompts)  # more ranks than prompts: this one samples one of them for nothing
    mine = slice(0, 1) if idle else mine
    engine.wake()
    with dist.phase("generate"):
        rollout = engine.generate(prompts[mine], keys[mine], n=n, sampling=sampling)
    if sleep_engine:
        engine.sleep()
    rollout = tree.replace(rollout, group=rollout.group + mine.start)
    if idle:
        media = None if rollout.media is None else rollout.media.take([])
        rollout = tree.replace(tree.map(lambda x: x[:0], tree.replace(rollout, media=None)), media=media)
    with dist.phase("gather"):
        return strategy.gather(rollout)
