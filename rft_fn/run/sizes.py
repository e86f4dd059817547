"""Sizes that are left to the forecast of memory: tokens of a pack, and rows sampled at a time.

A pack of 1,024 tokens is 25 ms of a GPU's work, for 6 ms and more of Python; on a CPU it is a second's. So
a command line on a GPU begins with `auto`. What it found is in config.json, and a resumed run has the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from rft_fn import dist, memory, strategy
from rft_fn.run import earlier_run, options
from rft_fn.types import Strategy, Transform

__all__ = ["by_device", "decided", "provisional"]

AUTO: Any = "auto"

ConfigT = TypeVar("ConfigT")
Models = Sequence[tuple[nn.Module, Transform | None]]

_BUDGETS = (16384, 8192, 4096, 2048, 1024)  # of more, Python has less than 2 % of a GPU's time
_BATCHES = (1024, 512, 256, 128, 64)
_FILLED = 0.85  # of the device's memory: forecasts are within a fifth, and allocators leave gaps


class _Sizes(NamedTuple):
    """Tokens of a pack, and rows that are sampled at a time."""

    budget: int
    batch: int


def by_device(config: type) -> list[str]:
    """Return the arguments that a command line of a script begins with: sizes that are `auto` on a GPU."""
    if not issubclass(config, options.Run) or not torch.cuda.is_available():
        return []
    sizes = ["--budget", AUTO] if issubclass(config, options.Policy) else []
    return sizes + (["--strategy.engine-batch", AUTO] if issubclass(config, options.Rollouts) else [])


def provisional(cfg: ConfigT) -> ConfigT:
    """Return a config with the least sizes in place of those that are to be decided."""
    return _with(cfg, _Sizes(_BUDGETS[-1], _BATCHES[-1]))


def decided(
    cfg: ConfigT, st: Strategy, models: Callable[[], Models], *, sampled: bool, length: int, rows: int
) -> tuple[ConfigT, Strategy]:
    """Return (the config, the strategy) with numbers in place of `auto`, the same on every rank.

    Those of the run in the folder, if it holds one. Else the largest whose forecast fills the device to 85 %
    at most: `models()` gives modules without weights with their optimizers, a step has `rows` rows of up to
    `length` tokens. Reward models on the same device are not among them. Prints a line about it.
    """
    if cfg == provisional(cfg):
        return cfg, st
    with st.session.watch():
        sizes, why = dist.all_gather_object(
            _sizes(cfg, st, models, sampled=sampled, length=length, rows=rows) if st.rank == 0 else None
        )[0]
    cfg = _with(cfg, sizes)
    found: Any = cfg
    engine = f", engine_batch {found.strategy.engine_batch}" if sampled else ""
    st.print(f"sizes: budget {found.budget}{engine} ({why})")
    return cfg, st._replace(config=replace(st.config, engine_batch=found.strategy.engine_batch))


def _with(cfg: Any, sizes: _Sizes) -> Any:
    """Return a config with these sizes in place of `auto`."""
    if cfg.budget == AUTO:
        cfg = replace(cfg, budget=sizes.budget)
    if cfg.strategy.engine_batch == AUTO:
        cfg = replace(cfg, strategy=replace(cfg.strategy, engine_batch=sizes.batch))
    return cfg


def _sizes(
    cfg: Any, st: Strategy, models: Callable[[], Models], *, sampled: bool, length: int, rows: int
) -> tuple[_Sizes, str]:
    """Return the sizes, and where they are from."""
    if earlier_run.begun(Path(cfg.out)) and not cfg.dry_run:
        before = earlier_run.settings(cfg.out)
        budget, batch = before.get("budget"), (before.get("strategy") or {}).get("engine_batch")
        if isinstance(budget, int) and isinstance(batch, int):
            return _Sizes(budget, batch), f"as in {cfg.out}"

    least = provisional(cfg)
    made = models()
    kind = st.device.type
    on_gpu = kind == "cuda"
    whole = torch.cuda.get_device_properties(st.device).total_memory if on_gpu else memory.host_memory()

    def fits(sizes: _Sizes) -> bool:
        x = strategy.estimate(
            replace(st.config, engine_batch=sizes.batch),
            *made,
            budget=sizes.budget,
            world=st.world,
            kind=kind,
            engine=sampled,
            length=length,
        )
        return not x.unknown and x.total <= _FILLED * whole

    # no more than a process has of a step
    each = -(-rows // st.world)
    start = _Sizes(least.budget, least.strategy.engine_batch)
    budgets = _useful(_BUDGETS, each * length) if cfg.budget == AUTO else [start.budget]
    batches = _useful(_BATCHES, each) if cfg.strategy.engine_batch == AUTO else [start.batch]
    budget = next((x for x in budgets if fits(start._replace(budget=x))), start.budget)
    batch = next((x for x in batches if fits(_Sizes(budget, x))), start.batch) if sampled else start.batch
    return _Sizes(budget, batch), f"auto: by the forecast, up to {_FILLED:.0%} of {whole / 2**30:.3g} GiB"


def _useful(sizes: Sequence[int], most: int) -> list[int]:
    """Return the sizes up to the first one that holds `most`, from the largest; all of them for 0."""
    return [x for x in sizes if not most or x < 2 * max(most, sizes[-1])]
