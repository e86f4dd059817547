"""Rates and phases of runs, by their folders; and two short ones made for it."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rft_fn.tools.page.recorded import Recorded, read_all
from rft_fn.tools.plan.planned_command import Planned, scores
from rft_fn.tools.plan.simulation import PHASES, Rates

__all__ = ["Measured", "measure", "phase_table", "rates"]

_ROWS = 256  # most responses of a step that is made to be measured
_STEPS = 6  # of such a run; the first one starts things up
_LEAST = 1e-3  # seconds of a checkpoint that are more than an empty phase
_OUTSIDE = ("evaluate", "record")  # phases that no plan counts


class Measured(NamedTuple):
    """What runs say about further ones."""

    rates: Rates
    prompt_tokens: float
    learned: float  # share of the rows with a gradient


def measure(planned: Planned, folder: Path) -> list[Path]:
    """Run the script twice for a few steps, with few responses and with more; return the folders.

    ValueError for samples of servers, and for a script that fails.
    """
    cfg = planned.config
    if planned.servers:
        raise ValueError(
            "measured: expected a run, as servers sample; rft launch the file with --steps 20, and give the "
            "run's folder"
        )
    folders = []
    for name, most in (("few", _ROWS // 4), ("more", _ROWS)):
        group = max(1, min(cfg.group, most // 2))
        prompts = max(1, min(cfg.prompts, most // group) // (2 if name == "few" else 1))
        given = {
            "prompts": prompts, "group": group, "steps": _STEPS, "eval_every": 10**9, "eval_prompts": 1,
            "save_every": 2, "tokens_every": 0, "rollouts_every": 0, "noise_every": 0, "out": folder / name,
            "ahead": 0, "partial": 0, "mismatch": "tis",
        }  # fmt: skip
        words = [word for key, x in given.items() for word in (f"--{key.replace('_', '-')}", str(x))]
        command = [sys.executable, "-m", "rft_fn", "run", str(planned.script), *planned.arguments, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
            raise ValueError(f"measured: expected a short run of {planned.script.stem} to end, got {last!r}")
        folders.append(folder / name)
    return folders


def phase_table(run: Recorded) -> dict[str, np.ndarray]:
    """Return the seconds [K - 1] of each phase in a run's steps but the first, `wall` and `engine` too.

    `other` is the rest, without evaluations and records of tokens. ValueError for a run of one step.
    """
    rows = run.timing[1:]
    if not rows:
        raise ValueError(f"measured: expected a run of at least 2 steps, got {run.folder}")

    def column(name: str) -> np.ndarray:
        return np.array([float(row.get(name) or 0.0) for row in rows])

    found = {name: column(f"phase/{name}") for name in PHASES}
    known = dict.fromkeys(name for row in rows for name in row if name.startswith("phase/"))
    outside = sum((column(f"phase/{name}") for name in _OUTSIDE), np.zeros(len(rows)))
    found["other"] = np.maximum(column("seconds") - sum(map(column, known), np.zeros(len(rows))), 0.0)
    found["wall"] = column("seconds") - outside
    found["engine"] = column("beside/engine") + (
        found["generate"] if not column("beside/engine").any() else 0
    )
    return found


def rates(folders: Sequence[str | Path]) -> Measured:
    """Return the rates of runs by one process: fits over all of their steps but the first.

    Runs of different sizes tell more: what is of a step or an update, and what of a row or a token. Where
    servers sample, what such a process waits for in `sync` is their load.
    """
    runs = read_all(folders)
    parts = [_facts(run) for run in runs]
    x = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    step, row = _fit(x["engine"], x["ticks"], x["of_engine"])
    update, token = _fit(x["train"], x["updates"], x["learned_tokens"])
    judge, judge_row = _fit(x["judge"], x["one"], x["rows"])
    other, other_row = _fit(x["other"], x["one"], x["rows"])
    if x["passes"].any():
        scoring, score = _fit(x["score"] / np.maximum(x["passes"], 1), x["passes"] > 0, x["read"])
    else:
        scoring, score = 0.0, token / 3
    saved = x["save"][x["save"] > _LEAST]
    sync = float(x["sync"].mean())
    served = any(_servers(run) for run in runs)
    found = Rates(
        step=step,
        row=row,
        token=token,
        score=score,
        scoring=scoring,
        update=update,
        judge=judge,
        judge_row=judge_row,
        push=0.0 if served else sync,
        load=sync if served else 0.0,
        other=other,
        other_row=other_row,
        save=float(saved.mean()) if len(saved) else 0.0,
        source=f"fits of {', '.join(run.name for run in runs)}",
    )
    return Measured(found, float(x["prompt"].mean()), float(x["learned"].mean()))


def _servers(run: Recorded) -> int:
    """Return how many servers sample; 0 where the run does."""
    return len(run.config.get("strategy.engine_servers") or ())


def _facts(run: Recorded) -> dict[str, np.ndarray]:
    """Return the seconds of the steps of a run, and what they are seconds of."""
    timing = phase_table(run)
    metrics = [row for row in run.metrics if "rollout/length_mean" in row][1:]
    if len(metrics) != len(timing["wall"]):
        raise ValueError(f"measured: expected a run that samples in each step, got {run.folder}")

    def column(name: str, rows: Sequence[Mapping[str, float | None]] = metrics) -> np.ndarray:
        found = [x for row in rows if (x := row.get(name)) is not None]
        if len(found) < len(rows):
            raise ValueError(
                f"measured: expected {name} in each step of {run.folder}, got it in {len(found)}"
            )
        return np.array(found, dtype=float)

    prompts, group = float(run.config["prompts"]), float(run.config["group"])
    rows = np.full(len(metrics), prompts * group)
    own = column("rollout/length_mean") * rows
    of_engine = own / max(_servers(run), 1)
    every = column("tokens_per_s", run.timing[1:]) * column("seconds", run.timing[1:])
    prompt = (every - own) / rows
    updates = np.full(len(metrics), float(run.config["epochs"]) * float(run.config["minibatches"]))
    learned = np.ones(len(metrics))  # where a script leaves no row out
    if "train/rows" in metrics[0]:
        learned = np.minimum(column("train/rows") * float(run.config["minibatches"]) / rows, 1.0)
    read = own + prompt * prompts
    batch = float(run.config["strategy.engine_batch"])
    return timing | {
        "one": np.ones(len(rows)),
        "rows": rows,
        "own": own,
        "prompt": prompt,
        "of_engine": of_engine,
        "ticks": np.maximum(column("rollout/length_max"), of_engine / batch),
        "updates": updates,
        "learned": learned,
        "read": read,
        "passes": np.full(len(metrics), scores(run.config)),
        "learned_tokens": read * learned * float(run.config["epochs"]),
    }


def _fit(y: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return (p, q), neither below 0, of y = p a + q b, by least squares of errors relative to the fit.

    Relative to y itself they would make numbers that vary too small: the short ones would count for more.
    """
    kept = y > 0
    if not kept.any():
        return 0.0, 0.0
    columns, y = np.stack([a, b], -1)[kept], y[kept]
    found, scale = np.zeros(2), y
    for _ in range(20):
        x, z = columns / scale[:, None], y / scale
        found = np.linalg.lstsq(x, z)[0]
        if found.min() < 0:
            i = int(found[0] < 0)
            found = np.zeros(2)
            found[i] = (x[:, i] @ z) / (x[:, i] @ x[:, i])
        fit = columns @ found
        scale = np.where(fit > 0, fit, y)
    return float(found[0]), float(found[1])
