"""The models of the experiments that are not built in, taught for some steps on a task's own answers."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

import rft_fn as rft
from rft_fn.environment import tiny_models

BATCH = 64  # questions of a step
LR = 3e-3
FOLDER = Path("runs/experiments/models")
TAUGHT = {"moe": 20, "teacher": 250, "small": 20}  # steps on right answers; 20 is what the model "tiny" had


def _module(kind: str, vocab: int) -> Any:
    """A new module with random weights."""
    if kind == "teacher":
        return tiny_models.new_model(vocab, 0)

    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    ids = {"vocab_size": vocab, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    ids |= {"max_position_embeddings": tiny_models.WINDOW, "tie_word_embeddings": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "small":  # a tenth of the teacher's weights
            narrow = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1}
            return LlamaForCausalLM(LlamaConfig(**narrow, **ids, num_attention_heads=4))
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**tiny_models.SIZE, **ids, **experts, num_key_value_heads=4, head_dim=32)
        )


@cache
def folder_of(name: str) -> str:
    """The folder of a built-in model, or of one of `TAUGHT`, which is made where it is not there."""
    if name not in TAUGHT:
        return rft.model.resolve(name)
    out = FOLDER / f"{name}_{TAUGHT[name]}"
    if not (out / "config.json").exists():
        _teach(_module(name, len(tiny_models.new_tokenizer())), TAUGHT[name], out)
    return str(out)


def _teach(module: Any, steps: int, out: Path) -> None:
    """Supervised learning of right answers to sort_digits, then save model and tokenizer."""
    tokenizer = tiny_models.new_tokenizer()
    st = rft.strategy.get_strategy()
    rate = rft.optim.warmup_cosine(LR, steps // 2, steps)
    apply, state = st.init(module, rft.optim.adamw(rate))
    generate = rft.data.get_task("sort_digits").generate
    for step in range(steps):
        rows = [generate(rft.rng.fold_in(0, "taught"), step * BATCH + i, 1) for i in range(BATCH)]
        pairs = []
        for row in rows:
            answer = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
            pairs.append((tokenizer.encode(row["short"]), answer))
        packs = st.shard(rft.packing.supervised(pairs), 2048)
        grads, _ = st.grad(state, apply, lambda out, b: rft.loss.nll(out.logp), packs)
        state, _ = st.update(state, grads)
    st.save_pretrained(out, module, tokenizer, st.export(state))
