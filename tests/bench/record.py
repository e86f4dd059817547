"""Keep a run as one file: `python tests/bench/record.py RUN docs/results/NAME/run.json`.

The file has the options, the seconds of all steps, and the metrics that pages and symptoms read, to five
digits: a list of one value a step, or {step: value} where some steps have none.
"""

import argparse
import json
from pathlib import Path

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
    found = {"config": json.loads((run / "config.json").read_text()), "steps": len(rows)}
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    given.file.write_text(json.dumps(record(given.run)) + "\n")
