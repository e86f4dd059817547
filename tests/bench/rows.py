"""Every row of the table on the embedded default: `python tests/bench/rows.py --runs runs/rows`.

Runs train_scripts/grpo.py and ppo.py with their default arguments for each row (one that is there already is
not run again), and writes docs/results/rows.json, rows.png and the table in docs/algorithms.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

from rft_fn import algorithm

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
BEGIN, END = "<!-- rows:begin -->", "<!-- rows:end -->"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(name, folder):
    """The metrics of a row's run, which is made (or gone on with) where it is not whole."""
    script = "ppo" if isinstance(algorithm.TABLE[name], algorithm.ActorCritic) else "grpo"
    more = ["--gae-alpha", "2"] if name == "vapo" else []
    command = [sys.executable, str(ROOT / "train_scripts" / f"{script}.py"), "--algorithm", name, *more]
    if not (folder / "model").exists():
        subprocess.run([*command, "--out", str(folder)], check=True)
    return read(folder / "metrics.jsonl"), f"{script}.py {' '.join(['--algorithm', name, *more])}"


def summary(name, folder):
    rows, command = run(name, folder)
    reward = [r["reward/mean"] for r in rows]
    return {
        "command": command,
        "reward": [round(x, 4) for x in reward],
        "last": sum(reward[-10:]) / 10,
        "eval": next(r["eval/mean"] for r in rows[::-1] if "eval/mean" in r),
        "gap": max(r["policy/logp_gap"] for r in rows),
    }


def table(found):
    """The rows from the highest reward to the lowest, as the docs show them."""
    lines = ["| row | reward of samples, last 10 steps | greedy, 128 unseen questions |", "|---|---|---|"]
    for name, x in sorted(found.items(), key=lambda item: -item[1]["last"]):
        lines.append(f"| `{name}` | {x['last']:.3f} | {x['eval']:.3f} |")
    return "\n".join(lines)


def draw(found, path):
    """One line for each row, against the share of its steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(10, 5), layout="constrained")
    for i, (name, x) in enumerate(found.items()):
        y = [
            sum(part) / len(part)
            for part in (x["reward"][max(j - 4, 0) : j + 1] for j in range(len(x["reward"])))
        ]
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10]}
        ax.plot([j / (len(y) - 1) for j in range(len(y))], y, label=name, **style)
    ax.set(xlabel="share of the run (140 steps of grpo.py, 60 of ppo.py)", ylabel="reward, mean of 5 steps")
    ax.set_ylim(0, 1)
    ax.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=110)


def section(text, new):
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n\n" + new + "\n\n" + END + rest.split(END)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/rows"), help="folder of the runs")
    folder = parser.parse_args().runs
    found = {name: summary(name, folder / name) for name in algorithm.TABLE}
    made = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    (RESULTS / "rows.json").write_text(json.dumps({"made": made, "rows": found}, indent=1) + "\n")
    draw(found, RESULTS / "rows.png")
    docs = ROOT / "docs" / "algorithms.md"
    docs.write_text(section(docs.read_text(), table(found)))
    print(table(found))


if __name__ == "__main__":
    main()
