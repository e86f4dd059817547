"""Sampling ahead of learning, measured: `python tests/bench/ahead.py --runs runs/ahead`.

Runs train_scripts/grpo.py on the embedded default with the engine in the trainer's process, in a process of
its own, and one step ahead, each side with one thread, a few times in turn, since the load of a machine
changes. Then sends weights of the size of SmolLM2-135M to a process. Writes docs/results/ahead.json and
ahead.svg, and the table in docs/engines.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from record import lines, made, put, trained
from safetensors.torch import load_file, save_file

from rft_fn.engine import EngineConfig, own_process
from rft_fn.types import Engine
from rft_fn.types.engine import Delivered

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
CASES = {
    "in the trainer's process": [],
    "in its own process": ["--engine-process"],
    "one step ahead": ["--ahead", "1"],
    "two steps ahead": ["--ahead", "2"],
}


def summary(case, folder, steps):
    """The seconds of each side, without the first and the last step, which evaluate and save."""
    words = ["--steps", str(steps), "--eval-every", str(steps), "--save-every", str(steps)]
    metrics = trained(
        "grpo", folder, *CASES[case], "--engine-threads", "1", *words,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    timing = lines(folder / "timing.jsonl")[1:-1]
    wall = sum(r["seconds"] for r in timing)
    waits = sum(r["phase/generate"] for r in timing)
    works = sum(r["beside/engine"] for r in timing)
    if not works:  # nothing is begun early: the engine works while the trainer waits
        works = waits
    return {
        "wall": wall,
        "trainer_waits": waits,
        "engine_waits": wall - works,
        "sync": sum(r["phase/sync"] for r in timing) / len(timing),
        "responses": len(metrics) * 512,
        "reward": [round(r["reward/mean"], 4) for r in metrics],
        "last": statistics.mean(r["reward/mean"] for r in metrics[-10:]),
        "eval": next(r["eval/mean"] for r in metrics[::-1] if "eval/mean" in r),
        "staleness": statistics.mean(r["rollout/staleness"] for r in metrics),
        "cut": statistics.mean(r.get("mismatch/cut", 0.0) for r in metrics),
    }


def table(found, shipped):
    """A row for each place of the engine."""
    lines = [
        "| engine | seconds (each run) | trainer waits | engine waits | reward, last 10 steps | greedy "
        "| staleness | tokens cut by tis |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, x in found.items():
        walls = " ".join(f"{w:.1f}" for w in x["walls"])
        lines.append(
            f"| {case} | **{x['wall']:.1f}** ({walls}) | {x['trainer_waits']:.1f} | {x['engine_waits']:.1f} "
            f"| {x['last']:.3f} | {x['eval']:.3f} | {x['staleness']:.2f} | {100 * x['cut']:.2f} % |"
        )
    lines += ["", "| 538 MB of weights (SmolLM2-135M in float32) to a process | seconds |", "|---|---|"]
    lines += [f"| {name} | {seconds:.2f} |" for name, seconds in shipped.items()]
    return "\n".join(lines)


def copying(config, model, tokenizer):
    """An engine that copies each weight, as every engine does, and nothing else."""
    mine = torch.zeros(576 * 49152)

    def load(weights, *, version):
        count = size = 0
        for _, x in weights:
            mine[: x.numel()].copy_(x.flatten())
            count += 1
            size += x.numel() * x.element_size()
        return Delivered(count, size, 0.0, version)

    def status():
        about = {"engine": "copying", "alive": True, "version": 0, "asleep": False}
        return about | {"supported": frozenset({"load"})}

    return Engine(status, status, load, status, status, status)


def ship(times=5):
    """Seconds of a load by shared memory, and of a safetensors file that is written and read."""
    from ahead import copying  # by a name that another process can import

    shapes = [(49152, 576)] + 30 * [(576, 576), (192, 576), (192, 576), (576, 576)] + 90 * [(1536, 576)]
    weights = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    engine = own_process(copying, EngineConfig(), "", None)
    here = copying(None, None, None)
    shared, file = [], []
    for i in range(times):
        shared.append(engine.load(weights.items(), version=i).seconds)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            save_file(weights, Path(folder) / "weights.safetensors")
            here.load(load_file(Path(folder) / "weights.safetensors").items(), version=i)
        file.append(time.perf_counter() - began)
    engine.close()
    return {
        "shared memory (what is built)": statistics.median(shared),
        "a safetensors file in the temporary folder": statistics.median(file),
    }


def draw(found, path):
    """Seconds of both sides, and the reward over responses and over seconds."""
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for i, (case, x) in enumerate(found.items()):
        left.barh([i + 0.2], [x["wall"] - x["trainer_waits"]], 0.38, color="C0")
        left.barh(
            [i + 0.2], [x["trainer_waits"]], 0.38, left=x["wall"] - x["trainer_waits"], color="C0", alpha=0.25
        )
        left.barh([i - 0.2], [x["wall"] - x["engine_waits"]], 0.38, color="C1")
        left.barh(
            [i - 0.2], [x["engine_waits"]], 0.38, left=x["wall"] - x["engine_waits"], color="C1", alpha=0.25
        )
        right.plot([512 * (k + 1) for k in range(len(x["reward"]))], x["reward"], label=case, lw=1)
    left.set_yticks(range(len(found)), list(found), fontsize=8)
    left.set_xlabel("seconds: trainer (blue), engine (orange); pale: waits", fontsize=8)
    right.set_xlabel("responses", fontsize=8)
    right.set_title("reward of samples", fontsize=10, loc="left")
    right.legend(fontsize=7)
    for ax in (left, right):
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "ahead")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()

    parts = {case: [] for case in CASES}
    for i in range(args.times):
        for j, case in enumerate(CASES):
            parts[case].append(summary(case, args.runs / f"{j}_{i}", args.steps))

    # every repetition samples and learns the same: only the seconds differ, of which the median run is shown
    found = {}
    for case, every in parts.items():
        assert all(x["reward"] == every[0]["reward"] for x in every), case
        middle = sorted(every, key=lambda x: x["wall"])[len(every) // 2]
        found[case] = middle | {"walls": [x["wall"] for x in every]}
    shipped = ship()

    about = made() | {"load": os.getloadavg()[0], "steps": args.steps}
    (RESULTS / "ahead.json").write_text(
        json.dumps(about | {"runs": found, "shipped": shipped}, indent=1) + "\n"
    )
    draw(found, RESULTS / "ahead.svg")
    put("docs/engines.md", {"ahead": table(found, shipped)})


if __name__ == "__main__":
    main()
