"""A Gantt chart of the steps of a plan, and of those of a run below."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rft_fn.run import plot
from rft_fn.tools.plan.simulation import PHASES, Timeline

__all__ = ["draw"]

_SHOWN = 8  # engines, at most


def draw(t: Timeline, out: Path, *, measured: Mapping[str, np.ndarray] | None = None, steps: int = 3) -> None:
    """Draw steps from the second one on: predicted, and above each other the measured phases of a run.

    `measured` is a `phase_table`, whose first row is the run's second step.
    """
    engines = min(t.sampled.shape[1], _SHOWN)
    first = min(1, len(t.begin) - 1)
    last = min(first + steps, len(t.begin))
    parts = 1 if measured is None else 2
    fig, axes = plot.figure(parts, (9,), height=1.5 + 0.16 * engines)
    top = axes[0][0]
    zero, width = t.begin[first, 0], t.end[last - 1, -1] - t.begin[first, 0]
    for step in range(first, last):
        for phase, name in enumerate(PHASES):
            begin, end = t.begin[step, phase] - zero, t.end[step, phase] - zero
            if name != "generate":
                _bar(top, 0, begin, end, name)
        top.axvline(t.end[step, -1] - zero, color="black", lw=0.6, ls=":")
    for engine in range(engines):
        for (begin, end), of in zip(t.sampled[:, engine], t.step_of):
            begin, end = max(begin - zero, 0), min(end - zero, width)
            if end > begin:
                _bar(top, engine + 1, begin, end, "generate")
            if end - begin > width / 40:  # room for a number
                top.text(begin, engine + 1, f" {of + 1}", fontsize=7, va="center")
    _rows(top, ["trainer", *(f"engine {i}" for i in range(engines))], "predicted")
    if measured is not None:
        low = axes[1][0]
        at = 0.0
        for i in range(min(steps, len(measured["wall"]))):
            for name in PHASES:
                seconds = float(measured[name][i])
                _bar(low, 0, at, at + seconds, name)
                at += seconds
            low.axvline(at, color="black", lw=0.6, ls=":")
        _rows(low, ["trainer"], "measured: in generate the trainer waits")
        width = max(width, at)
        low.set_ylim(engines + 0.6, -0.6)
    for (ax,) in axes:
        ax.set_xlim(0, width)
    axes[-1][0].set_xlabel("seconds")
    names = [*PHASES]
    handles = [top.barh(0, 0, color=_color(name), label=name) for name in names]
    top.legend(handles, names, ncols=len(names), fontsize=7, frameon=False, loc="lower right",
               bbox_to_anchor=(1, 1.0), columnspacing=1, handlelength=1)  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    plot.save(fig, out)


def _color(name: str) -> str:
    return plot.phase_color(name)


def _bar(ax: Any, row: int, begin: float, end: float, name: str) -> None:
    ax.barh(row, end - begin, 0.8, left=begin, color=_color(name), lw=0)


def _rows(ax: Any, names: list[str], title: str) -> None:
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_title(title, fontsize=9, loc="left")
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.spines[["top", "right"]].set_visible(False)
