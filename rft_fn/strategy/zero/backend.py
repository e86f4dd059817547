"""DeepSpeed ZeRO 1, 2 and 3 as a `Strategy`.

`Strategy.grad` returns gradients that cannot be looked at, because DeepSpeed holds them, and
`Strategy.update` is DeepSpeed's step: the weights equal one process's to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import dist, memory, metric, precision, tree
from rft_fn import model as model_lib
from rft_fn.loss.gradient import loss_and_metrics
from rft_fn.model import packing_probe
from rft_fn.model.bind import own_parameters, require_own
from rft_fn.model.copies import to_device
from rft_fn.model.finite import require_finite
from rft_fn.model.lora_merged import Export
from rft_fn.model.residence import Residence, Where
from rft_fn.strategy import step
from rft_fn.strategy.common import Backend, all_true, noise_meter, watched
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.diagnose import NonFinite
from rft_fn.strategy.fsdp2 import groups
from rft_fn.strategy.packer import Packer
from rft_fn.strategy.session import Session
from rft_fn.strategy.zero import deepspeed_engine, stages
from rft_fn.strategy.zero.deepspeed_engine import Root, ZeroModel
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, Transform, record

__all__ = ["ZeroBackend", "ZeroResidence", "deepspeed", "layout"]


# ---------- where the weights of a model under DeepSpeed are: its shards move with it


class ZeroResidence(Residence):
    """The place of one model's weights; at stage 3 the shards move with the parameters."""

    def __init__(self, root: nn.Module, module: nn.Module, *, trained: bool = False):
        super().__init__(root, module)
        self.trained = trained

    def move(self, where: Where) -> None:
        """Move the weights; ValueError for a model in training: its optimizer shares them."""
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


# ---------- DeepSpeed ZeRO 1, 2 and 3 as a `Strategy`


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
        """Return the device on which a frozen model reads its packs."""
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
    """Gradients that DeepSpeed holds; `items` gathers them."""

    turn: int  # of the model's `grad` calls: it has only the last ones
    model: ZeroModel = tree.static()
    source: Any = tree.static(default=None)  # what they were computed from, until they are donated

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole gradient in float32), one parameter after the other; all ranks iterate.

        ValueError for gradients that are not of the last `grad` of their model.
        """
        if self.turn != self.model.turn:
            raise ValueError(
                "grads: expected those of the last grad of this model: DeepSpeed holds no others"
            )
        for name, p in self.model.params.items():
            yield name, self.model.stage.gradient(p)


def _size(shard_size: int | None, *sizes: int) -> int:
    """Return the number of processes that a model is sharded over: `shard_size`, or all.

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


class ZeroBackend(Backend):
    """The strategy of DeepSpeed ZeRO over the processes of a session, or over one."""

    def __init__(self, config: StrategyConfig, session: Session):
        super().__init__(config, session, rank=dist.rank(), world=dist.world())
        self.packer = Packer(config, all_true)

    def _bind(
        self,
        module: nn.Module,
        *,
        sampling: Sampling | None = None,
        entropy: bool = False,
        aux: bool = False,
        shard_size: int | None = None,
    ) -> tuple[Apply, tree.Named]:
        """Return (apply, params) of a module that only scores.

        Stage 3 shards its parameters, unless shard_size is 1; stages 1 and 2 have nothing to shard.
        """
        config = self.config
        size = _size(shard_size, 1)
        root = deepspeed_engine.wrap_for_training(config, module, sampling, entropy, aux)
        run: nn.Module = root
        if config.zero_stage == 3 and size == dist.world():
            run = deepspeed_engine.initialize(config, root)
            deepspeed_engine.gather_with_root(root, module)
        elif config.bf16:
            for p in module.parameters():
                p.data = p.data.bfloat16()
        self._settle(root, run)
        params = own_parameters(module)
        residence = ZeroResidence(run, module)
        return ZeroApply(run, params, self.session, residence), tree.map(lambda p: p, params)

    def _settle(self, root: Root, run: Callable[[Any], dict[str, Tensor]]) -> None:
        """Find out how a model takes packs, by the forward that packs go through."""
        self.packer.settle(root.inner, lambda question: packing_probe.Found(**run(question)))

    def _init(
        self, module: nn.Module, tx: Transform, *, shard_size: int | None = None, **options: Any
    ) -> tuple[Apply, TrainState]:
        """Return (apply, state); ValueError for a `tx` that DeepSpeed's optimizer cannot be."""
        _size(shard_size)
        root = deepspeed_engine.wrap_for_training(self.config, module, **options)
        model = ZeroModel(self.config, module, root, tx)
        self._settle(root, model.deepspeed_engine)
        residence = ZeroResidence(model.deepspeed_engine, module, trained=True)
        apply = ZeroApply(model.deepspeed_engine, model.params, self.session, residence, model)
        return apply, deepspeed_engine.state_of(model, count=0, done=0, skipped=0)

    def _grad(
        self, state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]
    ) -> tuple[ZeroGrads, dict[str, metric.Metric]]:
        """Compute (gradients, metrics) of (w * loss).sum() over the packs of all ranks.

        The gradients stay in DeepSpeed. Their noise is not measured with adam_offload. Every rank brings the
        same number of packs, at least one.
        """
        model = deepspeed_engine.model_of(state)
        if not isinstance(apply, ZeroApply) or apply.model is not model:
            raise ValueError("apply: expected the one that init gave with this state, got another")
        if not packs:
            raise ValueError("packs: expected one or more, got none")
        device = next(iter(state.params.values())).device

        # DeepSpeed adds a pack's gradients to those that are there: of earlier packs, and of an earlier batch
        model.clear()
        mine: dict[str, metric.Metric] = {}
        noise = None if model.stage.offloads else noise_meter(packs)
        held: list[Tensor] = []
        for i, pack in enumerate(packs):
            pack = to_device(pack, device)
            last = i + 1 == len(packs)
            side = None if noise is None else noise.ends(i)
            with self.session.phase(f"forward of step {state.step + 1}"):
                out = apply(state.params, pack)
                total, more = loss_and_metrics(loss_fn, out, pack)
            with self.session.phase(f"backward of step {state.step + 1}"):
                if not total.requires_grad:  # DeepSpeed counts on a backward of every pack
                    total = total + sum(0 * x.sum() for x in tree.leaves(out) if x.requires_grad)
                model.backward(total, last=last or side is not None)
            mine = metric.merge(mine, more)
            if noise is None or (side is None and not last):
                continue

            # each half is summed by itself, for its norm, and the next sum begins at 0
            if side is not None:
                noise.add(model.square())
            if held:
                model.add_gradients(held)
                held = []
            if side == 1:
                noise.add(model.square())
            if not last:
                held = model.take_gradients()

        metrics = step.merge_metrics(mine, state.step, self.session)
        if noise is not None:
            metrics |= noise.metrics()
        return ZeroGrads(turn=model.turn, model=model), metrics

    def _update(self, state: TrainState, grads: ZeroGrads) -> tuple[TrainState, dict[str, metric.Metric]]:
        """Take DeepSpeed's step in place: (the state one step on, metrics). Donates both.

        ValueError for gradients that are not of the last `grad` of this model; the rest as `step.update`.
        """
        model, count = deepspeed_engine.model_of(state), state.opt[0].count
        if grads.model is not model or grads.turn != model.turn:
            raise ValueError(
                "grads: expected those of the last grad of this model: DeepSpeed holds no others"
            )
        with self.session.phase(f"update of step {state.step + 1}"):
            norm = model.step(count)

        # a step that changed nothing counts as one that was skipped
        finite = norm < float("inf")
        skipped = 0 if finite else state.skipped + 1
        if skipped >= self.config.max_skips:
            raise NonFinite(
                f"gradients: expected finite ones, got NaN or inf in {skipped} updates in a row "
                f"(step {state.step + 1})"
            )

        model.turn += 1  # the gradients are used up
        new = deepspeed_engine.state_of(model, count=count + finite, done=state.step + 1, skipped=skipped)
        tree.donate(state, grads)
        numbers = {"grad/norm": norm, "grad/skipped": float(not finite)}
        return new, {name: metric.sum(torch.tensor(x)) for name, x in numbers.items()}

    def _held(self, p: Tensor) -> list[Tensor]:
        shard = getattr(p, "ds_tensor", None)  # of stage 3, where only small parameters are whole too
        return [p.detach()] if shard is None else [p.detach(), shard.detach()]

    def _put(self, p: Tensor, x: Tensor) -> None:
        if not hasattr(p, "ds_id"):
            p.copy_(x)
            return
        with deepspeed_engine.library().zero.GatheredParameters([p], modifier_rank=0):
            p.data.copy_(x)

    def _finite(self, grads: ZeroGrads) -> bool:
        return grads.model.finite()

    def _whole(self, state: TrainState, p: Tensor) -> Tensor:
        model = deepspeed_engine.model_of(state)
        with self.session.watch():
            wide = model.weight(p)
        return wide.to(torch.bfloat16) if model.config.use_mp_opt else wide

    @watched
    def save_pretrained(
        self,
        folder: str | Path,
        module: Any,
        tokenizer: Any = None,
        weights: Any = (),
        *,
        merge: bool = False,
    ) -> Path:
        full: dict[str, Tensor] = {}

        def keep(name: str, x: Tensor) -> None:
            require_finite(f"model: {folder} is not written", name, x)  # on all ranks, so that none waits
            if dist.is_main():
                full[name] = x.detach().cpu()

        # trained weights first, then those that stage 3 sharded though they are frozen
        trained = set()
        for name, x in weights.own() if isinstance(weights, Export) else weights:
            keep(name, x)
            trained.add(name)
        for name, p in module.named_parameters():
            if name not in trained:
                keep(name, stages.gathered(p))

        if dist.is_main():
            model_lib.save(folder, module, tokenizer, full.items(), merge=merge)
        dist.barrier()
        return Path(folder)

    _save = staticmethod(deepspeed_engine.save)
    _restore = staticmethod(deepspeed_engine.restore)

    def offload(self, state: TrainState, /) -> TrainState:
        return deepspeed_engine.moved(state, host=True)

    def reload(self, state: TrainState, /) -> TrainState:
        return deepspeed_engine.moved(state, host=False)

    def _release(self) -> None:
        """Take down the group in DeepSpeed, which remembers it, if it ends with this strategy."""
        comm = deepspeed_engine.library().comm
        if self.session.processes.began and comm.is_initialized():  # not before the first model
            dist.settle()
            comm.destroy_process_group()


def layout(config: StrategyConfig, world: int) -> memory.Layout:
    """Return the memory layout over `world` processes: each stage shards one state more."""
    parameters = world if config.zero_stage == 3 else 1
    gradients = world if config.zero_stage >= 2 else 1
    narrow = torch.bfloat16 if config.bf16 or config.use_mp_opt else None
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
        groups=groups if gradients > 1 else None,  # gathered and reduced about as by FSDP2
        gathered=parameters > 1,
        on_host=frozenset({"optimizer", "update"} if config.adam_offload else ()),
    )


def deepspeed(config: StrategyConfig, session: Session) -> Strategy:
    """Return the Strategy of DeepSpeed ZeRO over the processes of a session, or over one."""
    return record(Strategy, ZeroBackend(config, session))
