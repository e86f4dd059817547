"""FSDP2: parameters, gradients and optimizer as DTensors over a mesh (replicate, shard, sequence).

Only the placement of tensors differs from one process: gradients and updates are those of `step`, the same
functions on the same names. Gradients are summed over ranks, never averaged: the average is in `w`.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rft_fn import ckpt, dist, memory, metric, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import own_parameters, require_own
from rft_fn.model.lora import Export
from rft_fn.strategy import step
from rft_fn.strategy.common import Backend, Cut, assemble, everywhere
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.local import layout as local_layout
from rft_fn.strategy.sequence import Sequence as SequenceAxis
from rft_fn.strategy.session import Session
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["Meshes", "blocks", "fsdp2", "groups", "layout", "meshes"]


def meshes(
    config: StrategyConfig, shard_size: int = 0, *, name: str = ""
) -> tuple[DeviceMesh, SequenceAxis | None]:
    """(the mesh of a model's parameters (replicate, shard), the sequence axis or None without one).

    The processes are a mesh (replicate, shard, sequence) with the sequence axis innermost; parameters are
    sharded over shard and sequence together. The names of the axes end in `name`. ValueError for sizes that
    do not divide the world.
    """
    # every size has to divide the next larger one
    world = dist.world()
    sp = config.sp_size
    if world % sp:
        raise ValueError(f"sp_size: expected a divisor of the {world} processes, got {sp}")
    size = shard_size or config.shard_size or world
    if world % size or size % sp:
        raise ValueError(
            f"shard_size: expected a divisor of the {world} processes and a multiple of sp_size {sp}, "
            f"got {size}"
        )

    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    replicate = f"replicate{name}"
    shard = f"shard{name}"
    sequence = None
    if sp > 1:
        names = (replicate, shard, f"sequence{name}")
        whole = init_device_mesh(device, (world // size, size // sp, sp), mesh_dim_names=names)
        sequence = SequenceAxis(whole[names[-1]])
    if size == world:
        return init_device_mesh(device, (size,), mesh_dim_names=(shard,)), sequence
    mesh = init_device_mesh(device, (world // size, size), mesh_dim_names=(replicate, shard))
    return mesh, sequence


class Meshes:
    """The meshes of one strategy: each is made once, for it has its own process groups.

    DTensor keeps what it computed for a mesh, with its groups, and takes meshes of the same sizes and names
    for one. So the names have a mark, the same on every rank, that no other strategy has.
    """

    def __init__(self, config: StrategyConfig):
        self.config = config
        self.name = f"_{dist.all_gather_object(uuid.uuid4().hex[:8])[0]}"
        self.made: dict[int, tuple[DeviceMesh, SequenceAxis | None]] = {}

    def of(self, shard_size: int | None = None) -> tuple[DeviceMesh, SequenceAxis | None]:
        """`meshes` for modules with this shard_size, or the config's."""
        size = shard_size or self.config.shard_size or dist.world()
        if size not in self.made:
            self.made[size] = meshes(self.config, size, name=self.name)
        return self.made[size]

    def close(self) -> None:
        """Take the process groups of the meshes down, but not the one of all processes."""
        groups = [mesh.get_all_groups() for mesh, _ in self.made.values()]
        groups += [[sequence.mesh.get_group()] for _, sequence in self.made.values() if sequence is not None]
        self.made = {}
        for group in dict.fromkeys(group for found in groups for group in found):
            if group is not torch_dist.group.WORLD:
                torch_dist.destroy_process_group(group)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated parts of a module.

    These are the children of every outermost list of two or more modules of one class that hold parameters.
    """
    found: list[nn.Module] = []
    for child in module.children():
        parts: list[nn.Module] = []
        if isinstance(child, nn.ModuleList):
            parts = list(child)
        heavy = [part for part in parts if any(True for _ in part.parameters())]
        if len(heavy) > 1 and len({type(part) for part in heavy}) == 1:
            found += heavy
        else:
            found += blocks(child)
    return found


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

    # parts that only some packs use must not be gathered on their own: the other ranks would not join in
    text = root
    if config.mixed_mm_data:
        text = model_lib.text_model(root)
    for part in [*blocks(text), *_odd(root)]:
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
    made: Meshes,
    session: Session,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
    shard_size: int | None = None,
) -> tuple[FSDPApply, tree.Named]:
    """(apply, params) of a module, which is sharded in place."""
    quantize.require_whole(module, "FSDP2")
    mesh, sequence = made.of(shard_size)
    module = step.cast(module, config)
    root = step.wrap_for_training(config, module, sampling=sampling, entropy=entropy, aux=aux)
    if sequence is not None:
        model_lib.split_over(root, sequence)
    shard_module(root, mesh, config)
    model_lib.materialize(module)

    # a forward of the probe may have ended inside of any part, and left it gathered
    cut.settle(root)
    _reshard(*root.modules())
    own = own_parameters(module)
    return FSDPApply(root, own, sequence, session), tree.map(lambda p: p, own)


def init(
    config: StrategyConfig, module: nn.Module, tx: Transform, **options: Any
) -> tuple[Apply, TrainState]:
    """(apply, state) of a module that is trained with `tx`."""
    apply, params = bind(config, module, **options)
    return apply, step.start(params, tx, config, module)


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
    made = Meshes(config)
    made.of()
    cut = Cut(config, everywhere)
    backend = Backend(
        init=partial(init, config, cut=cut, made=made, session=session),
        bind=partial(bind, config, cut=cut, made=made, session=session),
        grad=partial(grad, session=session),
        update=partial(step.update, config=config, session=session),
        export=partial(export, session=session),
        finite=step.finite,
        save_pretrained=partial(model_lib.save, write=dist.is_main()),
        save=ckpt.save,
        restore=ckpt.restore,
        offload=step.offload,
        reload=step.reload,
        release=made.close,
    )
    return assemble(backend, config, session, cut, rank=dist.rank(), world=dist.world(), gather=dist.gather)
