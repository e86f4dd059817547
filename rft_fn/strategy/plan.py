"""How a batch is cut, by what the config says."""

from rft_fn import packing
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Experience, Packed

__all__ = ["shard"]


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
