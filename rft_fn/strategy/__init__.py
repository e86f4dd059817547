"""Where a train step runs: a `Strategy` record for each backend, selected by a config."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rft_fn import dist
from rft_fn.data import Dataset
from rft_fn.model.blocks import require_compiler
from rft_fn.model.load import usual_device
from rft_fn.strategy.config import StrategyConfig, add_arguments
from rft_fn.strategy.diagnose import NonFinite, load_fault
from rft_fn.strategy.forecast import estimate, preflight
from rft_fn.strategy.local import fork, local
from rft_fn.strategy.session import Session
from rft_fn.types import Strategy

_ROOT = Path(__file__).resolve().parent.parent

__all__ = [
    "StrategyConfig", "check_data", "estimate", "fork", "get_fake_strategy", "get_strategy", "load_fault",
    "preflight",
]  # fmt: skip


def get_strategy(config: StrategyConfig | None = None) -> Strategy:
    """Return the strategy of `config.backend`.

    DeepSpeed with a zero_stage, FSDP2 with fsdp or where torchrun started several processes, else one
    process. Its `close` ends what it began: a process group that was there before stays. ValueError for
    an option that this backend cannot honour, and, on every rank, where ranks disagree on the config, the
    command or the code; nothing is left of it then.
    """
    # new adapters and heads are drawn from torch's global generator, the same on every rank
    config = config or StrategyConfig()
    if config.compile_blocks:
        require_compiler(usual_device(None))
    torch.manual_seed(config.seed)
    if config.backend == "local":
        _require_supported(config, "on one process", "start several with torchrun, or set fsdp")
        return local(config)

    # the library of a backend is looked for before any process waits for another
    if config.backend == "deepspeed":
        _require_supported(config, "with zero_stage", "FSDP2 has it", "offload_models", "compile_blocks")
        from rft_fn.strategy.zero.backend import deepspeed as over_processes
        from rft_fn.strategy.zero.deepspeed_engine import library

        library()
    else:
        from rft_fn.strategy.fsdp2 import fsdp2 as over_processes

    # a start that fails takes down what it began, so that the next one finds nothing
    session = Session(dist.begin(config.timeout))
    try:
        with session.watch():
            strategy = over_processes(config, session)
            _require_agreement(config)
    except BaseException:
        session.close()
        raise
    return strategy


def _require_supported(config: StrategyConfig, where: str, remedy: str, *others: str) -> None:
    """Raise ValueError for an option that only FSDP2 has, and for `others`."""
    for name in ("sp_size", "shard_size", "fsdp_cpu_offload", *others):
        neutral = getattr(StrategyConfig(), name)
        got = getattr(config, name)
        if got != neutral:
            raise ValueError(f"{name}: expected {neutral} {where}, got {got}; {remedy}")


def _require_agreement(config: StrategyConfig) -> None:
    """Raise ValueError, on every rank, unless all ranks run the same code with the same options."""
    import transformers

    script = getattr(sys.modules["__main__"], "__file__", None)  # a notebook or an interpreter has none
    python = sys.version.split()[0]
    facts = {
        "strategy": repr(config),
        "command": " ".join(sys.argv),
        "script": Path(script).read_text() if script else "",
        "versions": f"python {python}, torch {torch.__version__}, transformers {transformers.__version__}",
    }

    # machines may have other versions of the package
    lines = dist.differences(facts | _sources())
    if lines:
        raise ValueError(
            f"ranks: expected the same options and code on all, got {len(lines)} differences: {lines[0]}"
        )


@cache
def _sources() -> dict[str, str]:
    """Return the text of each file of the package, as it was when the first strategy was made."""
    return {f"rft_fn/{path.relative_to(_ROOT)}": path.read_text() for path in sorted(_ROOT.rglob("*.py"))}


def check_data(strategy: Strategy, *datasets: Dataset) -> None:
    """Raise ValueError, on every rank, where ranks have other rows than the first."""
    if strategy.world == 1:
        return
    facts = {f"{i} {x.name}": f"{x.size} rows, {x.digest}" for i, x in enumerate(datasets)}
    with strategy.session.watch():
        lines = dist.differences(facts)
    if lines:
        raise ValueError(
            f"data: expected the same rows on all ranks, got others for {lines[0].partition(' ')[2]}; give "
            "all ranks the same file"
        )


def get_fake_strategy() -> Strategy:
    """Return a strategy for tests without any process group: the local one, real code."""
    return local()
