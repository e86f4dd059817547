"""Reads one token of every row by fused kernels, in models whose decoder is built as Llama's is.

About twelve kernels a layer in place of fifty, seven of which are the model's own linear layers. What is
fused are norms with the sums before them, rotary embedding with the write into the cache, attention, SwiGLU
and the draw: the functions of `rft_kernels.decode`. The modules of the model stay as they are; whether the
numbers are right is seen by trying it.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.engine.hf import cache_rows
from rft_fn.engine.hf.draws import draw, numbers_per_draw
from rft_fn.engine.hf.shared_prefix import SharedPrefixes, attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Step", "can_fuse", "draws_alike", "fused_draw", "next_logits"]


class Step(NamedTuple):
    """The tensors that a step of R rows reads, beside the model and its cache of W columns."""

    tokens: Tensor  # [R, 1]
    position: Tensor  # [R, 1]
    bias: Tensor  # [R, 1, 1, W], added to scores
    first: Tensor  # [R], a column before which no row sees any
    at: Tensor  # [1], the column of the tokens
    prompts: SharedPrefixes | None


def can_fuse(lm: "PreTrainedModel") -> bool:
    """Return whether a model is built as Llama or Qwen 3 is, on a device that runs Triton kernels."""
    from rft_kernels import engines

    decoder: Any = getattr(lm, "model", None)
    return (
        engines.runs_kernels(next(lm.parameters()))
        and lm.dtype.itemsize <= 4
        and _parts(lm) == {"model", "lm_head"}
        and _parts(decoder) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and all(map(_is_alike, decoder.layers))
    )


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_alike(layer: Any) -> bool:
    """Return whether a layer is attention and SwiGLU behind a norm each."""
    return (
        _parts(layer) == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and _parts(layer.self_attn) - {"q_norm", "k_norm"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and _parts(layer.mlp) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and getattr(layer.self_attn, "sliding_window", None) is None
    )


def next_logits(lm: "PreTrainedModel", cache: Any, step: Step) -> Tensor:
    """Return the logits [R, V] after one token of every row, and write its keys and values to the cache.

    ValueError for rotary embedding of a part of each head.
    """
    from rft_kernels import decode  # with triton

    decoder: Any = lm.model
    buffers: list[Any] = cache_rows.buffered_layers(cache)
    x = decoder.embed_tokens(step.tokens[:, 0])
    turn = tuple(part[:, 0].contiguous() for part in decoder.rotary_emb(x[:, None], step.position))
    if turn[0].shape[1] != buffers[0].buffers[0].shape[3]:
        raise ValueError(f"rotary embedding: expected all of a head, got {turn[0].shape[1]} numbers of it")
    more = None
    for layer, part in zip(decoder.layers, buffers, strict=True):
        attn, mlp = layer.self_attn, layer.mlp
        keys, values = part.buffers
        h = decode.norm(x, *_norm(layer.input_layernorm), more=more)
        norms = (_norm(attn.q_norm), _norm(attn.k_norm)) if hasattr(attn, "q_norm") else None
        q, k, v = attn.q_proj(h), attn.k_proj(h), attn.v_proj(h)
        q = decode.rotate(q, k, v, turn, keys, values, step.at, norms)
        if step.prompts is None:
            bias = step.bias[:, 0, 0]
            out = decode.attend(q, keys, values, bias, step.first, step.at, scale=attn.scaling)
        else:
            one = q.unsqueeze(2)
            out, _ = attention(
                attn, one, keys, values, step.bias, scaling=attn.scaling, rft_prompts=step.prompts
            )
        more = attn.o_proj(out.flatten(1))
        h = decode.norm(x, *_norm(layer.post_attention_layernorm), more=more)
        more = mlp.down_proj(decode.swiglu(mlp.gate_proj(h), mlp.up_proj(h)))
    return lm.lm_head(decode.norm(x, *_norm(decoder.norm), more=more))


def fused_draw(p: Tensor, u: Tensor) -> Tensor:
    """Draw tokens [R] as `draw` does, to the bit, by one kernel."""
    from rft_kernels import decode  # with triton

    return decode.draw(p, u)


def draws_alike(lm: "PreTrainedModel") -> bool:
    """Return whether `fused_draw` gives the tokens of `draw`, for as many words as a model has."""
    words = lm.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(4, words, generator=generator).to(lm.device)
    u = torch.rand(4, numbers_per_draw(words), generator=generator, dtype=torch.float64).to(lm.device)
    return torch.equal(fused_draw(p, u), draw(p, u))


def _norm(module: Any) -> tuple[Tensor, float]:
    """Return the weight and eps of an RMSNorm."""
    return module.weight, module.variance_epsilon
