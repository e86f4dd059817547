"""Attention on the meta device that keeps what flash attention keeps, and computes nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model import attention
from rft_fn.model.parts import find

__all__ = ["put_into"]

NAME = "rft_estimate"  # in transformers' table of attention functions
TOWER = "rft_estimate_tower"
MASKED = "rft_estimate_masked"


def put_into(lm: nn.Module, *, kind: str) -> None:
    """Have a model of transformers keep what flash attention keeps on a device of this kind.

    Attention that keeps scores [T, T] stays, and is counted as it is, with its mask.
    """
    from transformers import AttentionInterface

    if attention.unfit_model(lm) is None:
        AttentionInterface.register(NAME, _flash_like(loop=kind == "cpu"))
        name = NAME
        if attention.keeps_scores(lm):
            name = "eager"
        attention.use(lm, name)
    _put_into_parts(lm)


def _put_into_parts(lm: nn.Module) -> None:
    """Have all parts of a model that sees or hears keep what flash attention keeps.

    On the meta device sdpa would keep all scores. A text model inside of one that takes no boundaries has its
    [T, T] mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    parts = find(lm)
    if not parts.towers:
        return
    AttentionInterface.register(TOWER, _flash_like(loop=False))
    AttentionInterface.register(MASKED, _flash_like(loop=False))
    AttentionMaskInterface.register(MASKED, sdpa_mask)
    if getattr(parts.text, "_supports_attention_backend", False):
        _rename(parts.text, MASKED)
    for tower in parts.towers:
        _rename(tower, TOWER)


def _rename(part: nn.Module, name: str) -> None:
    """Have a part that is on sdpa look up its attention by another name."""
    for m in part.modules():
        config: Any = getattr(m, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = name


class _Attention(torch.autograd.Function):
    """Shapes of flash attention.

    It keeps its inputs, its output and one float32 number per row. With `loop` it also keeps the copies of
    one call per sequence.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, loop: bool) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        kept = [q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32)]
        if not loop:
            ctx.save_for_backward(*kept)
            return out
        # q, k, v and the output are copied where many sequences have one length, else not: half of that
        ctx.save_for_backward(*kept, torch.empty_like(q), torch.empty_like(k))
        return out.clone()  # the outputs of all sequences are joined

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors[:3]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _flash_like(*, loop: bool) -> Callable:
    """An attention function of transformers: three of [1, H, T, D] -> ([1, T, H, D], None)."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple:
        out: Any = _Attention.apply(*(x.transpose(1, 2) for x in (query, key, value)), loop)
        return out, None

    return attention
