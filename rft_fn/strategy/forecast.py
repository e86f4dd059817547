"""What a run will hold in memory, before it holds any of it: bytes of each rank, by what they are for.

print(strategy.preflight(st, (module, tx), budget=8192))
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from rft_fn import precision, tree
from rft_fn.model import quantize
from rft_fn.strategy import step, trace
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Strategy, Transform

__all__ = ["Estimate", "estimate", "preflight"]

T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank. Parameters, gradients and the optimizer's state are there as long as the run (the
    gradients from the first pack to the update); the rest is working memory of one phase each."""

    parameters: int
    gradients: int  # sums over packs
    optimizer: int  # moments, averages, master weights
    activations: int  # of one pack, when the decoder is done
    head: int  # at its peak, beside the activations: logits, or the workspace instead of them
    backward: int  # at its peak, beside both: the gradients of one pack
    gathered: int  # whole blocks of sharded parameters, copies in bfloat16, and buffers of their gradients
    update: int  # what the optimizer's arithmetic takes for a moment
    engine: int  # its own weights and cache
    host: int  # of host memory, where something was moved there
    awake: bool  # whether the engine's weights are on the device while the trainer works
    unknown: tuple[str, ...] = ()  # what could not be computed, and why: it is not counted

    @property
    def training(self) -> int:
        """The peak of forward and backward."""
        work = self.activations + self.head + self.backward + self.gathered
        return self._always + self.gradients + work

    @property
    def updating(self) -> int:
        """The peak of an update."""
        return self._always + self.gradients + self.update

    @property
    def sampling(self) -> int:
        """The peak while the engine samples."""
        return self._always + (0 if self.awake else self.engine)

    @property
    def total(self) -> int:
        """The peak of all phases."""
        return max(self.training, self.updating, self.sampling)

    @property
    def _always(self) -> int:
        return self.parameters + self.optimizer + (self.engine if self.awake else 0)


def _share(shape: Sequence[int], n: int) -> list[int]:
    """The largest part of a tensor that is sharded over n along its first dim."""
    return [-(-shape[0] // n), *shape[1:]] if len(shape) else []


def _empty(named: dict[str, nn.Parameter], n: int, dtype: torch.dtype | None) -> tree.Named:
    """Parameters as one of n holds them, without memory."""
    out = tree.Named()
    for name, p in named.items():
        own = dtype if dtype and p.is_floating_point() else p.dtype
        out[name] = torch.empty(_share(p.shape, n), dtype=own, device="meta")
    return out


def _sum(p: torch.Tensor) -> torch.Tensor:
    """The sum of a parameter's gradients, without memory."""
    return p.to(precision.wide(p.dtype))


def _kept(config: StrategyConfig) -> torch.dtype | None:
    """The type that parameters are kept in, None for their own."""
    if config.use_mp_opt or (config.bf16 and config.zero_stage):
        return torch.bfloat16
    return torch.float32 if config.bf16 else None


def _groups(root: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of a module as FSDP2 gathers them: those of each block, and at the end all others."""
    from rft_fn.strategy.fsdp2 import _odd, blocks

    out, seen = [], set()
    for part in [*blocks(root), *_odd(root), root]:
        group = [p for p in part.parameters() if id(p) not in seen]
        seen |= {id(p) for p in group}
        out.append(group)
    return out


@dataclass(frozen=True)
class _Cut:
    """The backend of a world, and over how many of its processes each state is sharded."""

    backend: str
    parameters: int
    gradients: int
    optimizer: int


def _cut(config: StrategyConfig, world: int) -> _Cut:
    if config.zero_stage:
        return _Cut("deepspeed", *(world if config.zero_stage >= stage else 1 for stage in (3, 2, 1)))
    if not config.fsdp and world == 1:
        return _Cut("local", 1, 1, 1)
    return _Cut("fsdp2", *[config.shard_size or world] * 3)


def _try(name: str, f: Callable[[], T], default: T, unknown: list[str]) -> T:
    """f(), or the default and a line in `unknown`: models and transforms of one's own may read values, which
    the meta device has not, and an estimate must not stop a run."""
    try:
        return f()
    except Exception as error:
        unknown.append(f"{name}: {(str(error).splitlines() or [type(error).__name__])[0]}")
        return default


def _held(
    config: StrategyConfig, cut: _Cut, module: nn.Module, tx: Transform | None, unknown: list[str]
) -> tuple[int, ...]:
    """(parameters, gradients, optimizer, update) of a model [bytes]."""
    named = dict(module.named_parameters())
    kept = _kept(config)
    parameters = trace.nbytes(*_empty(named, cut.parameters, kept).values())
    parameters += sum(quantize.nbytes(p) - trace.nbytes(p) for p in named.values())
    if cut.backend == "local" and config.bf16:  # frozen parameters are narrow there
        parameters -= sum(2 * p.numel() for p in named.values() if not p.requires_grad)
    if tx is None:
        return parameters, 0, 0, 0
    full, wide = tx, kept
    deepspeed = cut.backend == "deepspeed"
    if deepspeed:
        wide = torch.float32
    trained = {name: p for name, p in named.items() if p.requires_grad}
    grads, sums = (tree.map(_sum, _empty(trained, n, kept)) for n in (cut.gradients, cut.optimizer))
    params = _empty(trained, cut.optimizer, wide)
    if not deepspeed:
        full = step.optimizer(tx, config, params)
    opt = _try("optimizer", lambda: full.init(params), None, unknown)
    state = trace.nbytes(*(x for x in tree.leaves(opt) if isinstance(x, torch.Tensor)))
    if deepspeed:  # it has a flat copy of its own
        state += trace.nbytes(*params.values())
    update = _try("update", lambda: trace.update(full, opt, params, sums), 0, unknown)
    return parameters, trace.nbytes(*grads.values()), state, update


def _gathered(config: StrategyConfig, cut: _Cut, module: nn.Module) -> int:
    """Whole parameters that exist for the time of their use, and buffers of their gradients [bytes]."""
    if cut.backend == "local" or (cut.backend == "deepspeed" and cut.parameters == 1):
        return sum(2 * p.numel() for p in module.parameters() if cut.backend == "local" and config.bf16)
    narrow = 2 if config.bf16 or config.use_mp_opt else 0
    groups = _groups(module)
    whole = [sum((narrow or p.element_size()) * p.numel() for p in group) for group in groups]
    reduced = [sum(max(p.element_size(), 4) * p.numel() for p in g if p.requires_grad) for g in groups]
    # those of the root from its forward to the end; one block in use while the next one is on its way
    return whole[-1] + 2 * max(whole[:-1], default=0) + max(reduced[:-1], default=0)


def _work(
    config: StrategyConfig, cut: _Cut, module: nn.Module, tokens: int, kind: str
) -> tuple[trace.Step, int]:
    """(what a pack adds, what is gathered for it) of a model."""
    narrow = torch.bfloat16 if config.bf16 or config.use_mp_opt else None
    options: dict[str, Any] = {"fused": config.fused_linear_logprob, "chunk_size": config.chunk_size}
    if cut.backend == "fsdp2" or cut.gradients > 1:
        options |= {"groups": _groups, "shard": cut.gradients}
    part = -(-tokens // config.sp_size)
    found = trace.step(trace.on_meta(module, narrow), part, kind=kind, **options)
    return found, _gathered(config, cut, module)


def _engine(module: Any, kind: str) -> int:
    """The weights of an engine of this process."""
    wide = 2 if kind == "cuda" else 4
    total = 0
    for p in module.parameters():
        full = p.is_floating_point() or quantize.is_low(p)
        total += quantize.count(p) * (wide if full else p.element_size())
    return total


def _cache(config: StrategyConfig, module: Any, kind: str, length: int) -> int:
    """The keys and values that an engine keeps of sequences of `length` tokens."""
    if not length or not hasattr(module, "config"):
        return 0
    text = module.config.get_text_config()
    length = min(length, getattr(text, "max_position_embeddings", length))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    wide = 2 if kind == "cuda" else 4
    return 2 * wide * config.engine_batch * length * text.num_hidden_layers * heads * size


def estimate(
    config: StrategyConfig,
    *models: tuple[nn.Module, Transform | None],
    budget: int,
    world: int = 1,
    kind: str = "cuda",
    engine: bool = True,
    length: int = 0,
) -> Estimate:
    """What one of `world` processes holds with these models, each with its optimizer, or None for one that
    only scores. The modules may be on the meta device; they are left alone.

    A pack has `budget` tokens, of which all count as responses; with sp_size each process has its part of
    them. A model that takes one sequence at a time has at most that. kind: "cuda" or "cpu". `engine`: one
    samples with a copy of the first model, sequences of up to `length` tokens (0 leaves out its cache). What
    cannot run without values leaves a line in `unknown`.
    """
    if not models or budget < 1:
        raise ValueError(f"models, budget: expected at least one of each, got {len(models)} and {budget}")
    cut = _cut(config, world)
    unknown: list[str] = []
    held = [_held(config, cut, module, tx, unknown) for module, tx in models]
    parameters, gradients, optimizer, update = zip(*held)
    work, gathered = trace.Step(0, 0, 0), 0
    for module in [module for module, tx in models if tx is not None]:
        none = (trace.Step(0, 0, 0), 0)
        name = f"activations of {type(module).__name__}"
        found, more = _try(name, partial(_work, config, cut, module, budget, kind), none, unknown)
        if sum(found) + more > sum(work) + gathered:
            work, gathered = found, more
    size = 0
    if engine:
        first = models[0][0]
        size = _engine(first, kind)
        size += _try("cache of the engine", partial(_cache, config, first, kind, length), 0, unknown)
    out = Estimate(
        parameters=sum(parameters),
        gradients=max(gradients),  # one model's after the other's
        optimizer=sum(optimizer),
        **work._asdict(),
        gathered=gathered,
        update=max(update),
        engine=size,
        host=0,
        awake=bool(size) and (kind == "cpu" or not config.enable_engine_sleep),
        unknown=tuple(unknown),
    )
    return out if kind == "cpu" else _moved(config, out)


def _moved(config: StrategyConfig, x: Estimate) -> Estimate:
    """The estimate with what lives in host memory counted there."""
    host = 0 if x.awake else x.engine
    if config.fsdp_cpu_offload:
        host += x.parameters + x.gradients + x.optimizer + x.update
        return replace(x, parameters=0, gradients=0, optimizer=0, update=0, host=host)
    if config.zero_stage and config.adam_offload:
        return replace(x, optimizer=0, update=0, host=host + x.optimizer + x.update)
    if config.adam_offload:  # parameters and gradients go there for the update, and updates come back
        host += x.optimizer + x.update + x.parameters + x.gradients
        return replace(x, optimizer=0, update=x.gradients, host=host)
    return replace(x, host=host)


def _size(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def _remedy(config: StrategyConfig, x: Estimate, world: int, checkpointed: bool) -> str:
    """The first thing to change where the peak is too high: what is largest in it, and what makes it less."""
    if x.total == x.sampling:
        return "lower engine_batch" if not x.awake else "set enable_engine_sleep"
    if x.awake and not config.enable_engine_sleep:
        return "set enable_engine_sleep"
    work = x.activations + x.head + x.backward
    if x.total == x.training and work >= x.parameters + x.gradients + x.optimizer:
        if x.head >= x.activations + x.backward:
            return "lower chunk_size" if config.fused_linear_logprob else "set fused_linear_logprob"
        return "lower budget, or raise sp_size" if checkpointed else "set gradient_checkpointing"
    if config.shard_size and config.shard_size < world:
        return "raise shard_size, or set it to 0"
    if 0 < config.zero_stage < 3:
        return "set zero_stage 3"
    if not config.adam_offload and not config.fsdp_cpu_offload and x.optimizer >= x.parameters:
        return "take more processes, or set adam_offload"
    return "take more processes, or set fsdp_cpu_offload"


_ROWS = {
    "parameters": "",
    "gradients": "",
    "optimizer": "",
    "activations": "of a pack, when the forward is done",
    "head": "beside them, while the log-probs are computed",
    "backward": "beside both, at its peak",
    "gathered": "whole blocks, and buffers of their gradients",
    "update": "instead of the four above, while the optimizer steps",
}


def table(x: Estimate, *, available: int, host: int, remedy: str) -> str:
    """An estimate for people, against what the device and the host have [bytes]. `remedy` is said where it is
    too much."""
    engine = "all the time" if x.awake else "while it samples, asleep in host memory"
    rows = _ROWS | {"engine": engine, "host": f"of {_size(host)} of host memory"}
    lines = [
        f"  {name:<12}{_size(getattr(x, name)):>11}  {note}"
        for name, note in rows.items()
        if getattr(x, name)
    ]
    lines += [f"  not known, and not counted: {line}" for line in x.unknown]
    phase = next(name for name in ("training", "updating", "sampling") if getattr(x, name) == x.total)
    if x.host > host:
        verdict = "does not fit the host"
    elif x.total > available:
        verdict = f"does not fit: {remedy}"
    else:
        verdict = "fits"
    lines.append(f"  {'peak':<12}{_size(x.total):>11}  in {phase}, of {_size(available)}: {verdict}")
    return "\n".join(lines)


def _host() -> int:
    """Host memory for each process of this machine [bytes]."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def preflight(
    strategy: Strategy,
    *models: tuple[nn.Module, Transform | None],
    budget: int,
    engine: bool = True,
    length: int = 0,
) -> str:
    """The table of `estimate` for this strategy on this machine, for `strategy.print` before `init`. ""
    on all ranks but the first."""
    if strategy.rank:
        return ""  # only the first prints it
    kind, config = strategy.device.type, strategy.config
    options: dict[str, Any] = {"world": strategy.world, "kind": kind, "engine": engine, "length": length}
    x = estimate(config, *models, budget=budget, **options)
    available = host = _host()
    if kind == "cuda":
        available = torch.cuda.get_device_properties(strategy.device).total_memory
    checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in models[0][0].modules())
    remedy = _remedy(config, x, strategy.world, checkpointed)
    head = f"memory of a process (1 of {strategy.world}, packs of {budget} tokens), estimated"
    return f"{head}\n{table(x, available=available, host=host, remedy=remedy)}"
