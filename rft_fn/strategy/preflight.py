"""Estimates the memory of a run from its config, and suggests a remedy.

print(strategy.preflight(st, (module, tx), budget=8192))
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rft_fn import memory
from rft_fn.memory import Estimate, Example, Layout
from rft_fn.memory.estimate import Model, Sampler
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Strategy

__all__ = ["estimate", "layout", "preflight", "remedy"]


def layout(config: StrategyConfig, world: int = 1) -> Layout:
    """The layout of the backend that `world` processes have with this config."""
    if config.zero_stage:
        from rft_fn.strategy.zero import strategy as zero

        return zero.layout(config, world)
    if world > 1 or config.fsdp:
        from rft_fn.strategy import fsdp2

        return fsdp2.layout(config, world)
    from rft_fn.strategy.local import layout as local_layout

    return local_layout(config)


def estimate(
    config: StrategyConfig,
    *models: Model,
    budget: int,
    world: int = 1,
    kind: str = "cuda",
    engine: bool = True,
    length: int = 0,
    example: Example | None = None,
    rewards: Sequence[nn.Module] = (),
    judges: Sequence[tuple[nn.Module, Sampler]] = (),
) -> Estimate:
    """Memory of one of `world` processes with these models and their optimizers.

    `memory.estimate` with the layout and options of a config; with sp_size each process has its part of a
    pack's tokens. `engine`: one samples with a copy of the first model, sequences of up to `length` tokens (0
    leaves out its cache). `example` is a prompt with media, of which packs are full. With offload_models a
    model is on the device only in the phases that use it, unless the device is a CPU.
    """
    sampler = None
    if engine:
        packs = config.fast_linear and config.engine_type == "hf"
        sampler = memory.Sampler(config.engine_batch, length, config.enable_engine_sleep, packs)
    return memory.estimate(
        layout(config, world),
        *models,
        budget=budget,
        kind=kind,
        fused=config.fused_linear_logprob,
        chunk_size=config.chunk_size,
        sampler=sampler,
        example=example,
        rewards=rewards,
        judges=judges,
        placed=config.offload_models and kind != "cpu",
    )


def remedy(config: StrategyConfig, x: Estimate, *, world: int, checkpointed: bool) -> str:
    """The first option to change where the peak is too high."""
    # an engine beside the trainer
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

    # models that are not trained, beside those that are
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
    example: Example | None = None,
    rewards: Sequence[nn.Module] = (),
    judges: Sequence[tuple[nn.Module, Sampler]] = (),
) -> str:
    """The table of `estimate` for a strategy on this machine, to print before `init`.

    "" on all ranks but the first.
    """
    if strategy.rank:
        return ""  # only the first prints it
    kind, config, world = strategy.device.type, strategy.config, strategy.world
    how: dict[str, Any] = {"world": world, "kind": kind, "engine": engine, "length": length}
    how |= {"rewards": rewards, "judges": judges}
    x = estimate(config, *models, budget=budget, example=example, **how)

    # without a GPU the host is the device
    available = host = memory.host_memory()
    if kind == "cuda":
        available = torch.cuda.get_device_properties(strategy.device).total_memory

    checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in models[0][0].modules())
    change = remedy(config, x, world=world, checkpointed=checkpointed)
    head = f"memory of a process (1 of {world}, packs of {budget} tokens), estimated"
    return f"{head}\n{memory.table(x, available=available, host=host, remedy=change)}"
