"""FSDP2: parameters, gradients and optimizer as DTensors over a mesh (replicate, shard, sequence).

Only the placement of tensors differs from one process: gradients and updates are those of `step`, the same
functions on the same names. Gradients are summed over ranks, never averaged: the average is in `w`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rft_fn import ckpt, dist, memory, metric, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import own_parameters, require_own
from rft_fn.model.blocks import blocks
from rft_fn.model.lora import Export
from rft_fn.model.materialize import Residence
from rft_fn.strategy import step
from rft_fn.strategy.common import Backend, Cut, assemble, everywhere, nothing
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.local import layout as local_layout
from rft_fn.strategy.sequence import Sequence as SequenceAxis
from rft_fn.strategy.sequence import shared_meshes
from rft_fn.strategy.step import Session
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["fsdp2", "groups", "layout"]


def _odd(module: nn.Module) -> list[nn.Module]:
    """Parts whose parameters differ in type from most of the module: FSDP2 moves one type at a time."""
    count: dict[torch.dtype, int] = {}
    for p in module.parameters():
        count[p.dtype] = count.get(p.dtype, 0) + p.numel()
    main = max(count, key=lambda d: count[d])
    return [m for m in module.modules() if any(p.dtype != main for p in m.parameters(recurse=False))]


def shard_module(root: nn.Module, mesh: DeviceMesh, config: StrategyConfig) -> nn.Module:
    """`root` with its parameters as DTensors over `mesh`, in place: one group a block, one for the rest."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    param_dtype = None
    if config.bf16:
        param_dtype = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=_reduce(root))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if config.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())

    # towers too: packs without media borrow some, so all ranks join in
    for part in [*blocks(root), *_odd(root)]:
        if not isinstance(part, FSDPModule):
            fully_shard(part, **options)
    fully_shard(root, **options)

    # gradients are summed over ranks, by an operation that every backend has
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
    return root


def _reshard(*parts: nn.Module) -> None:
    """Reshard modules after a forward without a backward."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        if isinstance(part, FSDPModule):
            part.reshard()


def _reduce(root: nn.Module) -> torch.dtype:
    """The type that gradients are summed in: float32, or float64 for a model in that."""
    if any(p.dtype == torch.float64 for p in root.parameters()):
        return torch.float64
    return torch.float32


@dataclass(frozen=True)
class FSDPApply:
    """The apply of a sharded module.

    It takes only the module's own parameters, for torch.func does not see through FSDP2. Called from outside
    of `grad`, each process scores another pack.
    """

    root: nn.Module
    own: tree.Named
    sequence: SequenceAxis | None
    session: Session
    residence: Residence

    @property
    def device(self) -> torch.device:
        """Where packs of a frozen model belong."""
        return next(self.root.parameters()).device

    def together(self, params: tree.Named, pack: Packed) -> TokenOut:
        """A pack that is the same on every process of the sequence axis."""
        why = (
            "sharded, it takes no others; apply, params = st.bind(another module), then "
            "model.assign(params, source) puts them there"
        )
        require_own(self.own, params, why)
        self.residence.require_device("apply")
        out = self.root(pack)
        if not torch.is_grad_enabled():
            _reshard(self.root)  # otherwise only a backward does, and the next forward has old weights
        return out

    def __call__(self, params: tree.Named, pack: Packed) -> TokenOut:
        with self.session.watch():
            if self.sequence is None:
                return self.together(params, pack)
            device = pack.tokens.device
            out = []
            for b in self.sequence.exchange([pack]):
                out.append(self.together(params, tree.map(lambda x: x.to(device), b)))
            return out[self.sequence.rank]


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
) -> tuple[FSDPApply, tree.Named]:
    """(apply, params) of a module, which is sharded in place."""
    quantize.require_whole(module, "FSDP2")
    mesh, sequence = shared_meshes(config, shard_size)
    module = step.cast(module, config)
    root = step.wrap_for_training(config, module, sampling=sampling, entropy=entropy, aux=aux)
    if sequence is not None:
        model_lib.split_over(root, sequence)
    shard_module(root, mesh, config)
    model_lib.materialize(module)

    # a forward of the probe may have ended inside of any part, and left it gathered
    cut.settle(root)
    _reshard(*root.modules())
    step.compile_blocks(config, root)
    own = own_parameters(module)
    apply = FSDPApply(root, own, sequence, session, Residence(root, module))
    return apply, tree.map(lambda p: p, own)


def init(
    config: StrategyConfig, module: nn.Module, tx: Transform, **options: Any
) -> tuple[Apply, TrainState]:
    """(apply, state) of a module that is trained with `tx`."""
    apply, params = bind(config, module, **options)
    return apply, step.start(params, tx, config, module, apply.residence)


def grad(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], *, session: Session
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """`step.grad` over the packs of all ranks: summed gradients, sharded; metrics, the same everywhere."""
    if not isinstance(apply, FSDPApply):
        raise ValueError("apply: expected one that this strategy's init gave, got another")
    sequence = apply.sequence
    if sequence is not None:
        with session.watch():
            packs = sequence.exchange(packs)
    grads, mine = step.grad(state, apply.together, loss_fn, packs, session=session)
    if sequence is not None and sequence.rank > 0:
        mine = {}  # the others on the axis had the same packs
    return grads, step.merge_metrics(mine, state.step, session)


def export(state: TrainState, *, finite: bool = True, session: Session) -> Export:
    """The trained weights for an engine: full tensors by the plain model's names, adapters merged.

    One at a time, on every rank: all of them have to iterate.
    """

    def full(p: Tensor) -> Tensor:
        p = p.detach()
        if not isinstance(p, DTensor):
            return p
        with session.watch():
            return p.full_tensor()

    return Export(state.params, state.module, full, finite=finite)


def groups(root: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of a module as FSDP2 gathers them: block by block, and at the end all others."""
    out, seen = [], set()
    for part in [*blocks(root), *_odd(root), root]:
        group = [p for p in part.parameters() if id(p) not in seen]
        seen |= {id(p) for p in group}
        out.append(group)
    return out


def layout(config: StrategyConfig, world: int) -> memory.Layout:
    """The memory layout over `world` processes: that of one process, sharded group by group."""
    one = local_layout(config)
    size = config.shard_size or world

    # DTensors keep the type of the trained ones, and are cast group by group as they are gathered
    sharded = replace(
        one,
        parameters=size,
        gradients=size,
        optimizer=size,
        sequence=config.sp_size,
        frozen=one.kept,
        cast_copy=False,
        groups=groups,
        gathered=True,
    )
    if not config.fsdp_cpu_offload:
        return sharded
    all_of_it = frozenset({"parameters", "gradients", "optimizer", "update"})
    return replace(sharded, on_host=all_of_it, copied_for_update=False)


def fsdp2(config: StrategyConfig, session: Session) -> Strategy:
    """The Strategy of FSDP2 over the processes of a session, with sequence parallelism where asked."""
    # sizes that do not fit raise here, not when the first model is laid out
    shared_meshes(config)
    cut = Cut(config, everywhere)
    backend = Backend(
        init=partial(init, config, cut=cut, session=session),
        bind=partial(bind, config, cut=cut, session=session),
        grad=partial(grad, session=session),
        update=partial(step.update, config=config, session=session),
        export=partial(export, session=session),
        finite=step.finite,
        save_pretrained=partial(model_lib.save, write=dist.is_main()),
        save=ckpt.save,
        restore=ckpt.restore,
        offload=step.offload,
        reload=step.reload,
        release=nothing,
    )
    return assemble(backend, config, session, cut, rank=dist.rank(), world=dist.world(), gather=dist.gather)
