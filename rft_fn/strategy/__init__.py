"""Where a train step runs: a `Strategy` record for each backend, chosen by a config."""

import sys
from pathlib import Path

from rft_fn import dist
from rft_fn.data import Dataset
from rft_fn.memory import Estimate
from rft_fn.strategy.config import StrategyConfig, add_arguments
from rft_fn.strategy.local import fork, local, unsupported
from rft_fn.strategy.preflight import estimate, preflight
from rft_fn.types import Strategy

_ROOT = Path(__file__).resolve().parent.parent

__all__ = [
    "Estimate",
    "Strategy",
    "StrategyConfig",
    "add_arguments",
    "check_data",
    "estimate",
    "fork",
    "get_fake_strategy",
    "get_strategy",
    "preflight",
]


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
        from rft_fn.strategy.zero.strategy import deepspeed

        return _agreed(deepspeed(config))
    from rft_fn.strategy.fsdp2 import fsdp2

    return _agreed(fsdp2(config))


def _agreed(strategy: Strategy) -> Strategy:
    """The strategy, once all ranks have said that they run the same code with the same options."""
    import torch
    import transformers

    script = getattr(sys.modules["__main__"], "__file__", None)
    code = {str(p.relative_to(_ROOT)): p.read_text() for p in sorted(_ROOT.rglob("*.py"))}
    lines = dist.differences(
        {
            "strategy": repr(strategy.config),
            "command": " ".join(sys.argv),
            "script": Path(script).read_text() if script else "",
            "versions": f"python {sys.version.split()[0]}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}",
            **{f"rft_fn/{name}": text for name, text in code.items()},
        }
    )
    if lines:
        raise ValueError(
            f"ranks: expected the same options and code on all, got {len(lines)} differences: {lines[0]}"
        )
    return strategy


def check_data(strategy: Strategy, *datasets: Dataset) -> None:
    """ValueError, on every rank, where ranks have other rows than the first: each would train on its own."""
    if strategy.world == 1:
        return
    found = {f"{i} {x.name}": f"{x.size} rows, {x.digest}" for i, x in enumerate(datasets)}
    if lines := dist.differences(found):
        raise ValueError(
            f"data: expected the same rows on all ranks, got others for {lines[0].partition(' ')[2]}; give "
            "all ranks the same file"
        )


def get_fake_strategy() -> Strategy:
    """A strategy for tests without any process group: the local one, real code on one process."""
    return local()
