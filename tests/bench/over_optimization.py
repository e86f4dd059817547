"""A policy trained on a reward model's score, and the true reward: `python tests/bench/over_optimization.py`.

Scalar reward models learn from few and from many pairs of sort_digits; GRPO maximises the score of each, the
proxy, with and without a KL to the initial policy; the task's own reward, gold, is watched and not learned
from. Each run is kept in a folder and resumed there, so the command can be stopped and repeated. `--only`
runs the cells whose name begins so, `--draw` none. Writes docs/results/over_optimization.json and .svg: gold
and proxy against the square root of the KL, as figure 1 of arXiv 2210.10760 does.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

from record import lines, made

import rft_fn as rft
from rft_fn.run.plot import running_mean

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAIRS, COEFFICIENTS, SEEDS = (100, 3000), (0.0, 0.1), (0, 1, 2)
TASK = "sort_digits"
HELD_OUT = 512  # pairs
MEASURED = 1e-9  # a coefficient that measures the KL and moves nothing that a float32 loss can show
REWARD_MODEL = {"pool": "attention", "eval-every": 50, "save-every": 100}
POLICY = {"algorithm": "dr_grpo", "prompts": 16, "group": 16, "save-every": 20, "eval-every": 1000}


class Cell(NamedTuple):
    """One run of GRPO, and the reward model that it maximises."""

    pairs: int
    kl: float
    seed: int

    @property
    def name(self):
        """The name of its folder."""
        return f"pairs{self.pairs}-kl{self.kl:g}-seed{self.seed}"


def write_pairs(path, seed, count):
    """A file of pairs, whose rejected responses cover what a policy may emit."""
    tokenizer = rft.model.load_tokenizer("tiny")
    how = {"kind": rft.data.PAIRS, "negatives": rft.run.options.COVERING}
    dataset = rft.data.load(f"{TASK}:1", tokenizer, seed=seed, **how)
    items, _ = rft.data.take(dataset, count, seed)
    rows = [{name: item.columns[name] for name in ("prompt", "chosen", "rejected")} for item in items]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(script, folder, **options):
    """Run a script of train_scripts to its end, with its words in a file; returns the seconds."""
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *(str(x) for x in value)]
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "train_scripts" / f"{script}.py"), *words, "--out", str(folder)]
    with open(beside(folder, ".log"), "a") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return time.perf_counter() - began


def beside(folder, ending):
    """A file with the name of a folder; the name may have a dot."""
    return folder.parent / f"{folder.name}{ending}"


def single(options):
    """Each option as a list of words."""
    return {name: [value] for name, value in options.items()}


def reward_model(folder, pairs, seed, steps):
    """The record of the reward model that learned from some pairs: trained here, or before."""
    out = folder / f"rm-pairs{pairs}-seed{seed}"
    kept = beside(out, ".json")
    if kept.exists():
        return json.loads(kept.read_text())
    train, held_out = beside(out, ".train.jsonl"), beside(out, ".held_out.jsonl")
    write_pairs(train, 1000 + seed, pairs)
    write_pairs(held_out, 2000 + seed, HELD_OUT)
    files = {"data": [train], "eval-data": [held_out]}
    seconds = call("train_rm", out, **files, **single(REWARD_MODEL | {"steps": steps, "seed": seed}))
    last = lines(out / "metrics.jsonl")[-1]
    record = {"pairs": pairs, "seed": seed, "seconds": seconds}
    record |= {name: x for name, x in last.items() if name.startswith("eval/")}
    kept.write_text(json.dumps(record))
    return record


def policy(folder, cell, steps):
    """The record of a cell: run here, or before."""
    out = folder / cell.name
    kept = beside(out, ".json")
    if kept.exists():
        return json.loads(kept.read_text())
    model = folder / f"rm-pairs{cell.pairs}-seed{cell.seed}"
    rewards = {"reward": [f"model:{model}=1", f"task:{TASK}=0"]}
    options = POLICY | {"steps": steps, "seed": cell.seed, "kl": cell.kl or MEASURED}
    seconds = call("grpo", out, **rewards, **single(options))
    rows = []
    for row in lines(out / "metrics.jsonl"):
        kl = row["policy/kl_ref"] * row["rollout/length_mean"]  # of a response [nats]
        rows.append({"gold": row[f"reward/task:{TASK}"], "proxy": row["reward/mean"], "kl": kl})
    record = {**cell._asdict(), "seconds": seconds, "rows": rows}
    kept.write_text(json.dumps(record))
    return record


def draw(found, path):
    """Gold above proxy, a column for each number of pairs, a line for each run."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "over-optimisation"
    numbers = sorted({cell["pairs"] for cell in found["cells"]})
    fig, axes = plt.subplots(2, len(numbers), figsize=(4.6 * len(numbers), 5.6), sharey="row", squeeze=False)
    for column, pairs in enumerate(numbers):
        for cell in (x for x in found["cells"] if x["pairs"] == pairs):
            color = f"C{COEFFICIENTS.index(cell['kl'])}"
            label = f"KL {cell['kl']:g}" if cell["seed"] == min(SEEDS) else None
            distance = [max(row["kl"], 0) ** 0.5 for row in cell["rows"]]
            for ax, name in zip(axes[:, column], ("gold", "proxy"), strict=True):
                values = running_mean([row[name] for row in cell["rows"]], 5)
                ax.plot(running_mean(distance, 5), values, color, lw=1, label=label)
        for ax, title in zip(axes[:, column], ("true reward", "score of the reward model"), strict=True):
            ax.set_title(f"{title}, {pairs} pairs", fontsize=9, loc="left")
            ax.set_xlabel("sqrt(KL to the initial policy) [nats per response]", fontsize=8)
            ax.tick_params(labelsize=8)
            ax.legend(fontsize=7)
            ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "over_optimization")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--model-steps", type=int, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)

    # what is done already is read from the folder, cell by cell
    cells = [Cell(pairs, kl, seed) for seed, pairs, kl in product(SEEDS, PAIRS, COEFFICIENTS)]
    for cell in cells:
        if args.draw or not cell.name.startswith(args.only):
            continue
        print(reward_model(args.runs, cell.pairs, cell.seed, args.model_steps), flush=True)
        record = policy(args.runs, cell, args.steps)
        print(cell.name, f"{record['seconds']:.0f} s", record["rows"][0], record["rows"][-1], flush=True)

    about = made() | {"reward_model": REWARD_MODEL, "policy": POLICY}
    about |= {"steps": args.steps, "model_steps": args.model_steps}
    done = [args.runs / f"{cell.name}.json" for cell in cells]
    models = sorted(args.runs.glob("rm-*seed[0-9].json"))
    found = about | {"reward_models": [json.loads(path.read_text()) for path in models]}
    found["cells"] = [json.loads(path.read_text()) for path in done if path.exists()]
    (args.results / "over_optimization.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, args.results / "over_optimization.svg")


if __name__ == "__main__":
    main()
