"""Where a train step runs: a `Strategy` record for each backend, selected by a config."""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft_fn import dist, memory
from rft_fn.data import Dataset
from rft_fn.memory import Estimate, Example, Layout
from rft_fn.memory.estimate import Model, Sampler
from rft_fn.model.blocks import require_compiler
from rft_fn.model.load import usual_device
from rft_fn.strategy.config import StrategyConfig, add_arguments
from rft_fn.strategy.diagnose import NonFinite, load_fault
from rft_fn.strategy.local import fork, local
from rft_fn.strategy.local import layout as local_layout
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


# ---------- the memory of a run, estimated from its config, and a remedy


def layout(config: StrategyConfig, world: int = 1) -> Layout:
    """Return the layout of the backend that `world` processes have with this config."""
    if config.zero_stage:
        from rft_fn.strategy.zero import backend

        return backend.layout(config, world)
    if world > 1 or config.fsdp:
        from rft_fn.strategy import fsdp2

        return fsdp2.layout(config, world)
    return local_layout(config)


def estimate(
    config: StrategyConfig,
    *models: Model,
    budget: int,
    world: int = 1,
    kind: str = "cuda",
    engine: bool = True,
    length: int = 0,
    lend: bool = False,
    example: Example | None = None,
    rewards: Sequence[nn.Module] = (),
    judges: Sequence[tuple[nn.Module, Sampler]] = (),
) -> Estimate:
    """Estimate the memory of one of `world` processes with these models and their optimizers.

    `memory.estimate` with the layout and options of a config; with sp_size each process has its part of a
    pack's tokens. `engine`: one samples with a copy of the first model, sequences of up to `length` tokens (0
    leaves out its cache), or with the trained weights themselves where a push with `lend` gives it those.
    `example` is a prompt with media; packs are full of such. With offload_models a
    model is on the device only in the phases that use it, unless the device is a CPU.
    """
    packs = config.fast_linear and config.engine_type == "hf"
    whole = world == 1 and not (config.fsdp or config.zero_stage)
    here = config.engine_type == "hf" and not config.engine_process
    sampler = memory.Sampler(
        config.engine_batch,
        length,
        sleeps=config.enable_engine_sleep,
        packs=packs,
        lent=lend and kind == "cpu" and whole and here and not config.bf16,
    )
    return memory.estimate(
        layout(config, world),
        *models,
        budget=budget,
        kind=kind,
        fused=config.fused_linear_logprob,
        chunk_size=config.chunk_size,
        sampler=sampler if engine else None,
        example=example,
        rewards=rewards,
        judges=judges,
        placed=config.offload_models and kind != "cpu",
    )


def remedy(config: StrategyConfig, x: Estimate, *, world: int, checkpointed: bool) -> str:
    """Suggest the first option to change where the peak is too high."""
    # an engine and the trainer
    if x.total == x.sampling and not x.awake:
        return "lower engine_batch"
    if x.awake and (x.total == x.sampling or not config.enable_engine_sleep):
        return "set enable_engine_sleep"

    # working memory is more than the state: the larger part of it
    work = x.activations + x.head + x.backward
    if x.total == x.training and work >= x.parameters + x.gradients + x.optimizer:
        if x.head >= x.activations + x.backward and config.fused_linear_logprob:
            return "lower chunk_size"
        if x.head >= x.activations + x.backward:
            return "set fused_linear_logprob"
        if checkpointed:
            return "lower budget, or raise sp_size"
        return "set gradient_checkpointing"

    # models that are not trained
    others = x.frozen + x.rewards
    if not x.placed and not config.zero_stage and others >= x.parameters - x.frozen + x.optimizer:
        return "set offload_models"

    # the state: shard more of it, then move it to the host
    if config.shard_size and config.shard_size < world:
        return "raise shard_size, or set it to 0"
    if 0 < config.zero_stage < 3:
        return "set zero_stage 3"
    offloads = config.adam_offload or config.fsdp_cpu_offload
    if x.optimizer >= x.parameters and not offloads:
        return "take more processes, or set adam_offload"
    return "take more processes, or set fsdp_cpu_offload"


def preflight(
    strategy: Strategy,
    *models: Model,
    budget: int,
    engine: bool = True,
    length: int = 0,
    lend: bool = False,
    example: Example | None = None,
    rewards: Sequence[nn.Module] = (),
    judges: Sequence[tuple[nn.Module, Sampler]] = (),
) -> str:
    """Return the table of `estimate` for a strategy on this machine, to print before `init`.

    It is "" on all ranks but the first.
    """
    if strategy.rank:
        return ""  # only the first prints it
    kind, config, world = strategy.device.type, strategy.config, strategy.world
    x = estimate(
        config,
        *models,
        budget=budget,
        world=world,
        kind=kind,
        engine=engine,
        length=length,
        lend=lend,
        example=example,
        rewards=rewards,
        judges=judges,
    )

    # without a GPU the host is the device
    host = memory.host_memory()
    device = strategy.device
    available = torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else host

    checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in models[0][0].modules())
    change = remedy(config, x, world=world, checkpointed=checkpointed)
    head = f"memory of a process (1 of {world}, packs of {budget} tokens), estimated"
    return f"{head}\n{memory.table(x, available=available, host=host, remedy=change)}"
