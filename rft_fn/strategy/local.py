"""One process, one plain module: the reference for every other backend."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import ckpt, dist, tree
from rft_fn import model as model_lib
from rft_fn.model.bind import applied
from rft_fn.strategy import memory, step
from rft_fn.strategy.common import Cut
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Apply, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["local"]


def bind(
    config: StrategyConfig,
    module: nn.Module,
    *,
    cut: Cut,
    sampling: Sampling | None = None,
    entropy: bool = False,
    shard_size: int | None = None,
) -> tuple[Apply, tree.Named]:
    """(apply, params) of a module. With bf16 the parameters are cast on their way into the forward."""
    if shard_size not in (None, 0, 1):
        raise ValueError(f"shard_size: expected 1 on one process, got {shard_size}")
    options = {"fused": config.fused_linear_logprob, "chunk_size": config.chunk_size}
    module = model_lib.materialize(step.cast(module, config))
    root = model_lib.rooted(module, sampling=sampling, entropy=entropy, **options)
    cut.settle(root)
    apply, params = applied(root, module)
    if not config.bf16:
        return apply, params

    def narrow(params: tree.Named, pack: Packed) -> TokenOut:
        return apply(tree.map(lambda p: p.bfloat16(), params), pack)

    for p in module.parameters():
        p.data = p.data if p.requires_grad else p.data.bfloat16()
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
    apply, params = bind(config, module, cut=cut, **options)
    return apply, step.start(params, tx, config)


def export(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Full tensors by the model's own names."""
    for name, p in state.params.items():
        yield name, p.detach()


def local(config: StrategyConfig | None = None) -> Strategy:
    """The Strategy of one process: real code on one device and no mocks."""
    config = config or StrategyConfig()
    cut = Cut(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    update = partial(step.update, max_skips=config.max_skips, host=config.adam_offload)
    grad, update = step.guarded(step.grad, update, export)
    return Strategy(
        init=partial(init, config, cut=cut),
        bind=partial(bind, config, cut=cut),
        shard=lambda exp, budget, **options: cut.shard(exp, budget, **options)[0],
        gather=lambda x: x,
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
