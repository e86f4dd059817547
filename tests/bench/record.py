"""Keep a run as one file: `python tests/bench/record.py RUN docs/results/NAME/run.json`.

Here is also what the scripts beside it share: where they measured, runs, and tables between marks of a page.

The file has the options, the seconds of all steps, and the metrics that pages and symptoms read, to five
digits: a list of one value a step, or {step: value} where some steps have none.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
KEPT = (
    "reward/", "eval/", "policy/entropy", "policy/logp_gap", "policy/clip_frac", "rollout/length_mean",
    "rollout/truncated", "grad/norm", "lr", "loss",
)  # fmt: skip


def lines(file: Path) -> list[dict]:
    """The rows of a jsonl file; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def column(rows: list[dict], name: str) -> list[float] | dict[str, float]:
    """A metric over the steps."""
    found = {str(row["step"]): float(f"{row[name]:.5g}") for row in rows if row.get(name) is not None}
    return list(found.values()) if len(found) == len(rows) else found


def record(run: Path) -> dict:
    """What is kept of a run's folder."""
    rows = lines(run / "metrics.jsonl")
    names = sorted({name for row in rows for name in row if name.startswith(KEPT)})
    config = json.loads((run / "config.json").read_text())
    config.get("digests", {}).pop("files", None)  # their places are of a machine
    found = {"config": config, "steps": len(rows)}
    seconds = [row["seconds"] for row in lines(run / "timing.jsonl")]
    found |= {"seconds": round(sum(seconds), 1)} if seconds else {}
    return found | {"metrics": {name: column(rows, name) for name in names}}


def rows_of(file: Path) -> list[dict]:
    """The rows of metrics that a recorded run had."""
    found = json.loads(file.read_text())
    rows = [{"step": step} for step in range(found["steps"])]
    for name, values in found["metrics"].items():
        for step, value in values.items() if isinstance(values, dict) else enumerate(values):
            rows[int(step)][name] = value
    return rows


def trained(script: str, out: Path, *words: str, **options) -> list[dict]:
    """Return the metrics of a training script's run, which is made where it is not whole."""
    if not (out / "model").exists():
        command = [sys.executable, str(ROOT / "train_scripts" / f"{script}.py"), *words, "--out", str(out)]
        subprocess.run(command, check=True, **options)
    return lines(out / "metrics.jsonl")


def made() -> dict:
    """Return when and where something is measured."""
    return {
        "date": str(date.today()),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def processor() -> str:
    """Return the processor's name and family, where Linux tells them."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    found = [re.search(rf"^{key}\s*: *(.*?) *$", text, re.M) for key in ("model name", "cpu family")]
    name = found[0][1] if found[0] else platform.processor() or platform.machine()
    return f"{name}, family {found[1][1]}" if found[1] else name


def _marked(mark: str) -> str:
    return rf"(<!-- {mark}:begin -->\n+)(.*?)(\n+<!-- {mark}:end -->)"


def between(page: str, mark: str) -> str:
    """Return what a page of the documentation has between two marks."""
    (found,) = re.findall(_marked(mark), (ROOT / page).read_text(), re.S)
    return found[1]


def put(page: str, tables: dict[str, str]) -> None:
    """Put each text between its marks in a page of the documentation."""
    text = (ROOT / page).read_text()
    for mark, table in tables.items():
        text, count = re.subn(_marked(mark), lambda m, new=table: m[1] + new + m[3], text, flags=re.S)
        if count != 1:
            raise ValueError(f"{page}: expected the marks of {mark} once, got {count}")
    (ROOT / page).write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    given.file.write_text(json.dumps(record(given.run)) + "\n")
