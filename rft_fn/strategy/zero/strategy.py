"""DeepSpeed ZeRO 1, 2 and 3: the same record, with gradients and the optimizer inside of DeepSpeed's engine.

`Strategy.grad` returns gradients that cannot be looked at, for the engine holds them, and `Strategy.update`
is the engine's step: the weights are those of one process to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import dist, faults, memory, metric, tree
from rft_fn import model as model_lib
from rft_fn.model import probe
from rft_fn.model.finite import require_finite
from rft_fn.model.lora import Export
from rft_fn.strategy import step
from rft_fn.strategy.common import Cut, everywhere, together
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.fsdp2 import groups
from rft_fn.strategy.zero import engine as zero
from rft_fn.strategy.zero import state as zero_state
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["deepspeed", "layout"]


@dataclass(frozen=True)
class ZeroApply:
    """The apply of a module whose weights DeepSpeed lays out: it takes no parameters but the module's own."""

    run: Callable[[Packed], dict[str, Tensor]]
    own: tree.Named
    engine: zero.Engine | None = None  # of a model that is trained

    @property
    def device(self) -> torch.device:
        """Where packs of a frozen model belong."""
        return next(self.run.parameters()).device  # type: ignore[attr-defined]

    def __call__(self, params: tree.Named, pack: Packed) -> TokenOut:
        if any(params[name] is not p for name, p in self.own.items()):
            raise ValueError(
                "params: expected this module's own, got others: under ZeRO it takes no others; apply, "
                "params = st.bind(another module), then model.assign(params, source) puts them there"
            )
        return TokenOut(**self.run(pack))


@tree.struct
class ZeroGrads:
    """Gradients that the engine holds."""

    turn: int  # the engine has only those of its last
    engine: zero.Engine = tree.static()


def _size(shard_size: int | None, *sizes: int) -> int:
    """How many processes a model's parameters are sharded over: all, unless it is told."""
    size = shard_size or dist.world()
    if size not in (dist.world(), *sizes):
        raise ValueError(
            f"shard_size: expected {' or '.join(map(str, (*sizes, dist.world())))} with zero_stage, "
            f"got {shard_size}; FSDP2 has the others"
        )
    return size


def bind(
    config: StrategyConfig,
    module: nn.Module,
    *,
    cut: Cut,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
    shard_size: int | None = None,
) -> tuple[Apply, tree.Named]:
    """(apply, params) of a module that only scores. Stage 3 shards its parameters, unless shard_size is 1: 1
    and 2 have nothing to shard."""
    size = _size(shard_size, 1)
    root = zero.wrap_for_training(config, module, sampling, entropy, aux)
    run: Any = root
    if config.zero_stage == 3 and size == dist.world():
        run = zero.library().initialize(
            model=root, config=zero.options(config, root), dist_init_required=False
        )[0]
        zero.register(root, module)
    elif config.bf16:
        for p in module.parameters():
            p.data = p.data.bfloat16()
    _settle(cut, root, run)
    own = tree.Named((n, p) for n, p in module.named_parameters() if p.requires_grad)
    return ZeroApply(run, own), tree.map(lambda p: p, own)


def _settle(cut: Cut, root: Any, run: Callable[[Any], dict[str, Tensor]]) -> None:
    """Ask the model inside of a root how it takes packs, by the forward that packs go through."""

    def call(question: probe.Question) -> probe.Found:
        return probe.Found(**run(question))

    cut.settle(root.inner, call)


def init(
    config: StrategyConfig,
    module: nn.Module,
    tx: Transform,
    *,
    cut: Cut,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
    shard_size: int | None = None,
) -> tuple[Apply, TrainState]:
    """(apply, state) of a module that is trained with `tx`. ValueError for a `tx` that DeepSpeed's optimizer
    cannot be."""
    _size(shard_size)
    root = zero.wrap_for_training(config, module, sampling, entropy, aux)
    engine = zero.Engine(config, module, root, tx)
    _settle(cut, root, engine.engine)
    apply = ZeroApply(engine.engine, engine.own, engine)
    return apply, zero_state.state_of(engine, count=0, done=0, skipped=0)


def grad(
    state: TrainState, apply: ZeroApply, loss_fn: LossFn, packs: Sequence[Packed]
) -> tuple[ZeroGrads, dict[str, metric.Metric]]:
    """(the sum over the packs of all ranks of the gradients of (w loss).sum(), which stays in the engine;
    merged metrics, the same everywhere). Every rank brings the same number of packs, one at least."""
    engine = state.opt[0].engine
    if apply.engine is not engine:
        raise ValueError("apply: expected the one that init gave with this state, got another")
    if not packs:
        raise ValueError("packs: expected one or more, got none")
    device = next(iter(state.params.values())).device
    engine.forget()
    mine: dict[str, metric.Metric] = {}
    for i, pack in enumerate(packs):
        pack = tree.map(lambda x: x.to(device), pack)
        with dist.phase(f"forward of step {state.step + 1}"):
            out = apply(state.params, pack)
            total, more = step.loss_and_metrics(loss_fn, out, pack)
        with dist.phase(f"backward of step {state.step + 1}"):
            if not total.requires_grad:  # the engine wants a backward from every pack
                total = total + sum(0 * x.sum() for x in tree.leaves(out) if x.requires_grad)
            engine.backward(total, last=i == len(packs) - 1)
        mine = metric.merge(mine, more)
    with dist.phase(f"metrics of step {state.step + 1}"):
        parts = dist.all_gather_object(tree.map(lambda x: x.cpu(), mine))
    metrics: dict[str, metric.Metric] = {}
    for part in parts:
        metrics = metric.merge(metrics, part)
    return ZeroGrads(turn=engine.turn, engine=engine), metrics


def update(
    config: StrategyConfig, state: TrainState, grads: ZeroGrads
) -> tuple[TrainState, dict[str, metric.Metric]]:
    """(the state one step on, metrics). Donates both arguments: the step is in place, reading them again
    raises.

    Gradients with a NaN or an inf change nothing but the counts, and are `grad/skipped`; after
    config.max_skips of them in a row faults.NonFinite. ValueError for gradients that are not of the last
    `grad` of this model.
    """
    engine = state.opt[0].engine
    if grads.engine is not engine or grads.turn != engine.turn:
        raise ValueError("grads: expected those of the last grad of this model: an engine holds no others")
    with dist.phase(f"update of step {state.step + 1}"):
        norm = engine.step(state.opt[0].count)
    finite = norm < float("inf")
    skipped = 0 if finite else state.skipped + 1
    if skipped >= config.max_skips:
        raise faults.NonFinite(
            f"gradients: expected finite ones, got NaN or inf in {skipped} updates in a row "
            f"(step {state.step + 1})"
        )
    engine.turn += 1  # the gradients are used up
    new = zero_state.state_of(engine, count=state.opt[0].count + finite, done=state.step + 1, skipped=skipped)
    tree.donate(state, grads)
    numbers = {"grad/norm": norm, "grad/skipped": float(not finite)}
    return new, {name: metric.sum(torch.tensor(x)) for name, x in numbers.items()}


def export(state: TrainState, *, finite: bool = True) -> Export:
    """The trained weights for an engine: full tensors by the plain model's names, adapters merged.

    One at a time, on every rank: all of them have to iterate.
    """
    engine = state.opt[0].engine

    def full(p: Tensor) -> Tensor:
        wide = engine.full(p)
        return wide.to(torch.bfloat16) if engine.config.use_mp_opt else wide

    return Export(state.params, state.module, full, finite=finite)


def save_pretrained(
    folder: str | Path, module: Any, tokenizer: Any, weights: Any = (), *, merge: bool = False
) -> Path:
    """`model.save`: put together by all ranks, written by the first."""

    full: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        require_finite(f"model: {folder} is not written", name, x)  # on all ranks, so that none waits
        if dist.is_main():
            full[name] = x.detach().cpu()

    if isinstance(weights, Export):
        weights = weights.own()
    trained = set()
    for name, x in weights:
        keep(name, x)
        trained.add(name)
    for name, p in module.named_parameters():
        if name not in trained:  # stage 3 shards frozen ones too
            keep(name, zero.gathered(p))
    if dist.is_main():
        model_lib.save(folder, module, tokenizer, full.items(), merge=merge)
    dist.barrier()
    return Path(folder)


def unsupported(config: StrategyConfig) -> list[str]:
    """The options that DeepSpeed does not honour."""
    wants: dict[str, Any] = {"sp_size": 1, "shard_size": 0, "fsdp_cpu_offload": False, "mixed_mm_data": False}
    return [name for name, neutral in wants.items() if getattr(config, name) != neutral]


def layout(config: StrategyConfig, world: int) -> memory.Layout:
    """The memory layout over `world` processes: each stage shards one state more."""
    parameters = gradients = 1
    if config.zero_stage >= 2:
        gradients = world
    if config.zero_stage == 3:
        parameters = world

    narrow = None
    if config.bf16 or config.use_mp_opt:
        narrow = torch.bfloat16
    on_host = frozenset()
    if config.adam_offload:
        on_host = frozenset({"optimizer", "update"})

    # modules are gathered and reduced as they are used, in about FSDP2's groups
    reduced = None
    if gradients > 1:
        reduced = groups
    return memory.Layout(
        parameters=parameters,
        gradients=gradients,
        optimizer=world,
        kept=narrow,
        frozen=narrow,
        stepped=torch.float32,
        computed=narrow,
        flat_copy=True,
        sum_dtype=step.wide,
        groups=reduced,
        gathered=parameters > 1,
        on_host=on_host,
    )


def deepspeed(config: StrategyConfig) -> Strategy:
    """The Strategy of DeepSpeed ZeRO over the processes that torchrun started, or over one. ValueError for an
    option that it cannot honour."""
    for name in unsupported(config):
        raise ValueError(
            f"{name}: expected {getattr(StrategyConfig(), name)} with zero_stage, got "
            f"{getattr(config, name)}; FSDP2 has it"
        )
    zero.library()
    dist.begin(config.timeout)
    faults.watch(config.timeout)
    cut = Cut(config, everywhere)
    shared = together(cut)
    weights = partial(export, finite=False)  # those of a fault are looked at as they are
    guarded = step.guarded(grad, partial(update, config), weights, lambda grads: grads.engine.finite())
    return Strategy(
        init=partial(init, config, cut=cut),
        bind=partial(bind, config, cut=cut),
        grad=guarded[0],
        update=guarded[1],
        export=export,
        save_pretrained=save_pretrained,
        save=zero_state.save,
        restore=zero_state.restore,
        offload=partial(zero_state.moved, host=True),
        reload=partial(zero_state.moved, host=False),
        **shared,
    )
