"""Small real models and data for tests: made on the spot, no network."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from ref import rounding
from torch import Tensor, nn

from rft_fn.environment import tiny_models
from rft_fn.packing import supervised
from rft_fn.types import Experience, Rollout

__all__ = [
    "definition",
    "experience",
    "llama",
    "logp_rounding",
    "mixed",
    "output_rounding",
    "rollout",
    "said",
    "tokenizer",
]


@cache
def tokenizer() -> Any:
    return tiny_models.new_tokenizer()


def llama(seed: int = 0, *, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A Llama of two narrow layers with weights large enough for its log-probs to differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer()), "max_position_embeddings": 128}
    config = LlamaConfig(
        **sizes | {"tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0} | changes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(config)
        for p in lm.parameters():
            if p.dim() == 2:
                p.data.normal_(0, 0.3)
    return lm.to(dtype)


def experience(seed: int = 0, rows: int = 6, longest: int = 12) -> Any:
    """Random prompts and responses of different lengths."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, len(tokenizer()), (n,), generator=g).tolist()  # noqa: E731
    size = lambda: int(torch.randint(1, longest, (1,), generator=g))  # noqa: E731
    return supervised([(draw(size()), draw(size())) for _ in range(rows)])


def rollout(exp: Experience, group: Any = None, truncated: Any = None, **more: Any) -> Rollout:
    """The rollout of an Experience's rows; all of group 0 where no other is given."""
    zero = torch.zeros(len(exp.tokens), dtype=torch.long)
    return Rollout(
        tokens=exp.tokens,
        mask=exp.mask,
        logp=exp.old_logp,
        length=exp.length,
        truncated=zero.bool() if truncated is None else torch.as_tensor(truncated),
        group=zero if group is None else torch.as_tensor(group),
        version=zero,
        **more,
    )


def said(texts: Sequence[str], group: Any, truncated: Any = None) -> Rollout:
    """A rollout of one row for each text: two tokens of prompt, then its characters."""
    return rollout(supervised([([0, 0], tokenizer().encode(text)) for text in texts]), group, truncated)


def definition(lm: nn.Module, exp: Experience) -> Tensor:
    """[B, S]: log-probs of each row alone, without padding, by the model's own logits; 0 outside mask."""
    out = torch.zeros(exp.tokens.shape, dtype=next(lm.parameters()).dtype)
    for i, n in enumerate(exp.length.tolist()):
        z = lm(input_ids=exp.tokens[i : i + 1, :n], use_cache=False).logits[0].log_softmax(-1)
        out[i, 1:n] = z[:-1].gather(-1, exp.tokens[i, 1:n, None])[:, 0]
    return torch.where(exp.mask, out, 0)


def output_rounding(lm: nn.Module, head: Tensor) -> float:
    """How far two programs of a model in float32 may be apart in an output of `head` [V, D].

    Whatever order each adds up in: every linear layer rounds its own sums, which are as large, beside its
    output, as the head's of a hidden state that a norm has made D long. What two times as many layers add is
    as their root.
    """
    layers = [
        m for m in lm.modules() if hasattr(m, "weight") and m.weight is not None and m.weight.dim() == 2
    ]
    longest = max(m.weight.shape[1] for m in layers)
    size = float(head.detach().double().norm(dim=1).max()) * head.shape[1] ** 0.5
    return (2 * len(layers)) ** 0.5 * rounding(longest, size)


def logp_rounding(lm: nn.Module, temperature: float = 1.0) -> float:
    """The same for a log-prob: its logit, and those in the normaliser."""
    return 2 * output_rounding(lm, lm.get_output_embeddings().weight) / temperature


def mixed(x: Tensor) -> Tensor:
    """[]: the sum with a different factor for every element, so that no two terms of a gradient are alike."""
    return (x * torch.arange(1, x.numel() + 1, dtype=x.dtype).view_as(x).sin()).sum()
