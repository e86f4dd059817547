"""The table and the pictures of docs/examples: what each script's run with its defaults moved.

    python tests/bench/examples.py --run [NAME ...]   # run them, one after the other; then as below
    python tests/bench/examples.py                    # the table again, of the numbers in results.json

Seconds are of the processor, so that a busy machine says the same; each run has one process with one thread.
"""

import ast
import datetime
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from record import lines

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
PAGE = FOLDER / "README.md"
RESULTS = FOLDER / "results.json"
PICTURES = FOLDER / "pictures"
START, END = "<!-- table -->", "<!-- end of table -->"
LAST = 10  # steps whose mean is the end of a run; the start is its first two steps
FIRST = 2

# what an idea is about, besides the reward: the metric, and its name in table and picture
OWN = {
    "dpo_on_the_fly": ("pairs", "pairs"),
    "ema_teacher": ("policy/kl_teacher", "KL to the teacher [nats]"),
    "expert_iteration": ("kept", "share kept"),
    "length_limit": ("length/mean", "length [tokens]"),
    "meta_clip": ("limit", "limit"),
    "replay": ("replay/rows", "replayed rows"),
    "solver_verifier": ("verifier", "right verdicts"),
    "two_turns": ("reward/first", "reward of the first try"),
}


def scripts() -> list[Path]:
    """The examples that can be run, by name."""
    return [p for p in sorted(FOLDER.glob("*.py")) if "def main(" in p.read_text()]


def summary(path: Path) -> str:
    """The first sentence of an example's docstring."""
    first = ast.get_docstring(ast.parse(path.read_text())).split("\n\n")[0]
    return re.sub(r" \(arXiv .*\)", "", first).rstrip(".")


def paper(path: Path) -> str:
    """The arXiv id that an example names."""
    return re.search(r"arXiv (\d{4}\.\d{5})", path.read_text())[1]


# ------------------------------------------------------------------------------------------------ runs


def run(path: Path) -> None:
    """Run an example with its defaults; its numbers go to results.json, its curves to pictures/."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / path.stem
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, str(path), "--out", str(out)], env=env, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows = lines(out / "metrics.jsonl")
    record(path.stem, rows, seconds)


def record(name: str, rows: list[dict], seconds: float) -> None:
    """Write what a run moved, and draw it."""
    keys = ["reward/mean"]
    if name in OWN:
        keys.append(OWN[name][0])
    moved = {key: [ends(rows, key)[0], ends(rows, key)[1]] for key in keys}
    found = {"date": datetime.date.today().isoformat(), "steps": len(rows), "seconds": round(seconds)}
    results = {}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text())
    results[name] = found | {"moved": moved}
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    picture(name, rows)


def ends(rows: list[dict], key: str) -> tuple[float, float]:
    """The mean of a metric over the first and over the last steps."""
    values = [row[key] for row in rows if key in row]
    first, last = values[:FIRST], values[-LAST:]
    return round(sum(first) / len(first), 4), round(sum(last) / len(last), 4)


def picture(name: str, rows: list[dict]) -> None:
    """The reward of a run, and beside it what the idea is about."""
    from rft_fn.run import plot

    plt = plot._pyplot()
    panels = [("reward", "reward/mean")]
    if name in OWN:
        panels.append((OWN[name][1], OWN[name][0]))
    fig, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 2.7), squeeze=False)
    for ax, (title, key) in zip(axes.flat, panels):
        plot._panel(ax, rows, title, [key])
    fig.tight_layout()
    PICTURES.mkdir(exist_ok=True)
    fig.savefig(PICTURES / f"{name}.png", dpi=90)
    plt.close(fig)


# ----------------------------------------------------------------------------------------------- table


def number(x: float) -> str:
    """A number of the table: two digits behind the point, or three where it is small."""
    if abs(x) < 0.1:
        return f"{x:.3f}"
    return f"{x:.2f}"


def what_moved(name: str, found: dict) -> str:
    """The reward and the measure of an idea, at the start and at the end of its run."""
    parts = []
    for key, (first, last) in found["moved"].items():
        title = "reward"
        if key != "reward/mean":
            title = OWN[name][1]
        parts.append(f"{title} {number(first)} → {number(last)}")
    return ", ".join(parts)


def measured(name: str, results: dict) -> list:
    """The cells of an example's run: steps, what moved with a link to the curves, seconds."""
    if name not in results:
        return ["", "not run yet", ""]
    found = results[name]
    return [found["steps"], f"{what_moved(name, found)} ([curves](pictures/{name}.png))", found["seconds"]]


def table() -> str:
    """A line for each example."""
    results = json.loads(RESULTS.read_text())
    lines = ["| script | idea | paper | lines | steps | what moved | seconds | processes |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for path in scripts():
        cells = [f"[{path.name}]({path.name})", summary(path), paper(path)]
        cells += [len(path.read_text().splitlines()), *measured(path.stem, results), "1 and 2"]
        lines.append("| " + " | ".join(str(x) for x in cells) + " |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table as the scripts and the results have it."""
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{table()}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> None:
    """Run what is asked for, and write the table."""
    names = arguments[1:]
    if arguments[:1] == ["--run"]:
        for path in scripts():
            if not names or path.stem in names:
                run(path)
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
