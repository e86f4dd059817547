"""The recipes' curves: `python tests/bench/recipes.py [NAME ...]` runs what a page has under "Here".

The files of the page are written and its commands run in a folder; those that train the policy and evaluate
it once for each seed. What is there already is not run again. Writes docs/results/recipes/NAME.json and
NAME.png, and with `--table` the tables of docs/results/recipes.md and of the pages, from all of these files.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import record
import torch

sys.path.append(str(record.ROOT / "tests"))
import pages

import rft_fn as rft
from rft_fn.run.plot import running_mean

PAGES = record.ROOT / "docs" / "recipes"
RESULTS = record.ROOT / "docs" / "results" / "recipes"
TABLE = "docs/results/recipes.md"
POLICY, EVALUATION = ("grpo.py", "multi_turn.py"), "evaluate.py"
BLUE, GREY, ORANGE = "#1f6fb2", "#8a94a3", "#d65a14"


def commands(name: str) -> list[list[str]]:
    """Return the words of each command that a page has under "Here"."""
    section = (PAGES / f"{name}.md").read_text().partition("\n## Here\n")[2].partition("\n## ")[0]
    return list(pages.commands(section))


def value_of(words: list[str], option: str) -> str:
    """Return the value of an option of a command, "" where it is not there."""
    return words[words.index(option) + 1] if option in words else ""


def numbered(file: str, seed: int) -> str:
    """Return the name of a .json file for a seed; any other word is as it was."""
    return re.sub(r"\.json$", f"_{seed}.json", file)


def of_seed(words: list[str], policy: str, seed: int) -> list[str]:
    """Return a command for a seed, whose run and file have its number: runs/x_1, runs/eval_1.json."""
    made = [f"{policy}_{seed}" if word == policy else numbered(word, seed) for word in words]
    return made + (["--seed", str(seed)] if Path(words[1]).name in POLICY else [])


def done(words: list[str], folder: Path) -> bool:
    """Return whether a command has left what it makes: a file, or the folder of a run."""
    out = folder / value_of(words, "--out")
    return out.is_file() or (out / "model").exists()


def summary(rows: list[dict], config: dict, seconds: float, evaluated: Path | None) -> dict:
    """Return what is shown of a run: its rewards, and the greedy answers before and after.

    Right answers have 95 % intervals by a bootstrap over problems: those of evaluate.py where there is such a
    file, else of the run's own evaluations, of an answer that is right or wrong.
    """
    held = [x for x in rows[0] if re.fullmatch("reward/.*@held", x)]
    made: dict = {"seconds": round(seconds), "reward": record.column(rows, "reward/mean")}
    made["held"] = {x: record.column(rows, x) for x in held}
    if evaluated:
        found = json.loads(evaluated.read_text())
        made |= {"count": found["result"]["questions"], "difference": found["difference"]["avg@1"]}
        for side, x in (("before", found["beside"]), ("after", found)):
            made[side] = [x["result"]["avg@1"], *x["interval"]["avg@1"]]
        return made
    shares = [x["eval/mean"] for x in rows if x.get("eval/mean") is not None]
    made["count"] = config["eval_prompts"]
    for side, share in (("before", shares[0]), ("after", shares[-1])):
        right = torch.arange(made["count"]) < round(share * made["count"])
        made[side] = [share, *rft.metric.bootstrap(right.double(), seed=0)]
    return made


def measure(name: str, seeds: list[int], folder: Path) -> dict:
    """Run a recipe, and return what its page and the table show."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in pages.titled((PAGES / f"{name}.md").read_text()).items():
        (folder / file).write_text(text)
    found = commands(name)
    env = os.environ | {"PYTHONPATH": str(record.ROOT)}

    def call(words: list[str]) -> None:
        if not done(words, folder):
            script = words[1].replace("train_scripts/", f"{record.ROOT}/train_scripts/")
            subprocess.run([sys.executable, script, *words[2:]], cwd=folder, env=env, check=True)

    (policy,) = (x for x in found if Path(x[1]).name in POLICY)
    own = [policy] + [x for x in found if Path(x[1]).name == EVALUATION]
    out = value_of(policy, "--out")
    for words in found:
        if words not in own:
            call(words)
    runs = {}
    for seed in seeds:
        for words in own:
            call(of_seed(words, out, seed))
        run = folder / f"{out}_{seed}"
        seconds = sum(x["seconds"] for x in record.lines(run / "timing.jsonl"))
        config = json.loads((run / "config.json").read_text())
        evaluated = folder / numbered(value_of(own[-1], "--out"), seed) if len(own) > 1 else None
        runs[seed] = summary(record.lines(run / "metrics.jsonl"), config, seconds, evaluated)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=record.ROOT, text=True)
    where = record.made() | {"processor": record.processor(), "commit": commit.strip()}
    return where | {"commands": [shlex.join(x) for x in found], "seeds": runs}


def draw(found: dict, path: Path) -> None:
    """Draw the rewards of all seeds on the left, and greedy answers before and after on the right."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.8, 3), width_ratios=(3, 2), layout="constrained")
    for seed, run in found["seeds"].items():
        curves = [(run["reward"], BLUE, "reward of samples")]
        curves += [(values, ORANGE, "true reward, held") for values in run["held"].values()]
        for values, color, label in curves:
            steps = range(1, len(values) + 1)
            left.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
            smooth = running_mean(values, max(len(values) // 10, 2))
            left.plot(steps, smooth, color=color, linewidth=1.6, label=label if seed == "0" else None)
    left.set(xlabel="step")
    left.legend(frameon=False, fontsize=9)
    for k, (side, color) in enumerate((("before", GREY), ("after", BLUE))):
        ends = [run[side] for run in found["seeds"].values()]
        errors = [[x[0] - x[1] for x in ends], [x[2] - x[0] for x in ends]]
        places = [i + 0.38 * k for i in range(len(ends))]
        right.bar(places, [x[0] for x in ends], 0.36, yerr=errors, color=color, capsize=3, label=side)
    right.set_xticks([i + 0.19 for i in range(len(found["seeds"]))], [f"seed {x}" for x in found["seeds"]])
    count = int(next(iter(found["seeds"].values()))["count"])
    right.set(ylabel=f"right, greedy, {count} questions", ylim=(0, 1.3))
    right.legend(frameon=False, fontsize=9, ncols=2)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def ends(values: list[float]) -> str:
    """Return a share with its interval."""
    return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"


def table(names: list[str]) -> str:
    """Return the table of recipes that were run here."""
    head = (
        "recipe",
        "seed",
        "reward of samples",
        "right before",
        "right after",
        "difference",
        "steps",
        "seconds",
    )
    lines = [head, ["---"] * len(head)]
    for name in names:
        found = json.loads((RESULTS / f"{name}.json").read_text())
        for seed, run in found["seeds"].items():
            last = run["reward"][-10:]
            change = ends(run["difference"]) if "difference" in run else ""
            lines.append(
                [
                    f"[{name}](../recipes/{name}.md)",
                    seed,
                    f"{run['reward'][0]:.2f} → {sum(last) / len(last):.2f}",
                    ends(run["before"]),
                    ends(run["after"]),
                    change,
                    str(len(run["reward"])),
                    str(run["seconds"]),
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put_tables() -> None:
    """Put the table of all recipes into the page of results, and that of each into its own page."""
    names = sorted(x.stem for x in RESULTS.glob("*.json"))
    record.put(TABLE, {"recipes": table(names)})
    for name in names:
        record.put(f"docs/recipes/{name}.md", {"here": table([name])})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=record.ROOT / "runs" / "recipes")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    for name in given.names:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(measure(name, given.seeds, given.runs.resolve() / name))
        (RESULTS / f"{name}.json").write_text(text + "\n")
        draw(json.loads(text), RESULTS / f"{name}.png")
    if given.table:
        put_tables()
