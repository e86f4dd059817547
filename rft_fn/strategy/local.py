"""One process, one plain module: the reference for every other backend."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import ckpt, dist, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import applied
from rft_fn.model.lora import Export
from rft_fn.strategy import memory, step
from rft_fn.strategy.common import Cut
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.scoring import scorer
from rft_fn.types import Apply, Experience, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["fork", "local", "unsupported"]


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
    options: dict[str, Any] = {"entropy": entropy, "aux": aux, "fused": config.fused_linear_logprob}
    options["chunk_size"] = config.chunk_size
    if config.bf16 or config.use_mp_opt:
        quantize.require_whole(module, "bf16 and use_mp_opt")
    module = model_lib.materialize(step.cast(module, config))
    root = model_lib.wrap_for_training(module, sampling=sampling, **options)
    cut.settle(root)
    apply, params = applied(root, module)
    if not config.bf16:
        return apply, params

    def narrow(params: tree.Named, pack: Packed) -> TokenOut:
        return apply(tree.map(lambda p: p.bfloat16(), params), pack)

    narrow.device = apply.device  # type: ignore[attr-defined]
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
    return apply, tree.replace(step.start(params, tx, config), module=module)


def export(state: TrainState, *, finite: bool = True) -> Export:
    """The trained weights for an engine: full tensors by the plain model's names, adapters merged."""
    return Export(state.params, state.module, torch.Tensor.detach, finite=finite)


def fork(state: TrainState) -> TrainState:
    """A copy of a state that trains beside it with the same `apply`: parameters, optimizer and counts.

    Of the local strategy, where apply is a function of the parameters it is given. ValueError for a state
    whose apply takes only its own module's, which FSDP2 and ZeRO lay out.
    """
    from rft_fn.strategy.zero.state import ZeroState

    sharded = any(hasattr(p, "device_mesh") for p in state.params.values())
    if sharded or (isinstance(state.opt, tuple) and any(isinstance(x, ZeroState) for x in state.opt)):
        raise ValueError(
            "state: expected one of the local strategy, got one of a module that FSDP2 or ZeRO lays out; "
            "st.init a second module and give it these weights: model.assign(its.params, st.export(state))"
        )

    def cloned(x: Any) -> Any:
        return x.detach().clone() if isinstance(x, Tensor) else x

    copy = tree.map(cloned, state)
    for p in copy.params.values():
        p.requires_grad_()
    return copy


def local(config: StrategyConfig | None = None) -> Strategy:
    """The Strategy of one process: real code on one device and no mocks."""
    config = config or StrategyConfig()
    cut = Cut(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    update = partial(step.update, max_skips=config.max_skips, host=config.adam_offload)
    grad, update = step.guarded(step.grad, update, partial(export, finite=False))

    def shard(exp: Experience, budget: int, *, unit: int = 1) -> list[Packed]:
        return cut.shard(exp, budget, unit=unit)[0]

    def gather(x: Any) -> Any:
        return x

    return Strategy(
        init=partial(init, config, cut=cut),
        bind=partial(bind, config, cut=cut),
        shard=shard,
        score=scorer(shard, gather),
        gather=gather,
        all_reduce=dist.all_reduce,
        grad=grad,
        update=update,
        export=export,
        save_pretrained=model_lib.save,
        save=ckpt.save,
        restore=ckpt.restore,
        offload=lambda state: step.move_opt(state, "cpu"),
        reload=lambda state: step.move_opt(state, device),
        print=print,
        report_memory=memory.report,
        rank=0,
        world=1,
        device=device,
        config=config,
    )


def unsupported(config: StrategyConfig) -> list[str]:
    """The options that one process cannot honour."""
    wants: dict[str, Any] = {"sp_size": 1, "shard_size": 0, "fsdp_cpu_offload": False, "mixed_mm_data": False}
    return [name for name, neutral in wants.items() if getattr(config, name) != neutral]
