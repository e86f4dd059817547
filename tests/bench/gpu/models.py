"""Models of Qwen2.5's shapes with random weights, packs that fill them, and what a gradient costs."""

import dataclasses
from functools import partial
from typing import Any

import torch
from harness import Row, Setting, forget, now, peak_gib, reset_peak, seconds_of
from torch import nn

import rft_fn as rft
from rft_fn import packing
from rft_fn.model import blocks
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.types import Experience, Packed, Strategy, TokenOut, TrainState

# Qwen2.5's published shapes; 4B has Qwen3's
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5B": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "4B": {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "7B": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
FORMULA = "6 T (matrices of the layers) + 6 (targets) D V + 6 layers heads head_dim sum of squared lengths"


def shape_of(setting: Setting, name: str) -> dict[str, Any]:
    """Return the sizes of a model; tiny ones in a dry run."""
    return TINY if setting.dry else SHAPES[name]


def module_of(
    setting: Setting,
    name: str,
    *,
    checkpointing: bool = False,
    tied: bool | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """Return a Qwen2 of a shape with random weights, made on the device."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = dict(shape_of(setting, name))
    if tied is not None:
        shape["tie_word_embeddings"] = tied
    config = Qwen2Config(**shape, max_position_embeddings=32768, pad_token_id=0, eos_token_id=1)
    device = device or setting.device
    torch.manual_seed(0)
    with torch.device(device):
        lm = AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
    return rft.model.load(lm, device=device, gradient_checkpointing=checkpointing)


def lengths_of(setting: Setting, seed: int) -> list[int]:
    """Return lengths of sequences that fill a pack to the last token."""
    g = torch.Generator().manual_seed(seed)
    low, high = setting.lengths
    found: list[int] = []
    while (left := setting.tokens - sum(found)) > 0:
        drawn = min(left, int(torch.randint(low, high + 1, (), generator=g)))
        found.append(left if left - drawn < 2 else drawn)
    return found


def pack_of(setting: Setting, words: int, *, seed: int = 0) -> Packed:
    """Return a full pack; an eighth of each sequence is its prompt."""
    g = torch.Generator().manual_seed(seed)
    sizes = [n + 1 for n in lengths_of(setting, seed)]  # the last token is only a target
    shape = (len(sizes), max(sizes))
    place = torch.arange(shape[1])
    length = torch.tensor(sizes)[:, None]
    mask = (place >= length // 8 + 1) & (place < length)
    exp = Experience(
        tokens=torch.randint(2, words, shape, generator=g) * (place < length),
        mask=mask,
        length=length[:, 0],
        old_logp=torch.where(mask, -3.0, 0.0),
        adv=torch.randn(shape[0], 1, generator=g) * mask,
        w=rft.weight.token_mean(mask),
    )
    return packing.pack(exp, range(shape[0]))


def loss_fn(out: TokenOut, b: Packed) -> torch.Tensor:
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv)


def flops(module: nn.Module, shape: dict[str, Any], b: Packed) -> float:
    """Return the FLOP of a forward and backward of a pack, none of them counted twice: `FORMULA`."""
    matrices = sum(p.numel() for n, p in module.named_parameters() if ".layers." in n and p.dim() == 2)
    sizes = torch.bincount(b.seq, minlength=b.num_seqs)
    head = shape["hidden_size"] * shape["vocab_size"] * int(b.mask.sum())
    heads = shape["num_attention_heads"] * shape.get("head_dim", 0) or shape["hidden_size"]
    scores = shape["num_hidden_layers"] * heads * int(sizes.square().sum())
    return 6.0 * (matrices * len(b.tokens) + head + scores)


def start(module: nn.Module, config: StrategyConfig) -> tuple[Strategy, Any, TrainState]:
    """Return (strategy, apply, state) for gradients only: its optimizer and master weights are given back."""
    st = get_strategy(config)
    apply, state = st.init(module, rft.optim.sgd(1e-6))
    state = rft.tree.replace(state, opt=())
    forget()
    return st, apply, state


def gradient_of(
    setting: Setting,
    name: str,
    config: StrategyConfig,
    *,
    checkpointing: bool = True,
    tokens: int | None = None,
    module: nn.Module | None = None,
    count: int = 2,
) -> Row:
    """Measure the gradient of `count` packs: seconds of one, tokens/s, MFU and the peak of memory."""
    if tokens is not None and not setting.dry:
        setting = dataclasses.replace(setting, tokens=tokens)
    if setting.dry and config.compile_blocks and not isinstance(blocks.compile_blocks, partial):
        # the compiler of a CPU takes a minute; graphs are made and run without it
        blocks.compile_blocks = partial(blocks.compile_blocks, backend="aot_eager")
    lm = module_of(setting, name, checkpointing=checkpointing) if module is None else module
    shape = shape_of(setting, name)
    packs = [pack_of(setting, shape["vocab_size"], seed=seed) for seed in range(count)]
    work = sum(flops(lm, shape, b) for b in packs)
    st, apply, state = start(lm, config)
    reset_peak(setting)

    # packs of other lengths, so that a graph for each length would show
    began = now(setting)
    for b in packs:
        st.grad(state, apply, loss_fn, [b])
    first = now(setting) - began
    seconds = seconds_of(setting, lambda: st.grad(state, apply, loss_fn, packs))
    return {
        "tokens": setting.tokens,
        "seconds": seconds / count,
        "first_seconds": first,
        "tokens_s": count * setting.tokens / seconds,
        "tflops": work / seconds / 1e12,
        "mfu": work / seconds / setting.peak,
        "peak_gib": peak_gib(setting),
    }
