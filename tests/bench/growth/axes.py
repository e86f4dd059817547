"""Seconds and bytes of gradients against one size at a time, on one process or several."""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rft_fn as rft
from rft_fn.packing import supervised
from rft_fn.strategy import StrategyConfig, get_strategy

TESTS = Path(__file__).resolve().parents[2]
USUAL = {"width": 128, "layers": 4, "vocab": 1024, "tokens": 1024, "length": 128, "responses": 8}
AXES: dict[str, tuple[str, list[int]]] = {
    "tokens a pack, sequences of 128": ("tokens", [256, 512, 1024, 2048, 4096]),
    "tokens of one sequence": ("length", [256, 512, 1024, 2048, 4096]),
    "responses, packs of 1,024 tokens": ("responses", [8, 16, 32, 64, 128]),
    "words of the vocabulary": ("vocab", [1024, 4096, 16384, 65536]),
    "width of the model": ("width", [64, 128, 256, 512]),
    "layers": ("layers", [2, 4, 8, 16]),
}


def model(width: int, layers: int, vocab: int) -> Any:
    """A Llama of these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    more = {"vocab_size": vocab, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 8192}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more))


def loss_fn(out: rft.TokenOut, b: rft.Packed) -> torch.Tensor:
    """The likelihood: its cost is that of any loss."""
    return rft.loss.nll(out.logp)


def batch(count: int, length: int) -> rft.Experience:
    """`count` rows of `length` tokens that all begin differently: a pack computes equal beginnings once."""
    return supervised([([3 + k], [3 + (k + i) % 1000 for i in range(length - 1)]) for k in range(count)])


def point(axis: str, x: int) -> dict[str, float]:
    """{"x", "seconds" of the processor in a gradient, "bytes" that it allocates at its peak}."""
    sizes = USUAL | {axis: x}
    if axis == "tokens":
        sizes["responses"] = x // sizes["length"]
    if axis == "length":
        sizes |= {"responses": 1, "tokens": x}
    st = get_strategy()
    lm = model(sizes["width"], sizes["layers"], sizes["vocab"])
    parameters = sum(p.numel() for p in lm.parameters())
    apply, state = st.init(lm, rft.optim.adamw(1e-3))
    packs = st.shard(batch(sizes["responses"], sizes["length"]), sizes["tokens"])

    def gradient() -> Any:
        return st.grad(state, apply, loss_fn, packs)

    seconds = least(gradient)
    sys.path.insert(0, str(TESTS))
    from places import allocated

    gc.collect()
    peak = allocated(gradient)[1]
    work = {"packs": len(packs), "parameters": parameters, "tokens": sizes["responses"] * sizes["length"]}
    return {"x": x, "seconds": seconds, "bytes": peak} | work


def least(f: Callable[[], Any], times: int = 3) -> float:
    """The least seconds of the processor of some calls, after one that is not counted."""
    f()
    found = []
    for _ in range(times):
        start = time.process_time()
        f()
        found.append(time.process_time() - start)
    return min(found)


def measured(axes: list[str]) -> dict[str, list[dict[str, float]]]:
    """The points of each axis."""
    torch.set_num_threads(1)
    return {name: [point(AXES[name][0], x) for x in AXES[name][1]] for name in axes}


def rank(number: int, packs: int = 4) -> dict[str, dict[str, float]]:
    """Seconds of the processor of one rank in a gradient, an update and an export, `packs` packs each."""
    found = {}
    for name, options in {"FSDP2": {"fsdp": True}, "ZeRO 1": {"zero_stage": 1}}.items():
        st = get_strategy(StrategyConfig(**options))
        apply, state = st.init(model(256, 4, 1024), rft.optim.adamw(1e-3))
        mine = st.shard(batch(8 * packs * st.world, 128), 1024)
        seconds: dict[str, list[float]] = {"gradients": [], "update": [], "export": []}
        for _ in range(4):
            at = [time.process_time()]
            grads, _ = st.grad(state, apply, loss_fn, mine)
            at.append(time.process_time())
            state, _ = st.update(state, grads)
            at.append(time.process_time())
            for _ in st.export(state):
                pass
            at.append(time.process_time())
            for name_, start, end in zip(seconds, at, at[1:]):
                seconds[name_].append(end - start)
        found[name] = {k: min(x[1:]) for k, x in seconds.items()} | {"packs": len(mine)}
    return found
