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

from rft_fn import dist, metric, tree
from rft_fn import model as model_lib
from rft_fn.model import probe
from rft_fn.model.finite import require_finite
from rft_fn.model.lora import Export
from rft_fn.strategy import step
from rft_fn.strategy.common import Backend, Cut, assemble, everywhere
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.diagnose import NonFinite
from rft_fn.strategy.session import Session
from rft_fn.strategy.zero import engine as zero
from rft_fn.strategy.zero import state as zero_state
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["deepspeed"]


@dataclass(frozen=True)
class ZeroApply:
    """The apply of a module whose weights DeepSpeed lays out: it takes no parameters but the module's own."""

    run: Callable[[Packed], dict[str, Tensor]]
    own: tree.Named
    session: Session
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
        with self.session.watch():
            return TokenOut(**self.run(pack))


@tree.struct
class ZeroGrads:
    """Gradients that the engine holds."""

    turn: int  # the engine has only those of its last
    engine: zero.Engine = tree.static()
    source: Any = tree.static(default=None)  # what they were computed from, until they are donated


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
    session: Session,
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
    return ZeroApply(run, own, session), tree.map(lambda p: p, own)


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
    session: Session,
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
    apply = ZeroApply(engine.engine, engine.own, session, engine)
    return apply, zero_state.state_of(engine, count=0, done=0, skipped=0)


def grad(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], *, session: Session
) -> tuple[ZeroGrads, dict[str, metric.Metric]]:
    """(the sum over the packs of all ranks of the gradients of (w loss).sum(), which stays in the engine;
    merged metrics, the same everywhere). Every rank brings the same number of packs, one at least."""
    engine = state.opt[0].engine
    if not isinstance(apply, ZeroApply) or apply.engine is not engine:
        raise ValueError("apply: expected the one that init gave with this state, got another")
    if not packs:
        raise ValueError("packs: expected one or more, got none")
    device = next(iter(state.params.values())).device
    engine.forget()
    mine: dict[str, metric.Metric] = {}
    for i, pack in enumerate(packs):
        pack = tree.map(lambda x: x.to(device), pack)
        with session.phase(f"forward of step {state.step + 1}"):
            out = apply(state.params, pack)
            total, more = step.loss_and_metrics(loss_fn, out, pack)
        with session.phase(f"backward of step {state.step + 1}"):
            if not total.requires_grad:  # the engine wants a backward from every pack
                total = total + sum(0 * x.sum() for x in tree.leaves(out) if x.requires_grad)
            engine.backward(total, last=i == len(packs) - 1)
        mine = metric.merge(mine, more)
    metrics = step.merge_metrics(mine, state.step, session)
    return ZeroGrads(turn=engine.turn, engine=engine), metrics


def update(
    state: TrainState, grads: ZeroGrads, *, config: StrategyConfig, session: Session
) -> tuple[TrainState, dict[str, metric.Metric]]:
    """(the state one step on, metrics). Donates both arguments: the step is in place, reading them again
    raises.

    Gradients with a NaN or an inf change nothing but the counts, and are `grad/skipped`; after
    config.max_skips of them in a row NonFinite. ValueError for gradients that are not of the last
    `grad` of this model.
    """
    engine = state.opt[0].engine
    if grads.engine is not engine or grads.turn != engine.turn:
        raise ValueError("grads: expected those of the last grad of this model: an engine holds no others")
    with session.phase(f"update of step {state.step + 1}"):
        norm = engine.step(state.opt[0].count)
    finite = norm < float("inf")
    skipped = 0 if finite else state.skipped + 1
    if skipped >= config.max_skips:
        raise NonFinite(
            f"gradients: expected finite ones, got NaN or inf in {skipped} updates in a row "
            f"(step {state.step + 1})"
        )
    engine.turn += 1  # the gradients are used up
    new = zero_state.state_of(engine, count=state.opt[0].count + finite, done=state.step + 1, skipped=skipped)
    tree.donate(state, grads)
    numbers = {"grad/norm": norm, "grad/skipped": float(not finite)}
    return new, {name: metric.sum(torch.tensor(x)) for name, x in numbers.items()}


def export(state: TrainState, *, finite: bool = True, session: Session) -> Export:
    """The trained weights for an engine: full tensors by the plain model's names, adapters merged.

    One at a time, on every rank: all of them have to iterate.
    """
    engine = state.opt[0].engine

    def full(p: Tensor) -> Tensor:
        with session.watch():
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


def deepspeed(config: StrategyConfig, session: Session) -> Strategy:
    """The Strategy of DeepSpeed ZeRO over the processes of a session, or over one."""
    cut = Cut(config, everywhere)

    def release() -> None:
        """DeepSpeed remembers the group, so it takes down one that ends with this strategy."""
        if session.processes.began:
            dist.settle()
            zero.library().comm.destroy_process_group()

    backend = Backend(
        init=partial(init, config, cut=cut, session=session),
        bind=partial(bind, config, cut=cut, session=session),
        grad=partial(grad, session=session),
        update=partial(update, config=config, session=session),
        export=partial(export, session=session),
        finite=lambda grads: grads.engine.finite(),
        save_pretrained=save_pretrained,
        save=zero_state.save,
        restore=zero_state.restore,
        offload=partial(zero_state.moved, host=True),
        reload=partial(zero_state.moved, host=False),
        release=release,
    )
    return assemble(backend, config, session, cut, rank=dist.rank(), world=dist.world(), gather=dist.gather)
