"""bfloat16 against float32 on this CPU: `python tests/bench/bf16.py --write`.

One process holds a model of SmolLM2-135M's shape with random weights twice, once for each type. Both take a
gradient of the same packs in turns, and then sample the same rows in turns; ratios are taken within a turn.
Products are those that `rft_kernels.narrow` measures at the start. Seconds are those of the processor, of all
threads. Prints a median, the least and the largest of the turns; `--write` makes docs/results/bf16.json.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rft_kernels import narrow

sys.path.insert(0, str(Path(__file__).with_name("step")))
import gradients
import report

import rft_fn as rft
from rft_fn import engine, model
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.types import Sampling

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "bf16.json"
TYPES = ("float32", "bfloat16")


def gradient(kind: str, cfg: argparse.Namespace) -> Callable[[], Any]:
    """Return a function that takes the gradient of packs of prompts of 40 tokens with responses of 64."""
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:
        return torch.randint(3, cfg.vocab, (n,), generator=g).tolist()

    st = get_strategy(StrategyConfig(bf16=kind == "bfloat16"))
    apply, state = st.init(gradients.model(cfg), rft.optim.adamw(1e-6))
    exp = rft.packing.supervised([(draw(40), draw(64)) for _ in range(cfg.rows)])
    exp = rft.tree.replace(exp, adv=torch.where(exp.mask, exp.tokens % 5 - 2.0, 0))
    packs = st.shard(exp, cfg.budget)
    return lambda: st.grad(state, apply, gradients.loss_fn, packs)


def sampling(kind: str, cfg: argparse.Namespace) -> Callable[[], Any]:
    """Return a function that samples rows of 8 to a prompt of 57 to 92 tokens."""
    config = StrategyConfig(bf16=kind == "bfloat16", engine_batch=cfg.batch)
    eng = engine.get_engine(config, gradients.model(cfg), model.load_tokenizer("tiny"))
    g = torch.Generator().manual_seed(0)
    count = cfg.batch // 8
    prompts = [torch.randint(3, 20, (92 - 5 * (i % 8),), generator=g).tolist() for i in range(count)]
    keys = [rft.rng.fold_in(0, i) for i in range(count)]
    return lambda: eng.generate(prompts, keys, n=8, sampling=Sampling(max_new=cfg.tokens))


def compared(make: Callable[..., Callable[[], Any]], cfg: argparse.Namespace) -> dict[str, Any]:
    """Measure both types in turns, after one of each that is not counted."""
    calls = {kind: make(kind, cfg) for kind in TYPES}
    seconds: dict[str, list[float]] = {kind: [] for kind in TYPES}
    for turn in range(cfg.turns + 1):
        for kind, call in calls.items():
            start = time.process_time()
            call()
            if turn:
                seconds[kind].append(time.process_time() - start)
    ratios = [wide / low for wide, low in zip(*seconds.values())]
    return {"seconds": seconds, "ratio": [statistics.median(ratios), min(ratios), max(ratios)]}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=9, help="sequences of a gradient")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a pack")
    parser.add_argument("--batch", type=int, default=64, help="rows that are sampled")
    parser.add_argument("--tokens", type=int, default=24, help="of each row that is sampled")
    parser.add_argument("--write", action="store_true", help="docs/results/bf16.json")
    cfg = parser.parse_args()
    torch.set_num_threads(cfg.threads)

    found: dict[str, Any] = {"made": report.made("cpu"), "options": vars(cfg), "products": narrow.gain()}
    print(f"products   {narrow.gain():.2f}   {', '.join(narrow.ways().values())}", flush=True)
    for name, make in (("gradient", gradient), ("sampling", sampling)):
        found[name] = compared(make, cfg)
        middle, least, most = found[name]["ratio"]
        print(f"{name}   {middle:.2f} ({least:.2f} to {most:.2f})", flush=True)
    if cfg.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
