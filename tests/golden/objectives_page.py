"""The page docs/coming_from/objectives.md and the numbers that it shows: python -m golden.objectives_page"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import torch
from golden.objectives import CONFIGS, LRFT, ORL, SIZES, errors, migrated, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "objectives.json"
PAGE = ROOT / "docs" / "coming_from" / "objectives.md"
HEAD = """# Objectives of other libraries

`python -m rft_fn.migrate` translates the objective of a config: its advantage, its loss, its mean and its
limits. Each row is a config. The numbers compare the gradient that their own code makes of it with that of
our command, from rewards to log-probs: |theirs - ours| / |theirs| with log-ratios of scale 0.05, 0.3 and 1.5,
on 16 responses in which a third of the tokens are a tool's and one has no token (LightRFT: neither). "0" is
less than 2e-4, the effect of TRL's eps of 1e-4 beside the deviation. Where ours is another objective, the
command comes with a note that has these numbers. "before" is what was printed before objectives were
compared; "refused" is a command that its script did not take.

Recorded with {made} by
`tests/golden/objectives_record.py`; `tests/golden/test_objectives.py` checks every row. The rows are those of
`rft_fn.algorithm.TABLE`; [algorithms.md](../algorithms.md) has what equals what.
"""
TITLES = {
    "trl": "TRL", "trl dpo": "TRL, pairs", "verl": "verl", "openrlhf": "OpenRLHF", "lightrft": "LightRFT",
}  # fmt: skip
SHOWN = (
    "algorithm", "advantage", "weight", "clip-low", "clip-high", "dual", "mismatch", "floor", "cap",
    "geo-low", "geo-high", "reward-norm", "gae-lambda", "kl", "loss", "average", "label-smoothing",
)  # fmt: skip


def objective_of(command: str) -> str:
    """Return the options of a command that are its objective."""
    found, inside = [], False
    for word in shlex.split(command):
        if word.startswith("--"):
            inside = word.removeprefix("--").partition(".")[0] in SHOWN
        if inside:
            found.append(word)
    return re.sub(r" --kl 0\.0(?= |$)", "", " ".join(found))


def shown(error: list[float] | None) -> str:
    """Return the numbers of a cell."""
    if error is None:
        return "refused"
    return ", ".join("0" if e < 2e-4 else "theirs is 0" if e > 1e9 else f"{e:.2g}" for e in error)


def given(key: str) -> str:
    """Return the options of a config, without those of all configs."""
    sizes = SIZES[CONFIGS[key].library] | ORL | LRFT
    return ", ".join(f"{k}={x}" for k, x in CONFIGS[key].options.items() if k not in sizes) or "the defaults"


def page(results: dict[str, Any]) -> str:
    """Return the text of the page."""
    made = read()["made"]
    lines = [HEAD.format(made=", ".join(f"{TITLES[k]} {made[k]['version']}" for k in sorted(made))).rstrip()]
    for part, title in TITLES.items():
        lines += [f"\n## {title}\n", "| config | before | now | our command |", "|---|---|---|---|"]
        for key, x in results.items():
            if key.partition("/")[0] == part:
                now = objective_of(x["command"])
                lines.append(f"| {given(key)} | {shown(x['before'])} | {shown(x['now'])} | `{now}` |")
    return "\n".join(lines) + "\n"


def measured() -> dict[str, Any]:
    """Return the results: the errors before, which are kept, and those of today's commands."""
    recorded, old = read()["entries"], json.loads(RESULTS.read_text())
    found = {}
    for key in CONFIGS:
        now = [float(f"{e:.2g}") for e in errors(key, recorded[key])]
        found[key] = {"before": old[key]["before"], "now": now, "command": migrated(key)[0]}
    return found


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    results = measured()
    rows = ",\n".join(f" {json.dumps(k)}: {json.dumps(x)}" for k, x in results.items())
    RESULTS.write_text("{\n" + rows + "\n}\n")
    PAGE.write_text(page(results))
