"""Processor seconds that a scalar reward model takes: `python tests/bench/scalar_reward.py`.

Scores rows of random tokens on one thread with the embedded default, and with a model of the sizes of
SmolLM2-135M whose weights are random. Seconds grow with the tokens, so the larger model scores few rows.
Writes docs/results/scalar_reward.json.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from record import made
from transformers import LlamaConfig, LlamaForCausalLM

import rft_fn as rft

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "scalar_reward.json"
BUDGET = 4096  # tokens of a pack
ROUNDS = 3


def smollm2():
    """A model of the sizes of SmolLM2-135M."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))


def measured(lm, rows, length, vocabulary):
    """Processor seconds for a thousand rows of `length` tokens, of which `rows` are scored."""
    st = rft.strategy.get_strategy()
    apply, params = st.bind(rft.model.load_reward(lm, new=True))
    g = torch.Generator().manual_seed(0)
    exp = rft.packing.scored(torch.randint(3, vocabulary, (rows, length), generator=g).tolist())
    st.score(apply, params, exp, BUDGET, fields=("score",))  # the first call builds what later ones have
    taken = []
    for _ in range(ROUNDS):
        began = time.process_time()
        st.score(apply, params, exp, BUDGET, fields=("score",))
        taken.append((time.process_time() - began) * 1000 / rows)
    return {"rows": rows, "tokens": length, "s_per_1000": round(statistics.median(taken), 2),
            "rounds": [round(x, 2) for x in taken]}  # fmt: skip


def main():
    torch.set_num_threads(1)
    tiny = len(rft.model.load_tokenizer("tiny"))
    found = {
        "tiny": measured(rft.model.load("tiny"), 1000, 64, tiny),
        "smollm2-135m, random weights": measured(smollm2(), 8, 256, 49152),
    }
    RESULTS.write_text(json.dumps(made() | {"threads": 1, "models": found}, indent=1) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # for --help
    main()
