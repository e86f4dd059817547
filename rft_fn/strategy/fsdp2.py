"""FSDP2: parameters, gradients and optimizer as DTensors over a mesh (replicate, shard, sequence).

Only the placement of tensors differs from one process: gradients and updates are by `step`, the same
functions on the same names. Gradients are summed over ranks, never averaged: the average is in `w`.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

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
from rft_fn.model.blocks import blocks
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.copies import to_device
from rft_fn.model.residence import Residence
from rft_fn.strategy import prepare, step
from rft_fn.strategy.common import Backend, all_true, grad_with_noise
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.local import layout as local_layout
from rft_fn.strategy.packer import Packer
from rft_fn.strategy.session import Session
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
        """Return (this process's tokens [T / k] of the pack, the sequence boundaries of all [T]).

        T is padded to a multiple of k by masked tokens. Of a pack with media the boundaries have the whole,
        for the towers are run on all of it by each process, and only the text model has a part.
        """
        whole = packing.pad(pack, -(-pack.tokens.shape[0] // self.size) * self.size)
        sizes = torch.unique_consecutive(whole.seq, return_counts=True)[1].tolist()
        plain = tree.replace(whole, media=None, padding=0)
        part = tree.map(lambda x: x.chunk(self.size)[self.rank], plain)
        with_media = None if pack.media is None else whole
        return part, SequenceBounds(sizes, pack.seq.device, sequence=self, whole=with_media)

    def join(self, out: TokenOut, size: int) -> TokenOut:
        """Join values [T / k] of each process to [size] of all.

        The gradient of the whole is the same on every process, so each takes its part of it.
        """

        def whole(x: Tensor) -> Tensor:
            spread = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
            return spread.full_tensor(grad_placements=[Replicate()])[:size]

        return tree.map(whole, out)

    def total(self, x: Tensor) -> Tensor:
        """Sum x over the processes, in place and without gradient."""
        torch.distributed.all_reduce(x, group=self.mesh.get_group())
        return x

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange q [T / k, H, D], k and v [T / k, H', D] for all T tokens of a share of the heads.

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
        """Cut numbers of all heads [H] to this process's share [H / k], as `heads` does."""
        return x.chunk(self.size)[self.rank]

    def tokens(self, x: Tensor) -> Tensor:
        """Exchange all tokens of some heads [T, H / k, D] for all heads of some tokens [T / k, H, D]."""
        got = self._exchange(x.unflatten(0, (self.size, -1)))
        return got.transpose(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send row i of x [k, ...] to process i; return what each sent here, in their order."""
        x = x.contiguous()
        return all_to_all_single(torch.empty_like(x), x, group=self.mesh.get_group())

    def exchange(self, packs: Sequence[Packed]) -> list[Packed]:
        """Return the packs of all processes of the axis, which work on each of them together."""
        host = [tree.map(lambda x: x.cpu(), b) for b in packs]
        everyone = dist.all_gather_object(host, self.mesh.get_group())
        return [b for row in zip(*everyone) for b in row]


# ---------- the meshes of FSDP2: which processes share parameters, and which share a sequence


def meshes(
    config: StrategyConfig, shard_size: int = 0, *, name: str = ""
) -> tuple[DeviceMesh, SequenceAxis | None]:
    """Return (a model's mesh (replicate, shard), the sequence axis or None).

    The processes are a mesh (replicate, shard, sequence) with the sequence axis innermost; parameters are
    sharded over shard and sequence together. The names of the axes end in `name`. ValueError for sizes
    that do not divide the world.
    """
    # every size must divide the next larger one
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

    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    for one. So the names have a mark, the same on every rank, that no other group has.
    """

    def __init__(self) -> None:
        self.name = f"_{dist.all_gather_object(uuid.uuid4().hex[:8])[0]}"
        self.made: dict[tuple[int, int], tuple[DeviceMesh, SequenceAxis | None]] = {}


# Process groups are torch's, and live as long as the group of all processes. These are of the last one.
_of_world: dict[torch_dist.ProcessGroup, _Meshes] = {}


def shared_meshes(
    config: StrategyConfig, shard_size: int | None = None
) -> tuple[DeviceMesh, SequenceAxis | None]:
    """Return `meshes`, made once for all strategies over these processes.

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
    """Return the parts with parameters of another type than most: FSDP2 moves one type at a time."""
    count: dict[torch.dtype, int] = {}
    for p in module.parameters():
        count[p.dtype] = count.get(p.dtype, 0) + p.numel()
    main = max(count, key=lambda d: count[d])
    return [m for m in module.modules() if any(p.dtype != main for p in m.parameters(recurse=False))]


def shard_module(root: nn.Module, mesh: DeviceMesh, config: StrategyConfig) -> nn.Module:
    """Shard `root` in place over `mesh`: one group for each block, one for the rest."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    is_wide = any(p.dtype == torch.float64 for p in root.parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.bf16 else None,
        reduce_dtype=torch.float64 if is_wide else torch.float32,
    )
    on_host = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    offload = on_host if config.fsdp_cpu_offload else OffloadPolicy()

    # towers too: packs without media borrow some, so all ranks join in; a part may be there twice
    for part in [*blocks(root), *_odd(root), root]:
        if part is root or not isinstance(part, FSDPModule):
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)

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
        """Return the device of packs for a frozen model."""
        return next(self.root.parameters()).device

    def together(self, params: tree.Named, pack: Packed) -> TokenOut:
        """Apply the module to a pack that is the same on every process of the sequence axis."""
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
                out.append(self.together(params, to_device(b, device)))
            return out[self.sequence.rank]


class FSDP2Backend(Backend):
    """The strategy of FSDP2, with sequence parallelism where the config has it."""

    def __init__(self, config: StrategyConfig, session: Session):
        shared_meshes(config)  # sizes that do not fit raise here, not when the first model is laid out
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
    ) -> tuple[FSDPApply, tree.Named]:
        """Return (apply, params) of a module, which is sharded in place."""
        config = self.config
        quantize.require_whole(module, "FSDP2")
        mesh, sequence = shared_meshes(config, shard_size)
        module = prepare.cast(module, config)
        root = prepare.wrap_for_training(config, module, sampling=sampling, entropy=entropy, aux=aux)
        if sequence is not None:
            model_lib.split_over(root, sequence)
        shard_module(root, mesh, config)
        model_lib.materialize(module)

        # a forward of the probe may have ended inside of any part, and left it gathered
        self.packer.settle(root)
        _reshard(*root.modules())
        prepare.compile_blocks(config, root)
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
        grads, mine = grad_with_noise(state, apply.together, loss_fn, packs, session=self.session)
        if sequence is not None and sequence.rank > 0:
            mine = {}  # the others on the axis had the same packs
        return grads, step.merge_metrics(mine, state.step, self.session)

    def _changed(self, apply: Apply) -> None:
        if isinstance(apply, FSDPApply):
            _reshard(*apply.root.modules())  # a forward without a backward leaves parts gathered

    def _whole(self, state: TrainState, p: Tensor) -> Tensor:
        p = p.detach()
        if not isinstance(p, DTensor):
            return p
        with self.session.watch():
            return p.full_tensor()


def groups(root: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of a module as FSDP2 gathers them: block by block, then all others."""
    out, seen = [], set()
    for part in [*blocks(root), *_odd(root), root]:
        group = [p for p in part.parameters() if id(p) not in seen]
        seen |= {id(p) for p in group}
        out.append(group)
    return out


def layout(config: StrategyConfig, world: int) -> memory.Layout:
    """Return the memory layout over `world` processes: that of one process, sharded group by group."""
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
        in_place=True,
        gathered=True,
    )
    if not config.fsdp_cpu_offload:
        return sharded
    all_of_it = frozenset({"parameters", "gradients", "optimizer", "update"})
    return replace(sharded, on_host=all_of_it, copied_for_update=False)


def fsdp2(config: StrategyConfig, session: Session) -> Strategy:
    """Return the Strategy of FSDP2 over the processes of a session."""
    return record(Strategy, FSDP2Backend(config, session))
