"""Every row of the table on the embedded default: `python tests/bench/rows.py --runs runs/rows`.

Runs train_scripts/grpo.py and ppo.py with their default arguments for each row (one that is there already is
not run again), and writes docs/results/rows.json, rows.png and the table in docs/algorithms.md.
"""

import argparse
import json
from pathlib import Path

from record import made, put, trained

from rft_fn import algorithm
from rft_fn.run.plot import running_mean

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def run(name, folder):
    """The metrics of a row's run, which is made (or gone on with) where it is not whole."""
    script = "ppo" if isinstance(algorithm.TABLE[name], algorithm.ActorCritic) else "grpo"
    more = ["--gae-alpha", "2"] if name == "vapo" else []
    words = ["--algorithm", name, *more]
    return trained(script, folder, *words), f"{script}.py {' '.join(words)}"


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
        y = running_mean(x["reward"], 5)
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10]}
        ax.plot([j / (len(y) - 1) for j in range(len(y))], y, label=name, **style)
    ax.set(xlabel="share of the run (140 steps of grpo.py, 60 of ppo.py)", ylabel="reward, mean of 5 steps")
    ax.set_ylim(0, 1)
    ax.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/rows"), help="folder of the runs")
    folder = parser.parse_args().runs
    found = {name: summary(name, folder / name) for name in algorithm.TABLE}
    (RESULTS / "rows.json").write_text(json.dumps({"made": made(), "rows": found}, indent=1) + "\n")
    draw(found, RESULTS / "rows.png")
    put("docs/algorithms.md", {"rows": table(found)})
    print(table(found))


if __name__ == "__main__":
    main()
