"""What strategies have in common: how a batch is cut, and what several processes do together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rft_fn import dist, packing
from rft_fn.model import probe
from rft_fn.model.text import ALONE
from rft_fn.strategy import memory
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.scoring import scorer
from rft_fn.types import Experience, Packed

__all__ = ["Cut", "everywhere", "together"]


class Cut:
    """How a strategy cuts batches into packs: of one sequence (one unit) once a model of its mixes those of a
    pack, which is asked when the model is bound."""

    def __init__(self, config: StrategyConfig, agree: Callable[[bool], bool] = bool):
        self.config, self.agree = config, agree
        self.alone = False

    def settle(self, root: nn.Module, call: Callable | None = None) -> None:
        """`probe.settle`, by all processes alike; `call` is the module as it is run."""
        probe.settle(root, call=call, agree=self.agree)
        self.alone |= getattr(root, "way", None) == ALONE

    def shard(self, exp: Experience, budget: int, *, world: int = 1, unit: int = 1) -> list[list[Packed]]:
        """`packing.shard` with the options of the config: packs of at most `budget` tokens and
        micro_train_batch_size sequences; without packing_samples of exactly so many (the last of fewer),
        whatever their tokens."""
        most = self.config.micro_train_batch_size
        if not self.config.packing_samples:
            budget = 0
            most = max(most, unit)
        if self.alone:
            most = unit
        return packing.shard(exp, budget, world, unit=unit, most=most)


def everywhere(x: bool) -> bool:
    """Whether x is true on every process."""
    return all(dist.all_gather_object(x))


def together(cut: Cut) -> dict[str, Any]:
    """The fields of a `Strategy` over several processes that do not depend on what shards its models."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())

    def say(*args: Any, **options: Any) -> None:
        if dist.is_main():
            print(*args, **options)

    def mine(exp: Experience, budget: int, *, unit: int = 1) -> list[Packed]:
        return cut.shard(exp, budget, world=dist.world(), unit=unit)[dist.rank()]

    return {
        "shard": mine,
        "score": scorer(mine, dist.gather),
        "gather": dist.gather,
        "all_reduce": dist.all_reduce,
        "print": say,
        "report_memory": memory.report,
        "rank": dist.rank(),
        "world": dist.world(),
        "device": device,
        "config": cut.config,
    }
