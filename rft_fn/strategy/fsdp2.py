"""FSDP2: parameters, gradients and optimizer as DTensors over a mesh (replicate, shard, sequence).

What differs from one process is the placement of tensors alone: gradients and updates are `step`'s, the same
functions on the same names. Gradients are summed over ranks, never averaged: the average is in `w`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rft_fn import ckpt, dist, faults, memory, metric, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import own_parameters, require_own
from rft_fn.model.lora import Export
from rft_fn.strategy import step
from rft_fn.strategy.common import Cut, everywhere, together
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.local import layout as local_layout
from rft_fn.strategy.sequence import Sequence as SequenceAxis
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["blocks", "fsdp2", "groups", "layout", "meshes"]


def meshes(config: StrategyConfig, shard_size: int = 0) -> tuple[DeviceMesh, SequenceAxis | None]:
    """(the mesh of a model's parameters (replicate, shard), the sequence axis or None without one).

    The processes are a mesh (replicate, shard, sequence) with the sequence axis innermost; parameters are
    sharded over shard and sequence together. ValueError for sizes that do not divide the world.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world, sp = dist.world(), config.sp_size
    if world % sp:
        raise ValueError(f"sp_size: expected a divisor of the {world} processes, got {sp}")
    size = shard_size or config.shard_size or world
    if world % size or size % sp:
        raise ValueError(
            f"shard_size: expected a divisor of the {world} processes and a multiple of sp_size {sp}, "
            f"got {size}"
        )
    return _meshes(device, world // size, size // sp, sp)


@cache
def _meshes(device: str, replicate: int, shard: int, sp: int) -> tuple[DeviceMesh, SequenceAxis | None]:
    """Made once, for each mesh has process groups of its own."""
    sequence = None
    if sp > 1:
        names = ("replicate", "shard", "sequence")
        sequence = SequenceAxis(
            init_device_mesh(device, (replicate, shard, sp), mesh_dim_names=names)["sequence"]
        )
    if replicate == 1:
        return init_device_mesh(device, (shard * sp,), mesh_dim_names=("shard",)), sequence
    return init_device_mesh(device, (replicate, shard * sp), mesh_dim_names=("replicate", "shard")), sequence


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated parts of a module, found from itself: the children of every outermost list of two or more
    modules of one class that hold parameters."""
    found: list[nn.Module] = []
    for child in module.children():
        parts = list(child) if isinstance(child, nn.ModuleList) else []
        heavy = [part for part in parts if any(True for _ in part.parameters())]
        if len(heavy) > 1 and len({type(part) for part in heavy}) == 1:
            found += heavy
        else:
            found += blocks(child)
    return found


def _odd(module: nn.Module) -> list[nn.Module]:
    """Parts whose parameters are of another type than most of the module's: FSDP2 moves one type at a
    time."""
    count: dict[torch.dtype, int] = {}
    for p in module.parameters():
        count[p.dtype] = count.get(p.dtype, 0) + p.numel()
    main = max(count, key=lambda d: count[d])
    return [m for m in module.modules() if any(p.dtype != main for p in m.parameters(recurse=False))]


def shard_module(root: nn.Module, mesh: DeviceMesh, config: StrategyConfig) -> nn.Module:
    """`root` with its parameters as DTensors over `mesh`, in place: one group a block, one for the rest."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    bf16 = {"param_dtype": torch.bfloat16} if config.bf16 else {}
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=_reduce(root), **bf16),
    }
    if config.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    text = model_lib.text_model(root) if config.mixed_mm_data else root
    for part in [*blocks(text), *_odd(root)]:
        if not isinstance(part, FSDPModule):
            fully_shard(part, **options)
    fully_shard(root, **options)
    for part in root.modules():
        if isinstance(part, FSDPModule):  # the sum over ranks, by an operation that every backend has
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
    return root


def _reshard(root: nn.Module) -> None:
    """Every part, after forwards without a backward, one of which may have ended inside of a part."""
    from torch.distributed.fsdp import FSDPModule

    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _reduce(root: nn.Module) -> torch.dtype:
    return torch.float64 if any(p.dtype == torch.float64 for p in root.parameters()) else torch.float32


@dataclass(frozen=True)
class FSDPApply:
    """The apply of a sharded module: it takes no parameters but the module's own, for torch.func does not see
    through FSDP2. Called from outside of `grad`, each process scores a pack of its own."""

    root: nn.Module
    own: tree.Named
    sequence: SequenceAxis | None

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
        out = self.root(pack)
        if not torch.is_grad_enabled():
            self.root.reshard()  # only a backward does it else, and the next forward would have old weights
        return out

    def __call__(self, params: tree.Named, pack: Packed) -> TokenOut:
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
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
    shard_size: int | None = None,
) -> tuple[FSDPApply, tree.Named]:
    """(apply, params) of a module, which is sharded in place."""
    quantize.require_whole(module, "FSDP2")
    mesh, sequence = meshes(config, shard_size or 0)
    options: dict[str, Any] = {"entropy": entropy, "aux": aux, "fused": config.fused_linear_logprob}
    options["chunk_size"] = config.chunk_size
    root = model_lib.wrap_for_training(step.cast(module, config), sampling=sampling, **options)
    if sequence is not None:
        model_lib.split_over(root, sequence)
    shard_module(root, mesh, config)
    model_lib.materialize(module)
    cut.settle(root)
    _reshard(root)
    own = own_parameters(module)
    return FSDPApply(root, own, sequence), tree.map(lambda p: p, own)


def init(
    config: StrategyConfig, module: nn.Module, tx: Transform, **options: Any
) -> tuple[Apply, TrainState]:
    """(apply, state) of a module that is trained with `tx`."""
    apply, params = bind(config, module, **options)
    return apply, tree.replace(step.start(params, tx, config), module=module)


def grad(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """`step.grad` over the packs of all ranks: summed gradients, sharded; merged metrics, the same
    everywhere."""
    sequence = apply.sequence
    if sequence is not None:
        packs = sequence.exchange(packs)
    grads, mine = step.grad(state, apply.together, loss_fn, packs)
    if sequence is not None and sequence.rank > 0:
        mine = {}  # the others on the axis had the same packs
    with dist.phase(f"metrics of step {state.step + 1}"):
        parts = dist.all_gather_object(tree.map(lambda x: x.cpu(), mine))
    metrics: dict[str, metric.Metric] = {}
    for part in parts:
        metrics = metric.merge(metrics, part)
    return grads, metrics


def export(state: TrainState, *, finite: bool = True) -> Export:
    """The trained weights for an engine: full tensors by the plain model's names, adapters merged.

    One at a time, on every rank: all of them have to iterate.
    """
    return Export(state.params, state.module, lambda p: p.detach().full_tensor(), finite=finite)


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


def fsdp2(config: StrategyConfig) -> Strategy:
    """The Strategy of FSDP2 over the processes that torchrun started, with sequence parallelism where
    asked."""
    dist.begin(config.timeout)
    faults.watch(config.timeout)
    meshes(config)  # sizes that do not fit are said now
    cut = Cut(config, everywhere)
    shared = together(cut)
    update = partial(step.update, max_skips=config.max_skips, host=config.adam_offload)
    guarded_grad, guarded_update = step.guarded(grad, update, partial(export, finite=False))
    return Strategy(
        init=partial(init, config, cut=cut),
        bind=partial(bind, config, cut=cut),
        grad=guarded_grad,
        update=guarded_update,
        export=export,
        save_pretrained=partial(model_lib.save, write=dist.is_main()),
        save=ckpt.save,
        restore=ckpt.restore,
        offload=lambda state: step.move_opt(state, "cpu"),
        reload=lambda state: step.move_opt(state, shared["device"]),
        **shared,
    )
