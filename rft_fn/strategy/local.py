"""One process, one plain module: the reference for every other backend."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import ckpt, memory, precision, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import applied
from rft_fn.model.lora import Export
from rft_fn.strategy import step
from rft_fn.strategy.common import Backend, Cut, assemble, nothing, residence_of
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.step import Session
from rft_fn.types import Apply, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["fork", "layout", "local"]


def bind(
    config: StrategyConfig,
    module: nn.Module,
    *,
    cut: Cut,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
    shard_size: int | None = None,
) -> tuple[Apply, tree.Named]:
    """(apply, params) of a module. With bf16 the parameters are cast on their way into the forward."""
    if shard_size not in (None, 0, 1):
        raise ValueError(f"shard_size: expected 1 on one process, got {shard_size}")
    if config.bf16 or config.use_mp_opt:
        quantize.require_whole(module, "bf16 and use_mp_opt")

    module = model_lib.materialize(step.cast(module, config))
    root = step.wrap_for_training(config, module, sampling=sampling, entropy=entropy, aux=aux)
    cut.settle(root)
    step.compile_blocks(config, root)
    apply, params = applied(root, module)
    if not config.bf16:
        return apply, params

    # the cast is part of the function, so gradients come back to the float32 parameters
    def narrow(params: tree.Named, pack: Packed) -> TokenOut:
        return apply(tree.map(lambda p: p.bfloat16(), params), pack)

    narrow.device = apply.device  # type: ignore[attr-defined]
    narrow.residence = apply.residence  # type: ignore[attr-defined]
    for p in module.parameters():
        if not p.requires_grad:  # the others are cast in each forward
            p.data = p.data.bfloat16()
    return narrow, params


def init(
    config: StrategyConfig,
    module: nn.Module,
    tx: Transform,
    *,
    cut: Cut,
    **options: Any,
) -> tuple[Apply, TrainState]:
    """(apply, state) of a module that is trained with `tx`."""
    quantize.require_adapters(module)
    apply, params = bind(config, module, cut=cut, **options)
    return apply, step.start(params, tx, config, module, residence_of(apply))


def export(state: TrainState, *, finite: bool = True) -> Export:
    """The trained weights for an engine: full tensors by the plain model's names, adapters merged."""
    return Export(state.params, state.module, torch.Tensor.detach, finite=finite)


def fork(state: TrainState) -> TrainState:
    """A copy of a state that trains beside it with the same `apply`: parameters, optimizer and counts.

    Only for the local strategy, where apply is a function of the parameters it is given. ValueError for a
    state whose apply takes only its own module's, which FSDP2 and ZeRO lay out.
    """
    from rft_fn.strategy.zero.engine import ZeroState

    sharded = any(hasattr(p, "device_mesh") for p in state.params.values())
    if sharded or (isinstance(state.opt, tuple) and any(isinstance(x, ZeroState) for x in state.opt)):
        raise ValueError(
            "state: expected one of the local strategy, got one of a module that FSDP2 or ZeRO lays out; "
            "st.init a second module and give it these weights: model.assign(its.params, st.export(state))"
        )

    # leaves that are detached require no gradient until they are told to
    def cloned(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().clone()

    copy = tree.map(cloned, tree.replace(state, residence=None))
    for p in copy.params.values():
        p.requires_grad_()
    return copy


def layout(config: StrategyConfig) -> memory.Layout:
    """The memory layout of one process, which holds every model whole."""
    kept = frozen = computed = None
    if config.use_mp_opt:
        kept = frozen = computed = torch.bfloat16
    if config.bf16:
        # frozen parameters are narrow for good, the others are cast in each forward
        kept = torch.float32
        frozen = computed = torch.bfloat16

    def wrap_optimizer(tx: Transform, params: Mapping[str, Tensor]) -> Transform:
        return step.optimizer(tx, config, params)

    on_host = frozenset()
    if config.adam_offload:
        on_host = frozenset({"optimizer", "update"})
    return memory.Layout(
        kept=kept,
        frozen=frozen,
        stepped=kept,
        computed=computed,
        wrap_optimizer=wrap_optimizer,
        sum_dtype=precision.wide,
        cast_copy=config.bf16,
        on_host=on_host,
        copied_for_update=config.adam_offload,
    )


def local(config: StrategyConfig | None = None) -> Strategy:
    """The Strategy of one process: real code on one device and no mocks."""
    config = config or StrategyConfig()
    session = Session()
    cut = Cut(config)

    # the same functions as over several processes, without any sharding
    backend = Backend(
        init=partial(init, config, cut=cut),
        bind=partial(bind, config, cut=cut),
        grad=partial(step.grad, session=session),
        update=partial(step.update, config=config, session=session),
        export=export,
        finite=step.finite,
        save_pretrained=model_lib.save,
        save=ckpt.save,
        restore=ckpt.restore,
        offload=step.offload,
        reload=step.reload,
        release=nothing,
    )
    return assemble(backend, config, session, cut, rank=0, world=1, gather=_same)


def _same(x: Any, /) -> Any:
    """The batch of one process is that of all."""
    return x
