"""One gradient of a model of SmolLM2-135M's shape, against its matrix products alone.

    python tests/bench/gradients.py                                  # a table
    python tests/bench/gradients.py --threads 2                      # of two threads
    python tests/bench/gradients.py --write                          # its file and the page
    python tests/bench/gradients.py --allocator usual thresholds     # what glibc's thresholds cost, and save

Random weights, packs of random tokens. Each turn is a process of its own: the gradient with
torch's linear layers (plain), with `fast_linear` (fast), or the products that no gradient can do without, in
the same packs (products, each by the faster of torch.mm and oneDNN). Sides take turns; ratios are taken in a
round. Seconds are those of the processor, of all threads and the kernel; the peak is that of the process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).with_name("step")))
import report
from clock import allocator, peak_bytes
from limit import Product, libraries, operands
from record import put

import rft_fn as rft
from rft_fn.strategy import StrategyConfig, get_strategy

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "gradients.json"
SIDES = ("plain", "fast", "products")
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
ALLOCATORS = {
    "usual": {},
    "thresholds": {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**27)},
    "kept": {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)},
}


def model(cfg: argparse.Namespace) -> Any:
    """A Llama of SmolLM2's sizes with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    more = {"num_hidden_layers": cfg.layers, "vocab_size": cfg.vocab, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more, max_position_embeddings=8192))


def batch(cfg: argparse.Namespace) -> rft.Experience:
    """Prompts of 60 to 180 tokens with responses of 64, of random tokens."""
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:
        return torch.randint(3, cfg.vocab, (n,), generator=g).tolist()

    sizes = [60 + 120 * i // max(cfg.rows - 1, 1) for i in range(cfg.rows)]
    exp = rft.packing.supervised([(draw(n), draw(64)) for n in sizes])
    return rft.tree.replace(exp, adv=torch.where(exp.mask, exp.tokens % 5 - 2.0, 0))


def loss_fn(out: rft.TokenOut, b: rft.Packed) -> Tensor:
    """The loss of a policy gradient."""
    return -out.logp * b.adv


def gradient(side: str, cfg: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a gradient and of an update, after one of each that is not counted."""
    st = get_strategy(StrategyConfig(fast_linear=side == "fast"))
    apply, state = st.init(model(cfg), rft.optim.adamw(1e-6))
    packs = st.shard(batch(cfg), cfg.budget)
    for _ in range(2):
        before = time.process_time()
        grads, _ = st.grad(state, apply, loss_fn, packs)
        middle = time.process_time()
        state, _ = st.update(state, grads)
        after = time.process_time()
    return {"seconds": middle - before, "update": after - middle, "packs": [len(b.tokens) for b in packs]}


def products(cfg: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the products of each pack: forward and both gradients; the head at response tokens alone."""
    lm = model(cfg)
    head = lm.get_output_embeddings()
    layers = [m.weight.detach() for m in lm.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    total = 0.0
    packs = get_strategy(StrategyConfig()).shard(batch(cfg), cfg.budget)
    for pack in packs:
        for weights, rows in ((layers, len(pack.tokens)), ([head.weight.detach()], int(pack.mask.sum()))):
            total += sum(fastest(kind, weights, rows) for kind in ("forward", "dx", "dw"))
    return {"seconds": total, "update": 0.0, "packs": [len(b.tokens) for b in packs]}


def fastest(kind: str, weights: list[Tensor], rows: int) -> float:
    """Seconds of a product with every weight in turn, by the better library, in the lesser of two passes."""
    made = {w.shape: operands(kind, w, rows) for w in weights}

    def once(product: Product) -> float:
        before = time.process_time()
        for w in weights:
            x, other = made[w.shape]
            right = {"forward": w, "dx": w.T, "dw": other}[kind]
            product(x, right)
        return time.process_time() - before

    # the first pass of each library warms up, and chooses
    better = min(libraries("cpu").values(), key=once)
    return min(once(better), once(better))


def worker(side: str, cfg: argparse.Namespace) -> None:
    """Measure a side in this process, and print it as JSON."""
    found = products(cfg) if side == "products" else gradient(side, cfg)
    print(json.dumps(found | {"peak": peak_bytes("cpu"), "allocator": allocator()}))


def turn(side: str, settings: str, threads: int, given: list[str]) -> dict[str, Any]:
    """A side measured in a process that starts with these settings of malloc."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads)} | ALLOCATORS[settings]
    before = report.processor()
    command = [sys.executable, __file__, *given, "--worker", side]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{side}: expected a measurement, got {done.returncode}\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {"side": side, "settings": settings} | found | {"others": report.others(before)}


def table(turns: list[dict[str, Any]]) -> str:
    """Medians over the rounds; the share is of the products' seconds in each round's own."""
    lines = [
        "| side | allocator | gradient, s | update, s | products / it | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    limits = {(x["settings"], x["round"]): x["seconds"] for x in turns if x["side"] == "products"}
    for side, settings in dict.fromkeys((x["side"], x["settings"]) for x in turns):
        rows = [x for x in turns if (x["side"], x["settings"]) == (side, settings)]
        shares = [limits[settings, x["round"]] / x["seconds"] for x in rows]
        middle = [statistics.median(x[name] for x in rows) for name in ("seconds", "update")]
        spread = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        peak = max(x["peak"] for x in rows) / 2**30
        lines.append(f"| {side} | {settings} | {middle[0]:.2f} | {middle[1]:.2f} | {spread} | {peak:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all sides in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=6, help="sequences")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a pack")
    parser.add_argument("--allocator", nargs="+", default=["usual"], choices=tuple(ALLOCATORS))
    parser.add_argument("--write", action="store_true", help="docs/results/gradients.json")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    cfg = parser.parse_args()
    if cfg.worker:
        worker(cfg.worker, cfg)
        return

    # the order of sides alternates, so that none is always the one after another
    sizes = {name: getattr(cfg, name) for name in ("layers", "vocab", "rows", "budget")}
    given = [x for name, n in sizes.items() for x in (f"--{name}", str(n))]
    found: dict[str, Any] = {"made": report.made("cpu") | {"threads": cfg.threads}, "sizes": sizes}
    found |= {"allocators": {name: ALLOCATORS[name] for name in cfg.allocator}, "turns": []}
    order = [(side, settings) for settings in cfg.allocator for side in SIDES]
    for i in range(cfg.rounds):
        for side, settings in order[:: 1 - 2 * (i % 2)]:
            found["turns"].append({"round": i} | turn(side, settings, cfg.threads, given))
            print(found["turns"][-1], flush=True)
            if cfg.write:
                RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["turns"]))
    if cfg.write:
        put("docs/performance.md", {"gradients": table(found["turns"])})


if __name__ == "__main__":
    main()
