"""Where a train step runs: a `Strategy` record for each backend, chosen by a config."""

from rft_fn.strategy.config import StrategyConfig, add_arguments
from rft_fn.strategy.local import local, unsupported
from rft_fn.types import Strategy

__all__ = ["Strategy", "StrategyConfig", "add_arguments", "get_fake_strategy", "get_strategy"]


def get_strategy(config: StrategyConfig | None = None) -> Strategy:
    """The strategy of `config.backend`: DeepSpeed with a zero_stage, FSDP2 with fsdp or where torchrun
    started several processes, else one process. ValueError for an option that this backend cannot honour,
    and, on every rank, where ranks disagree on the config, the command or the code."""
    import torch

    config = config or StrategyConfig()
    torch.manual_seed(config.seed)
    if config.backend == "local":
        for name in unsupported(config):
            raise ValueError(
                f"{name}: expected {getattr(StrategyConfig(), name)} on one process, got "
                f"{getattr(config, name)}; start several with torchrun, or set fsdp"
            )
        return local(config)
    if config.backend == "deepspeed":
        from rft_fn.strategy.deepspeed import deepspeed

        return deepspeed(config)
    from rft_fn.strategy.fsdp2 import fsdp2

    return fsdp2(config)


def get_fake_strategy() -> Strategy:
    """A strategy for tests without any process group: the local one, real code on one process."""
    return local()
