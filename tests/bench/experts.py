"""The products of a mixture's experts in ways that transformers has: `python tests/bench/experts.py`.

Seconds of the processor that one thread takes for log-probs and for their gradient, in turns, and how far the
gradient is from that of one expert after the other. Then the same with adapters: of one linear layer a block;
of that and the experts, as they are computed here and by peft's own layer; and the memory of a gradient.
"""

import argparse
import importlib
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rft_fn import model, packing

WAYS = ("eager", "grouped_mm")  # batched_mm copies the weights of each choice: a twentieth of the speed
TURNS = 3


def mixture(hidden, experts, inner):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": hidden, "num_experts": experts, "num_experts_per_tok": 4, "head_dim": 32}
    sizes |= {"moe_intermediate_size": inner, "num_hidden_layers": 4, "num_attention_heads": hidden // 32}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_key_value_heads=2, vocab_size=1000)).eval()


def gradient(apply, params, pack):
    total = apply(params, pack).logp.sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(params.values()))])


def score(apply, params, pack):
    with torch.no_grad():
        return apply(params, pack).logp


def peak(f, *args):
    """MB that a call holds at most, beside what is there."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        f(*args)
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    total = most = 0
    for event in events:
        total += event.nbytes()
        most = max(most, total)
    return most / 2**20


def adapters(sizes, pack, rank):
    """Print the speed and memory of adapters, in turns."""
    bind = importlib.import_module("rft_fn.model.bind")  # the name in rft_fn.model is the function
    in_groups = bind.compute_in_groups
    cases = {}
    for name, targets, compute in (
        ("q_proj", "q_proj", in_groups),
        ("q_proj and experts", "q_proj,experts", in_groups),
        ("the same by peft", "q_proj,experts", lambda _: None),
    ):
        lora = model.apply_lora_configuration(mixture(*sizes), rank, 2 * rank, target_modules=targets)
        for path, p in lora.named_parameters():
            if ".lora_B." in path:
                p.data.normal_(0, 0.02)
        bind.compute_in_groups = compute
        cases[name] = model.bind(lora)
    bind.compute_in_groups = in_groups
    best = {(name, f): float("inf") for name in cases for f in (score, gradient)}
    for _ in range(TURNS):
        for name, f in best:
            start = time.process_time()
            f(*cases[name], pack)
            best[name, f] = min(best[name, f], time.process_time() - start)
    for name, (apply, params) in cases.items():
        speeds = ", ".join(
            f"{f.__name__} {len(pack.tokens) / best[name, f]:.0f} tokens/s" for f in (score, gradient)
        )
        print(f"{sizes} adapters of {name}: {speeds}, {peak(gradient, apply, params, pack):.0f} MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--rank", type=int, default=8, help="of adapters")
    parser.add_argument("--ways", nargs="*", default=WAYS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ids = torch.randint(3, 1000, (given.rows, given.tokens + 1)).tolist()
    pack = packing.pack(packing.supervised([(row[:4], row[4:]) for row in ids]), range(given.rows))
    for sizes in ((64, 8, 32), (256, 32, 128)):
        lm = mixture(*sizes)
        apply, params = model.bind(lm)
        for f in (score, gradient):
            best = dict.fromkeys(given.ways, float("inf"))
            found = {}
            for _ in range(TURNS):
                for way in given.ways:
                    lm.set_experts_implementation(way)
                    start = time.process_time()
                    found[way] = f(apply, params, pack)
                    best[way] = min(best[way], time.process_time() - start)
            plain = found[given.ways[0]]
            for way, x in found.items():
                far = float((x - plain).abs().max() / plain.abs().max())
                said = f"{sizes} {f.__name__:8} {way:10} {len(pack.tokens) / best[way]:7.0f} tokens/s"
                print(f"{said}, off by {far:.1e}")
        adapters(sizes, pack, given.rank)


if __name__ == "__main__":
    main()
