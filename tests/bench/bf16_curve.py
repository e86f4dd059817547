"""The reward of SmolLM2-135M in bfloat16 and float32: `python tests/bench/bf16_curve.py gsm8k/train.jsonl`.

grpo.py trains on questions of GSM8K, with `--strategy.bf16` and without, each with three seeds. The reward is
the share of digits in a response: a model of this size can learn it within a few steps, which right answers
it cannot. `--write` makes docs/results/bf16_curve.json and its picture.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from record import lines, made

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
TYPES = {"float32": "--strategy.no-bf16", "bfloat16": "--strategy.bf16"}
KEPT = ("reward/mean", "policy/logp_gap", "grad/norm", "rollout/length_mean")
LAST = 4  # steps, of which the table has the mean reward
OPTIONS = [
    "--model", "smollm2-135m", "--template", "{question}", "--prompts", "4", "--group", "8",
    "--max-new", "32", "--lr", "2e-5", "--eval-prompts", "4", "--eval-every", "1000", "--save-every", "1000",
]  # fmt: skip


def digits(prompts: list[str], completions: list[str], **columns: list[str]) -> list[float]:
    """Return the share of characters that are digits, of each response."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def train(kind: str, seed: int, cfg: argparse.Namespace) -> dict[str, list[float]]:
    """Return the metrics of a run, step by step."""
    folder = cfg.runs / f"{kind}_{seed}"
    command = [
        sys.executable, str(ROOT / "train_scripts" / "grpo.py"), *OPTIONS, "--data", cfg.data, "--reward",
        f"{Path(__file__).resolve()}:digits", "--steps", str(cfg.steps), "--seed", str(seed), TYPES[kind],
        "--out", str(folder),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    with open(cfg.runs / f"{kind}_{seed}.log", "w") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    rows = lines(folder / "metrics.jsonl")
    return {name: [float(f"{row[name]:.5g}") for row in rows] for name in KEPT}


def draw(runs: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    """Draw reward and gap over the steps: a thin line for each seed, and their mean."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    names = {"reward/mean": "share of digits in a response", "policy/logp_gap": "gap [nats per token]"}
    for axis, (name, label) in zip(axes, names.items()):
        for color, (kind, seeds) in zip(("tab:blue", "tab:orange"), runs.items()):
            curves = [run[name] for run in seeds]
            steps = range(1, len(curves[0]) + 1)
            for curve in curves:
                axis.plot(steps, curve, color=color, alpha=0.35, linewidth=0.8)
            mean = [statistics.mean(values) for values in zip(*curves)]
            axis.plot(steps, mean, color=color, linewidth=2, label=kind)
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", help="questions of GSM8K, as jsonl")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--runs", type=Path, default=Path("runs/bf16_curve"), help="folder of the runs")
    parser.add_argument("--write", action="store_true", help="docs/results/bf16_curve.json and .svg")
    cfg = parser.parse_args()
    cfg.runs.mkdir(parents=True, exist_ok=True)

    with ThreadPoolExecutor(cfg.jobs) as pool:
        jobs = {
            (kind, seed): pool.submit(train, kind, seed, cfg) for seed in range(cfg.seeds) for kind in TYPES
        }
        found = {key: job.result() for key, job in jobs.items()}
    runs = {kind: [found[kind, seed] for seed in range(cfg.seeds)] for kind in TYPES}
    for kind, seeds in runs.items():
        first = [run["reward/mean"][0] for run in seeds]
        last = [statistics.mean(run["reward/mean"][-LAST:]) for run in seeds]
        gap = max(max(run["policy/logp_gap"]) for run in seeds)
        print(kind, "first", first, "last", [round(x, 3) for x in last], f"largest gap {gap:.2g}")
    if cfg.write:
        found = made() | {"options": OPTIONS, "steps": cfg.steps, "runs": runs}
        (RESULTS / "bf16_curve.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(runs, RESULTS / "bf16_curve.svg")


if __name__ == "__main__":
    main()
