"""DeepSpeed ZeRO 1, 2 and 3 as a `Strategy`.

`Strategy.grad` returns gradients that cannot be looked at, because DeepSpeed holds them, and
`Strategy.update` is DeepSpeed's step: the weights are those of one process to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import dist, memory, metric, precision, tree
from rft_fn import model as model_lib
from rft_fn.model import probe
from rft_fn.model.bind import own_parameters, require_own
from rft_fn.model.freeze import require_finite
from rft_fn.model.lora import Export
from rft_fn.model.materialize import Residence, Where
from rft_fn.strategy import step
from rft_fn.strategy.common import Backend, Cut, assemble, everywhere
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.diagnose import NonFinite
from rft_fn.strategy.fsdp2 import groups
from rft_fn.strategy.step import Session
from rft_fn.strategy.zero import engine, stages
from rft_fn.strategy.zero.engine import Root, ZeroModel
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["ZeroResidence", "deepspeed", "layout"]


# ---------- where the weights of a model under DeepSpeed are: its shards move with it


class ZeroResidence(Residence):
    """Where the weights of one model are, of which stage 3 has the shards beside the parameters."""

    def __init__(self, root: nn.Module, module: nn.Module, *, trained: bool = False):
        super().__init__(root, module)
        self.trained = trained

    def move(self, where: Where) -> None:
        """`Residence.move`; ValueError for a model in training: its optimizer shares the weights."""
        if self.trained:
            raise ValueError(
                f"apply: expected one of st.bind with zero_stage, got that of {self.name}, whose weights are "
                "part of DeepSpeed's optimizer; FSDP2 moves models in training too"
            )
        super().move(where)

    def apply(self, copy: Callable[[Tensor], Tensor]) -> None:
        # a parameter of stage 3 is empty, but for small ones, which stay gathered
        super().apply(copy)
        for p in self.root.parameters():
            shard: Any = getattr(p, "ds_tensor", None)
            if shard is not None:
                shard.data = copy(shard.data)


# ---------- deepSpeed ZeRO 1, 2 and 3 as a `Strategy`


@dataclass(frozen=True)
class ZeroApply:
    """The apply of one module under DeepSpeed; it takes only that module's parameters."""

    run: nn.Module  # pack -> the fields of a TokenOut
    params: tree.Named
    session: Session
    residence: ZeroResidence
    model: ZeroModel | None = None  # None for one that only scores

    @property
    def device(self) -> torch.device:
        """The device on which a frozen model reads its packs."""
        return next(self.run.parameters()).device

    def __call__(self, params: tree.Named, pack: Packed) -> TokenOut:
        why = (
            "under ZeRO it takes no others; apply, params = st.bind(another module), then "
            "model.assign(params, source) puts them there"
        )
        require_own(self.params, params, why)
        self.residence.require_device("apply")
        with self.session.watch():
            return TokenOut(**self.run(pack))


@tree.struct
class ZeroGrads:
    """Gradients that DeepSpeed holds."""

    turn: int  # of the model's `grad` calls: it has only those of the last
    model: ZeroModel = tree.static()
    source: Any = tree.static(default=None)  # what they were computed from, until they are donated


def _size(shard_size: int | None, *sizes: int) -> int:
    """The number of processes that a model's parameters are sharded over: `shard_size`, or all.

    ValueError unless it is one of `sizes`, or all.
    """
    size = shard_size or dist.world()
    allowed = (*sizes, dist.world())
    if size not in allowed:
        raise ValueError(
            f"shard_size: expected {' or '.join(map(str, allowed))} with zero_stage, "
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
    """(apply, params) of a module that only scores.

    Stage 3 shards its parameters, unless shard_size is 1; stages 1 and 2 have nothing to shard.
    """
    size = _size(shard_size, 1)
    root = engine.wrap_for_training(config, module, sampling, entropy, aux)
    run: nn.Module = root
    if config.zero_stage == 3 and size == dist.world():
        run = engine.initialize(config, root)
        engine.gather_with_root(root, module)
    elif config.bf16:
        for p in module.parameters():
            p.data = p.data.bfloat16()
    _settle(cut, root, run)
    params = own_parameters(module)
    residence = ZeroResidence(run, module)
    return ZeroApply(run, params, session, residence), tree.map(lambda p: p, params)


def _settle(cut: Cut, root: Root, run: Callable[[Any], dict[str, Tensor]]) -> None:
    """Find out how a model takes packs, by the forward that packs go through."""

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
    """(apply, state) of a module that is trained with `tx`.

    ValueError for a `tx` that DeepSpeed's optimizer cannot be.
    """
    _size(shard_size)
    root = engine.wrap_for_training(config, module, sampling, entropy, aux)
    model = ZeroModel(config, module, root, tx)
    _settle(cut, root, model.deepspeed_engine)
    residence = ZeroResidence(model.deepspeed_engine, module, trained=True)
    apply = ZeroApply(model.deepspeed_engine, model.params, session, residence, model)
    return apply, engine.state_of(model, count=0, done=0, skipped=0)


def grad(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], *, session: Session
) -> tuple[ZeroGrads, dict[str, metric.Metric]]:
    """(gradients, metrics) of (w * loss).sum() over the packs of all ranks.

    The gradients stay in DeepSpeed, the metrics are the same everywhere. Every rank brings the same number of
    packs, at least one.
    """
    model = engine.model_of(state)
    if not isinstance(apply, ZeroApply) or apply.model is not model:
        raise ValueError("apply: expected the one that init gave with this state, got another")
    if not packs:
        raise ValueError("packs: expected one or more, got none")
    device = next(iter(state.params.values())).device

    # DeepSpeed adds a pack's gradients to those that are there: of earlier packs, and of an earlier batch
    model.clear()
    mine: dict[str, metric.Metric] = {}
    for i, pack in enumerate(packs):
        pack = tree.map(lambda x: x.to(device), pack)
        with session.phase(f"forward of step {state.step + 1}"):
            out = apply(state.params, pack)
            total, more = step.loss_and_metrics(loss_fn, out, pack)
        with session.phase(f"backward of step {state.step + 1}"):
            if not total.requires_grad:  # DeepSpeed counts on a backward of every pack
                total = total + sum(0 * x.sum() for x in tree.leaves(out) if x.requires_grad)
            last = i + 1 == len(packs)
            model.backward(total, last=last)
        mine = metric.merge(mine, more)

    metrics = step.merge_metrics(mine, state.step, session)
    return ZeroGrads(turn=model.turn, model=model), metrics


def update(
    state: TrainState, grads: ZeroGrads, *, config: StrategyConfig, session: Session
) -> tuple[TrainState, dict[str, metric.Metric]]:
    """(the state one step on, metrics). Donates both: the step is in place.

    Gradients with a NaN or an inf change nothing but the counts, and are `grad/skipped`; after
    config.max_skips of them in a row NonFinite. ValueError for gradients that are not of the last
    `grad` of this model.
    """
    model, count = engine.model_of(state), state.opt[0].count
    if grads.model is not model or grads.turn != model.turn:
        raise ValueError("grads: expected those of the last grad of this model: DeepSpeed holds no others")
    with session.phase(f"update of step {state.step + 1}"):
        norm = model.step(count)

    # a step that changed nothing counts as one that was skipped
    finite = norm < float("inf")
    if finite:
        count += 1
        skipped = 0
    else:
        skipped = state.skipped + 1
    if skipped >= config.max_skips:
        raise NonFinite(
            f"gradients: expected finite ones, got NaN or inf in {skipped} updates in a row "
            f"(step {state.step + 1})"
        )

    model.turn += 1  # the gradients are used up
    new = engine.state_of(model, count=count, done=state.step + 1, skipped=skipped)
    tree.donate(state, grads)
    numbers = {"grad/norm": norm, "grad/skipped": float(not finite)}
    return new, {name: metric.sum(torch.tensor(x)) for name, x in numbers.items()}


def export(state: TrainState, *, finite: bool = True, session: Session) -> Export:
    """The trained weights for an engine: full tensors by the plain model's names.

    Adapters are merged. One at a time, on every rank: all of them have to iterate.
    """
    model = engine.model_of(state)

    def full(p: Tensor) -> Tensor:
        with session.watch():
            wide = model.weight(p)
        if model.config.use_mp_opt:
            return wide.to(torch.bfloat16)
        return wide

    return Export(state.params, state.module, full, finite=finite)


def save_pretrained(
    folder: str | Path, module: Any, tokenizer: Any = None, weights: Any = (), *, merge: bool = False
) -> Path:
    """`model.save`: put together by all ranks, written by the first."""
    full: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        require_finite(f"model: {folder} is not written", name, x)  # on all ranks, so that none waits
        if dist.is_main():
            full[name] = x.detach().cpu()

    # trained weights first, then those that stage 3 sharded though they are frozen
    if isinstance(weights, Export):
        weights = weights.own()
    trained = set()
    for name, x in weights:
        keep(name, x)
        trained.add(name)
    for name, p in module.named_parameters():
        if name not in trained:
            keep(name, stages.gathered(p))

    if dist.is_main():
        model_lib.save(folder, module, tokenizer, full.items(), merge=merge)
    dist.barrier()
    return Path(folder)


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
        sum_dtype=precision.wide,
        groups=reduced,
        gathered=parameters > 1,
        on_host=on_host,
    )


def _finite(grads: ZeroGrads) -> bool:
    """Whether all gradients are finite, the same on every rank."""
    return grads.model.finite()


def deepspeed(config: StrategyConfig, session: Session) -> Strategy:
    """The Strategy of DeepSpeed ZeRO over the processes of a session, or over one."""
    cut = Cut(config, everywhere)

    def release() -> None:
        """DeepSpeed remembers the group, so it takes down one that ends with this strategy."""
        comm = engine.library().comm
        if session.processes.began and comm.is_initialized():  # not before the first model
            dist.settle()
            comm.destroy_process_group()

    backend = Backend(
        init=partial(init, config, cut=cut, session=session),
        bind=partial(bind, config, cut=cut, session=session),
        grad=partial(grad, session=session),
        update=partial(update, config=config, session=session),
        export=partial(export, session=session),
        finite=_finite,
        save_pretrained=save_pretrained,
        save=engine.save,
        restore=engine.restore,
        offload=partial(engine.moved, host=True),
        reload=partial(engine.moved, host=False),
        release=release,
    )
    return assemble(backend, config, session, cut, rank=dist.rank(), world=dist.world(), gather=dist.gather)
