"""One process, one plain module: the reference for every other backend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import memory, precision, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import ModuleApply, applied
from rft_fn.model.residence import Residence
from rft_fn.strategy import prepare, step
from rft_fn.strategy.common import Backend
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.session import Session
from rft_fn.types import (
    Apply,
    LossFn,
    Packed,
    Sampling,
    Strategy,
    TokenOut,
    TrainState,
    Transform,
    record,
)

__all__ = ["LocalBackend", "NarrowApply", "fork", "layout", "local"]


def _narrow(params: tree.Named) -> tree.Named:
    """Return the parameters in bfloat16; narrow ones are themselves."""
    return tree.map(Tensor.bfloat16, params)


@dataclass(frozen=True, eq=False)
class NarrowApply:
    """The apply of a module with bf16: float32 parameters, and a forward in bfloat16.

    The cast is part of the function, so gradients come back to the float32 parameters. `score` and `grad`
    cast once for all packs, for the cast copies nothing of narrow ones.
    """

    plain: ModuleApply

    def __call__(self, params: tree.Named, pack: Packed) -> TokenOut:
        return self.plain(_narrow(params), pack)

    @property
    def device(self) -> torch.device | None:
        """Return the device on which a frozen model reads its packs."""
        return self.plain.device

    @property
    def residence(self) -> Residence:
        """Return the place of the model's weights."""
        return self.plain.residence


class LocalBackend(Backend):
    """The strategy of one process: real code on one device and no mocks."""

    whole_parameters = True

    def _bind(
        self,
        module: nn.Module,
        *,
        sampling: Sampling | None = None,
        entropy: bool = False,
        aux: bool = False,
        shard_size: int | None = None,
    ) -> tuple[Apply, tree.Named]:
        """Return (apply, params) of a module; with bf16 the forward casts the parameters."""
        config = self.config
        if shard_size not in (None, 0, 1):
            raise ValueError(f"shard_size: expected 1 on one process, got {shard_size}")
        if config.bf16 or config.use_mp_opt:
            quantize.require_whole(module, "bf16 and use_mp_opt")

        module = model_lib.materialize(prepare.cast(module, config))
        root = prepare.wrap_for_training(config, module, sampling=sampling, entropy=entropy, aux=aux)
        if config.bf16 or config.use_mp_opt:
            quantize.set_fast(module, config.fast_linear, narrow=True)
        self.packer.settle(root)
        prepare.compile_blocks(config, root)
        apply, params = applied(root, module)
        if not config.bf16:
            return apply, params

        for p in module.parameters():
            if not p.requires_grad:  # the others are cast in each forward
                p.data = p.data.bfloat16()
        return NarrowApply(apply), params

    def _read(self, apply: Apply, params: Any) -> Any:
        return _narrow(params) if isinstance(apply, NarrowApply) else params

    def _grad(
        self, state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]
    ) -> tuple[Any, dict[str, Any]]:
        if isinstance(apply, NarrowApply):
            step.check_trains(state.params)
            narrow = tree.map(lambda p: p.detach().bfloat16().requires_grad_(), state.params)
            state = tree.replace(state, params=narrow)  # gradients are summed in float32
        return super()._grad(state, apply, loss_fn, packs)

    def _whole(self, state: TrainState, p: Tensor) -> Tensor:
        return p.detach()

    def gather(self, x: Any, /) -> Any:
        return x  # one process has all of it


def fork(state: TrainState) -> TrainState:
    """Copy a state, to train both with the same `apply`: parameters, optimizer and counts.

    The copy is on the device, and stays there with offload_models too.

    Only for the local strategy, where apply is a function of the parameters it is given. ValueError for a
    state of FSDP2 or ZeRO, where apply takes only its own module's parameters.
    """
    from rft_fn.strategy.zero.deepspeed_engine import ZeroState

    sharded = any(hasattr(p, "device_mesh") for p in state.params.values())
    if sharded or (isinstance(state.opt, tuple) and any(isinstance(x, ZeroState) for x in state.opt)):
        raise ValueError(
            "state: expected one of the local strategy, got one of a module that FSDP2 or ZeRO lays out; "
            "st.init a second module and give it these weights: model.assign(its.params, st.export(state))"
        )

    # leaves that are detached require no gradient until they are told to
    def clone(x: Any) -> Any:
        return x.detach().clone() if isinstance(x, Tensor) else x

    home: Residence | None = state.residence
    mover = None if home is None else home.mover

    def bring(x: Any) -> Any:
        return mover.to_device(x.detach()) if isinstance(x, Tensor) and mover is not None else clone(x)

    copy = tree.replace(
        state,
        params=tree.map(bring if home is not None and home.on_host else clone, state.params),
        opt=tree.map(bring if home is not None and home.opt_on_host else clone, state.opt),
        residence=None,
    )
    if mover is not None:
        mover.finish()
    for p in copy.params.values():
        p.requires_grad_()
    return copy


def layout(config: StrategyConfig) -> memory.Layout:
    """Return the memory layout of one process, which holds every model whole."""
    # with bf16 frozen parameters are narrow for good, the others are cast in each forward
    narrow = torch.bfloat16 if config.bf16 or config.use_mp_opt else None
    kept = torch.float32 if config.bf16 else narrow

    def wrap_optimizer(tx: Transform, params: Mapping[str, Tensor]) -> Transform:
        return prepare.optimizer(tx, config, params)

    return memory.Layout(
        kept=kept,
        frozen=narrow,
        stepped=kept,
        computed=narrow,
        wrap_optimizer=wrap_optimizer,
        sum_dtype=precision.wide,
        cast_copy=config.bf16,
        in_place=not config.bf16,
        on_host=frozenset({"optimizer", "update"} if config.adam_offload else ()),
        copied_for_update=config.adam_offload,
    )


def local(config: StrategyConfig | None = None) -> Strategy:
    """Return the Strategy of one process."""
    return record(Strategy, LocalBackend(config or StrategyConfig(), Session()))
