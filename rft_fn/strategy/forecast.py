"""The memory of a run before it starts: a table, the longest row that fits, and what to change."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rft_fn import memory
from rft_fn.memory import Estimate, Example, Layout, trace
from rft_fn.memory.estimate import Model, Sampler
from rft_fn.memory.estimate_table import size
from rft_fn.model.checkpointing import LADDER, Checkpointing, checkpoint, kind_of
from rft_fn.model.parts import inside_adapters
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.local import layout as local_layout
from rft_fn.types import Strategy

__all__ = ["Forecast", "estimate", "layout", "longest", "preflight", "remedy", "saving"]


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
    leaves out its cache), or with the trained weights themselves where a push with `lend` gives it those;
    servers and actors sample elsewhere.
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
        sampler=sampler if engine and config.engine_type in ("hf", "vllm") else None,
        example=example,
        rewards=rewards,
        judges=judges,
        placed=config.offload_models and kind != "cpu",
    )


def remedy(config: StrategyConfig, x: Estimate, *, world: int, kept: Checkpointing) -> str:
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
        if kept in (False, "products"):
            return "set gradient_checkpointing"
        if kept != "host" and not config.compile_blocks:
            return f"set gradient_checkpointing {LADDER[LADDER.index(kept) + 1]}"
        return "lower budget, or raise sp_size"

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


# ---------- the forecast of a run, which is asked again: for other tokens, and with other options


@dataclass(frozen=True)
class Forecast:
    """What the memory of a process is estimated from; its models have no memory of their own."""

    config: StrategyConfig
    models: tuple[Model, ...]
    budget: int
    world: int
    kind: str  # "cuda" or "cpu"
    available: int  # bytes of the device
    host: int  # bytes of the host
    more: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `estimate`

    @property
    def kept(self) -> Checkpointing:
        """Return what the blocks of the first model keep for their backward."""
        return kind_of(self.models[0][0])

    def estimate(self) -> Estimate:
        """Return the estimate for packs of `budget` tokens."""
        return estimate(
            self.config, *self.models, budget=self.budget, world=self.world, kind=self.kind, **self.more
        )

    def keeping(self, kind: Checkpointing) -> "Forecast":
        """Return the forecast with trained models whose blocks keep `kind`; ValueError as `checkpoint`."""
        models: list[Model] = []
        for module, tx in self.models:
            if tx is not None:
                module = trace.on_meta(module, low=True)
                checkpoint(module, kind)
            models.append((module, tx))
        return replace(self, models=tuple(models))


_AT = (4096, 16384, 65536)  # tokens at which a row is estimated; between and beyond them bytes are a line


def longest(x: Forecast) -> int | None:
    """Return the tokens of the longest row that fits in training, at most the model's window.

    0 where the state alone does not fit; None for a model that cannot be estimated. Rows are alone in their
    packs. What is beside the training, as an engine that sleeps, does not count.
    """

    def over(tokens: int) -> int:
        found = replace(x, budget=tokens).estimate()
        if any(line.startswith("activations") for line in found.unknown):
            raise _Unknown
        largest = max(phase.total for phase in found.phases if phase.name in ("score", "train", "update"))
        return max(largest - x.available, found.host - x.host)

    try:
        return _zero(over, window_of(x.models[0][0]))
    except _Unknown:
        return None


class _Unknown(Exception):
    """A model that cannot be estimated."""


def _zero(over: Any, window: int | None) -> int:
    """Return the most tokens at which `over` is not above 0, which rises with them, first in a curve."""
    points = [(tokens, over(tokens)) for tokens in (window,) if tokens is not None and tokens <= _AT[-1]]
    if points and points[0][1] <= 0:
        return points[0][0]
    lower: list[tuple[int, int]] = []
    for tokens in (n for n in _AT if window is None or n < window):
        lower.append((tokens, over(tokens)))
        if lower[-1][1] > 0:
            break
    if not lower or (len(lower) == 1 and lower[0][1] > 0):  # too long already
        lower.insert(0, (64, over(64)))
    (n, low), (m, high) = [*lower, *(points if lower[-1][1] <= 0 else [])][-2:]
    found = n - low * (m - n) / max(high - low, 1)
    if found < 64:
        return 0
    return min(int(found), window or int(found))


def window_of(module: nn.Module) -> int | None:
    """Return the most tokens that a model reads, None without a limit."""
    config: Any = getattr(inside_adapters(module), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "max_position_embeddings", None)


def _changes(x: Forecast, now: Estimate) -> Iterator[tuple[str, Forecast]]:
    """Yield (an option, the forecast with it) of each option that may save memory; the cheapest first."""
    config = x.config

    def other(**options: Any) -> Forecast:
        return replace(x, config=replace(config, **options))

    if not config.fused_linear_logprob:
        yield "--strategy.fused-linear-logprob", other(fused_linear_logprob=True)
    if now.largest.name == "generate":
        if now.awake and x.kind == "cuda" and not config.enable_engine_sleep:
            yield "--strategy.enable-engine-sleep", other(enable_engine_sleep=True)
        for batch in (config.engine_batch // 4, config.engine_batch // 16):
            if batch:
                yield f"--strategy.engine-batch {batch}", other(engine_batch=batch)
    length = x.more.get("length") or 0
    budget = x.budget // 2
    while length and budget >= length:
        yield f"--budget {budget}", replace(x, budget=budget)
        budget //= 2
    kinds: list[Checkpointing] = list(LADDER[max(LADDER.index(x.kept) + 1, 2) :])  # "products" takes more
    for kind in kinds:
        if kind is not True and (config.compile_blocks or (kind == "host" and x.kind == "cpu")):
            continue
        try:
            yield "--gradient-checkpointing" + (f" {kind}" if kind is not True else ""), x.keeping(kind)
        except ValueError:
            return  # it has no blocks that can be checkpointed
    if x.kind == "cuda":
        for name in ("offload_models", "adam_offload", "fsdp_cpu_offload"):
            if not getattr(config, name) and not (name != "adam_offload" and config.zero_stage):
                more = {"fsdp": True} if name == "fsdp_cpu_offload" else {}
                also = " --strategy.fsdp" if more and not config.fsdp else ""
                yield f"--strategy.{name.replace('_', '-')}{also}", other(**{name: True}, **more)


_LESS = 0.9  # of the forecast: a run that ran out of memory had less than it thought


def saving(x: Forecast) -> str:
    """Return the one option with which a run that ran out of memory would fit, by the forecast, in a line."""
    now = x.estimate()
    limit = min(x.available, int(_LESS * now.total))
    best: tuple[int, str] | None = None
    for option, changed in _changes(x, now):
        then = changed.estimate()
        if then.host > x.host:
            continue
        if then.total <= limit:
            return f"{_had(x, now)}; with {option} it is {size(then.total)}"
        if best is None or then.total < best[0]:
            best = then.total, option
    if best is None:
        return f"{_had(x, now)}; no option saves more: take more processes, shorter rows or a smaller model"
    return (
        f"{_had(x, now)}; no one option is enough, {best[1]} saves most: with it it is {size(best[0])}; "
        "take more processes or shorter rows beside it"
    )


def _had(x: Forecast, now: Estimate) -> str:
    return f"the forecast was {size(now.total)} of {size(x.available)}"


_LAST: list[Forecast] = []
"""That of the run of this process, for its end."""


def last() -> Forecast | None:
    """Return what the last `preflight` of this process forecast, for an error that comes later."""
    return _LAST[0] if _LAST else None


def forecast(strategy: Strategy, *models: Model, budget: int, **more: Any) -> Forecast:
    """Return the forecast for a strategy on this machine; `more` are further arguments of `estimate`."""
    device, kind = strategy.device, strategy.device.type
    host = memory.host_memory()  # without a GPU it is the device
    available = torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else host
    # binding changes modules, and nobody else needs the rewards' for as long as this lasts
    without = partial(trace.on_meta, low=True)
    copies = {id(module): without(module) for module, _ in models}
    more["rewards"] = [without(module) for module in more.get("rewards", ())]
    more["judges"] = [(without(module), sampler) for module, sampler in more.get("judges", ())]
    return Forecast(
        config=strategy.config,
        models=tuple((copies[id(module)], tx) for module, tx in models),
        budget=budget,
        world=strategy.world,
        kind=kind,
        available=available,
        host=host,
        more=more,
    )


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
    longest_row: bool = False,
) -> str:
    """Return the table of `estimate` for a strategy on this machine, to print before `init`.

    With `longest_row` its last line but one has the longest row that fits in what is free now, which takes up
    to four times as long as the rest. It is "" on all ranks but the first. Where the run ends without memory,
    `saving` reads the same forecast.
    """
    x = forecast(
        strategy,
        *models,
        budget=budget,
        engine=engine,
        length=length,
        lend=lend,
        example=example,
        rewards=rewards,
        judges=judges,
    )
    _LAST[:] = [x]
    if strategy.rank:
        return ""  # only the first prints it
    found = x.estimate()
    free = memory.free(strategy.device)
    row = longest(replace(x, available=min(x.available, free))) if longest_row else None
    change = remedy(x.config, found, world=x.world, kept=x.kept)
    head = f"memory of a process (1 of {x.world}, packs of {budget} tokens), estimated"
    lines = memory.table(
        found,
        available=x.available,
        host=x.host,
        remedy=change,
        row=row,
        window=window_of(x.models[0][0]),
        free=free,
    )
    return f"{head}\n{lines}"
