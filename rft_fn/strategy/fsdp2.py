"""FSDP2: parameters, gradients and optimizer as DTensors over a mesh (replicate, shard, sequence).

Only the placement of tensors differs from one process: gradients and updates are those of `step`, the same
functions on the same names. Gradients are summed over ranks, never averaged: the average is in `w`.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Replicate, Shard

from rft_fn import dist, memory, metric, packing, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import own_parameters, require_own
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.layers import Residence, blocks
from rft_fn.strategy import step
from rft_fn.strategy.common import Backend, Packer, all_true, watched
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.local import layout as local_layout
from rft_fn.strategy.step import Session
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, record

__all__ = ["SequenceAxis", "fsdp2", "groups", "layout", "meshes", "shared_meshes"]


# ---------- sequence parallelism: the processes of one group share the tokens of a pack


class SequenceAxis:
    """Sequence parallelism (Ulysses, arXiv 2309.14509) over one mesh axis [k].

    The processes of the axis share the tokens of a pack. Each has T / k tokens of everything but attention,
    which exchanges: heads instead of tokens on the way in, tokens instead of heads on the way out.
    Log-probs come back whole.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def split(self, pack: Packed) -> tuple[Packed, SequenceBounds]:
        """(this process's tokens [T / k] of the pack, the sequence boundaries of all [T]).

        T is padded to a multiple of k by masked tokens. Of a pack with media the boundaries have the whole,
        for the towers are run on all of it by each process, and only the text model has a part.
        """
        whole = packing.pad(pack, -(-pack.tokens.shape[0] // self.size) * self.size)
        sizes = torch.unique_consecutive(whole.seq, return_counts=True)[1].tolist()
        plain = tree.replace(whole, media=None, padding=0)
        part = tree.map(lambda x: x.chunk(self.size)[self.rank], plain)
        seen = None
        if pack.media is not None:
            seen = whole
        return part, SequenceBounds(sizes, pack.seq.device, sequence=self, whole=seen)

    def join(self, out: TokenOut, size: int) -> TokenOut:
        """Values [T / k] of each process -> [size] of all.

        The gradient of the whole is the same on every process, so each takes its part of it.
        """

        def whole(x: Tensor) -> Tensor:
            spread = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
            return spread.full_tensor(grad_placements=[Replicate()])[:size]

        return tree.map(whole, out)

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the processes, in place and without gradient."""
        torch.distributed.all_reduce(x, group=self.mesh.get_group())
        return x

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T / k, H, D], k and v [T / k, H', D] -> all T tokens of this process's share of the heads.

        Heads of k and v are repeated where there are fewer than processes. ValueError for a H that k does not
        divide.
        """
        if q.shape[1] % self.size:
            raise ValueError(
                f"sp_size: expected a divisor of the {q.shape[1]} attention heads, got {self.size}"
            )
        repeat = self.size // gcd(k.shape[1], self.size)
        if repeat > 1:
            k = k.repeat_interleave(repeat, dim=1)
            v = v.repeat_interleave(repeat, dim=1)
        # each process's share of all three is a row of [k, T / k, numbers], so they travel at once
        shares = [x.unflatten(1, (self.size, -1)).flatten(2) for x in (q, k, v)]
        got = self._exchange(torch.cat(shares, -1).transpose(0, 1)).flatten(0, 1)
        mine = got.split([x.shape[-1] for x in shares], -1)
        q, k, v = (x.unflatten(-1, (-1, old.shape[-1])) for x, old in zip(mine, (q, k, v)))
        return q, k, v

    def share(self, x: Tensor) -> Tensor:
        """Numbers of all heads [H] -> those of this process's share [H / k], split as `heads` splits."""
        return x.chunk(self.size)[self.rank]

    def tokens(self, x: Tensor) -> Tensor:
        """All tokens of some heads [T, H / k, D] -> all heads of some tokens [T / k, H, D]."""
        got = self._exchange(x.unflatten(0, (self.size, -1)))
        return got.transpose(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """Row i of x [k, ...] goes to process i; what each of them sent here, in their order."""
        x = x.contiguous()
        return all_to_all_single(torch.empty_like(x), x, group=self.mesh.get_group())

    def exchange(self, packs: Sequence[Packed]) -> list[Packed]:
        """The packs of all processes of the group, which work on each of them together."""
        host = [tree.map(lambda x: x.cpu(), b) for b in packs]
        everyone = dist.all_gather_object(host, self.mesh.get_group())
        return [b for row in zip(*everyone) for b in row]


# ---------- the meshes of FSDP2: which processes share parameters, and which share a sequence


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


class _Meshes:
    """The meshes over one group of all processes, by their sizes.

    DTensor keeps what it computed for a mesh, with its groups, and takes meshes of the same sizes and names
    for one. So the names have a mark, the same on every rank, that those of no other group have.
    """

    def __init__(self) -> None:
        self.name = f"_{dist.all_gather_object(uuid.uuid4().hex[:8])[0]}"
        self.made: dict[tuple[int, int], tuple[DeviceMesh, SequenceAxis | None]] = {}


# Process groups are torch's, and live as long as that of all processes. Here are those of the last one.
_of_world: dict[torch_dist.ProcessGroup, _Meshes] = {}


def shared_meshes(
    config: StrategyConfig, shard_size: int | None = None
) -> tuple[DeviceMesh, SequenceAxis | None]:
    """`meshes`, made once for all strategies over these processes.

    Every mesh has process groups, each with threads and connections. A process that makes many strategies
    one after another would collect them: torch lets go of a group only with the last tensor that knows it.
    """
    world = torch_dist.group.WORLD
    assert world is not None  # a strategy has begun it
    if world not in _of_world:
        _of_world.clear()
        _of_world[world] = _Meshes()
    known = _of_world[world]
    size = shard_size or config.shard_size or dist.world()
    key = (size, config.sp_size)
    if key not in known.made:
        known.made[key] = meshes(config, size, name=known.name)
    return known.made[key]


# ---------- one module, sharded


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


class FSDP2Backend(Backend):
    """The strategy of FSDP2, with sequence parallelism where the config has it."""

    def __init__(self, config: StrategyConfig, session: Session):
        shared_meshes(config)  # sizes that do not fit raise here, not when the first model is laid out
        super().__init__(config, session, rank=dist.rank(), world=dist.world())
        self.packer = Packer(config, all_true)

    @watched
    def bind(
        self,
        module: nn.Module,
        *,
        sampling: Sampling | None = None,
        entropy: bool = False,
        aux: bool = False,
        shard_size: int | None = None,
    ) -> tuple[FSDPApply, tree.Named]:
        """Return (apply, params) of a module, which is sharded in place."""
        config = self.config
        quantize.require_whole(module, "FSDP2")
        mesh, sequence = shared_meshes(config, shard_size)
        module = step.cast(module, config)
        root = step.wrap_for_training(config, module, sampling=sampling, entropy=entropy, aux=aux)
        if sequence is not None:
            model_lib.split_over(root, sequence)
        shard_module(root, mesh, config)
        model_lib.materialize(module)

        # a forward of the probe may have ended inside of any part, and left it gathered
        self.packer.settle(root)
        _reshard(*root.modules())
        step.compile_blocks(config, root)
        own = own_parameters(module)
        apply = FSDPApply(root, own, sequence, self.session, Residence(root, module))
        return apply, tree.map(lambda p: p, own)

    def _grad(
        self, state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]
    ) -> tuple[tree.Named, dict[str, metric.Metric]]:
        """Compute `step.grad` over the packs of all ranks: summed gradients, sharded, and all metrics."""
        if not isinstance(apply, FSDPApply):
            raise ValueError("apply: expected one that this strategy's init gave, got another")
        sequence = apply.sequence
        if sequence is not None:
            with self.session.watch():
                packs = sequence.exchange(packs)
        grads, mine = step.grad(state, apply.together, loss_fn, packs, session=self.session)
        if sequence is not None and sequence.rank > 0:
            mine = {}  # the others on the axis had the same packs
        return grads, step.merge_metrics(mine, state.step, self.session)

    def _whole(self, state: TrainState, p: Tensor) -> Tensor:
        p = p.detach()
        if not isinstance(p, DTensor):
            return p
        with self.session.watch():
            return p.full_tensor()


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
    """Return the Strategy of FSDP2 over the processes of a session."""
    return record(Strategy, FSDP2Backend(config, session))
