"""Run an experiment: its arms for several seeds, the numbers, the picture, and the table of its page.

    python docs/experiments/run.py clip_higher
    python docs/experiments/run.py clip_higher --steps 10 --seeds 1 --out /tmp/small

A run that was made before is not made again: its numbers lie under --runs by all of its options. Writes
NAME.json and NAME.png into --out, and the table into NAME.md there, between its two marks.
"""

import dataclasses
import hashlib
import inspect
import json
import platform
import re
import statistics
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from claims import EXPERIMENTS, Experiment

HERE = Path(__file__).parent
LAST = 10  # steps that "end" is the mean of
MARKS = "<!-- table -->", "<!-- end of table -->"


def described(x: Any) -> Any:
    """An arm's field as text that is the same in every process."""
    if isinstance(x, partial):
        given = ", ".join(f"{name}={value}" for name, value in x.keywords.items())
        return f"{described(x.func)}({given})"
    if inspect.isfunction(x):
        room = x.__module__.removeprefix("rft_fn.")
        return f"{'advantage' if room.startswith('advantage.') else room}.{x.__qualname__}"
    return x


def options(arm: Any) -> dict[str, Any]:
    """The options of an arm by name."""
    return {field.name: described(getattr(arm, field.name)) for field in dataclasses.fields(arm)}


def run(e: Experiment, arm: Any, seed: int, steps: int, runs: Path) -> list[dict[str, float]]:
    """The metrics of a run, which is made if it is not there."""
    content = {"loop": described(e.loop), "arm": options(arm), "seed": seed, "steps": steps}
    name = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
    path = runs / f"{name}.json"
    if not path.exists():
        logs = e.loop(arm, seed, steps)
        runs.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"of": content, "logs": logs}))
        part.rename(path)
    return json.loads(path.read_text())["logs"]


def series(logs: list[dict[str, float]], metric: str) -> tuple[list[int], list[float]]:
    """(the steps that have a metric, counted from 1; its values)."""
    found = [(i + 1, row[metric]) for i, row in enumerate(logs) if metric in row]
    return [i for i, _ in found], [round(x, 5) for _, x in found]


def number(logs: list[dict[str, float]], metric: str, how: str) -> float:
    """One number of a run: mean, sum or last of a metric, its mean over the last steps, or half way."""
    steps, values = series(logs, metric)
    if how == "end":
        return statistics.fmean(values[-LAST:])
    if how == "middle":
        return next(x for i, x in zip(steps, values) if i >= len(logs) // 2)
    if how == "last":
        return values[-1]
    return {"mean": statistics.fmean, "sum": sum}[how](values)


def measure(e: Experiment, *, steps: int, seeds: int, runs: Path) -> dict[str, Any]:
    """Curves and numbers of every arm, by seed."""
    arms = {}
    for name, arm in e.arms.items():
        logs = []
        for seed in range(seeds):
            print(f"{name}, seed {seed}", flush=True)
            logs.append(run(e, arm, seed, steps, runs))
        arms[name] = {
            "options": options(arm),
            "curves": {m: [series(x, m) for x in logs] for m in e.panels.values()},
            "numbers": {c: [number(x, *how) for x in logs] for c, how in e.columns.items()},
        }
    return arms


def processor() -> str:
    """The model of the processor."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    if found is None:
        return platform.machine()
    return found[1]


def shown(values: list[float]) -> str:
    """Mean and standard deviation over seeds, to three places; the number alone of one seed."""
    mean = statistics.fmean(values)
    if mean >= 1000:
        return f"{mean:,.0f}"
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}"


def table(found: dict[str, Any]) -> str:
    """The numbers of an experiment's json as a table of Markdown."""
    columns = next(iter(found["arms"].values()))["numbers"]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, arm in found["arms"].items():
        lines.append(f"| {name} | " + " | ".join(shown(x) for x in arm["numbers"].values()) + " |")
    return "\n".join(lines)


def draw(e: Experiment, found: dict[str, Any], path: Path) -> None:
    """A panel for each metric: the mean of an arm as a line, lowest to highest seed as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(e.panels), figsize=(5 * len(e.panels), 3.4), layout="constrained")
    for ax, (title, metric) in zip(axes, e.panels.items()):
        for k, (name, arm) in enumerate(found["arms"].items()):
            steps = arm["curves"][metric][0][0]
            values = torch.tensor([y for _, y in arm["curves"][metric]], dtype=torch.float64)
            values = smoothed(values)
            ax.plot(steps, values.mean(0), color=f"C{k}", label=name, lw=1.6)
            ax.fill_between(steps, values.amin(0), values.amax(0), color=f"C{k}", alpha=0.18, lw=0)
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def smoothed(values: torch.Tensor) -> torch.Tensor:
    """[seeds, steps]: each value of a long curve as the mean of the last five up to it."""
    if values.shape[1] < 30:
        return values
    before = values[:, :1].expand(-1, 4)
    return torch.cat([before, values], 1).unfold(1, 5, 1).mean(-1)


def into_page(path: Path, text: str) -> None:
    """Put the table between the marks of a page, if there is one."""
    if not path.exists():
        return
    begin, end = MARKS
    page = path.read_text()
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path}: expected {begin} and {end} once each")
    before, rest = page.split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def experiment(name: str, *, steps: int | None, seeds: int, out: Path, runs: Path) -> None:
    """Run one experiment and write its files."""
    e = EXPERIMENTS[name]
    if steps is None:
        steps = e.steps
    torch.set_num_threads(1)
    arms = measure(e, steps=steps, seeds=seeds, runs=runs)
    found = {
        "title": e.title,
        "source": e.source,
        "date": date.today().isoformat(),
        "hardware": f"one thread of {processor()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": f"python docs/experiments/run.py {name}",
        "steps": steps,
        "seeds": seeds,
        "arms": arms,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found) + "\n")
    draw(e, found, out / f"{name}.png")
    into_page(out / f"{name}.md", table(found))
    print(f"{e.title}: {steps} steps, {seeds} seeds\n{table(found)}\n{out / name}.png")


def main(
    name: tyro.conf.Positional[str],
    steps: int | None = None,
    seeds: int = 3,
    out: Path = HERE,
    runs: Path = Path("runs/experiments"),
) -> None:
    """Run an experiment, or all of them, and write numbers, picture and table."""
    names = [name]
    if name == "all":
        names = list(EXPERIMENTS)
    if not set(names) <= set(EXPERIMENTS):
        raise SystemExit(f"name: expected all or one of {', '.join(EXPERIMENTS)}, got {name}")
    if seeds < 1 or (steps is not None and steps < 1):
        raise SystemExit(f"steps, seeds: expected at least 1, got {steps}, {seeds}")
    for each in names:
        experiment(each, steps=steps, seeds=seeds, out=out, runs=runs)


if __name__ == "__main__":
    tyro.cli(main)
