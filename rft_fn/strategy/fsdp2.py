"""FSDP2: parameters, gradients and optimizer as DTensors over a mesh (replicate, shard, sequence).

Only the placement of tensors differs from one process: gradients and updates are by `step`, the same
functions on the same names. Gradients are summed over ranks, never averaged: the average is in `w`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rft_fn import dist, memory, metric, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import own_parameters, require_own
from rft_fn.model.blocks import blocks
from rft_fn.model.copies import to_device
from rft_fn.model.residence import Residence
from rft_fn.strategy import prepare, step
from rft_fn.strategy.common import Backend, all_true, grad_with_noise
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.local import layout as local_layout
from rft_fn.strategy.meshes import shared_meshes
from rft_fn.strategy.packer import Packer
from rft_fn.strategy.sequence_axis import SequenceAxis
from rft_fn.strategy.session import Session
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, record

__all__ = ["fsdp2", "groups", "layout"]


def _odd(module: nn.Module) -> list[nn.Module]:
    """Return the parts with parameters of another type than most: FSDP2 moves one type at a time."""
    count: dict[torch.dtype, int] = {}
    for p in module.parameters():
        if not quantize.is_low(p):
            count[p.dtype] = count.get(p.dtype, 0) + p.numel()
    main = max(count, key=lambda d: count[d])
    return [
        m
        for m in module.modules()
        if any(p.dtype != main and not quantize.is_low(p) for p in m.parameters(recurse=False))
    ]


def _parts(root: nn.Module) -> list[nn.Module]:
    """Return the parts that are sharded by themselves, inner ones first, and `root` at the end.

    FSDP2 gives a parameter to the first group around it: adapters in float32 have one inside of a block.
    """
    depth = {m: name.count(".") for name, m in root.named_modules()}
    parts = dict.fromkeys([*blocks(root), *_odd(root)])
    return [*sorted((m for m in parts if m is not root), key=lambda m: -depth[m]), root]


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

    low = {p for p in root.parameters() if quantize.is_low(p)}  # every rank has it whole
    # towers too: packs without media borrow some, so all ranks join in; a part may be there twice
    for part in _parts(root):
        if part is root or not isinstance(part, FSDPModule):
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=low)

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
        if config.bf16 or config.use_mp_opt or config.fsdp_cpu_offload:
            quantize.require_whole(module, "bf16, use_mp_opt and fsdp_cpu_offload")
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
    for part in _parts(root):
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
