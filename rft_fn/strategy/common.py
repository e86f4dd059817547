"""What strategies have in common: how a batch is cut, and what several processes do together."""

from typing import Any

import torch

from rft_fn import dist, packing
from rft_fn.strategy import memory
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Experience, Packed

__all__ = ["shard", "together"]


def shard(
    config: StrategyConfig, exp: Experience, budget: int, *, world: int = 1, unit: int = 1
) -> list[list[Packed]]:
    """`packing.shard` with the options of the config: packs of at most `budget` tokens and
    micro_train_batch_size sequences; without packing_samples of exactly so many (the last of fewer), whatever
    their tokens."""
    most = config.micro_train_batch_size
    if config.packing_samples:
        return packing.shard(exp, budget, world, unit=unit, most=most)
    return packing.shard(exp, 0, world, unit=unit, most=max(most, unit))


def together(config: StrategyConfig) -> dict[str, Any]:
    """The fields of a `Strategy` over several processes that do not depend on what shards its models."""
    cuda = torch.cuda.is_available()

    def mine(exp: Experience, budget: int, *, unit: int = 1) -> list[Packed]:
        return shard(config, exp, budget, world=dist.world(), unit=unit)[dist.rank()]

    return {
        "shard": mine,
        "gather": dist.gather,
        "all_reduce": dist.all_reduce,
        "print": print if dist.is_main() else lambda *_, **__: None,
        "report_memory": memory.report,
        "rank": dist.rank(),
        "world": dist.world(),
        "device": torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        "config": config,
    }
