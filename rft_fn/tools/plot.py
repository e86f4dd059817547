"""Pictures of a run: curves as a PNG and in the terminal, and the distribution of lengths."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "curve", "figure", "length_histogram", "phases", "read_metrics", "reliability", "save",
    "terminal_curve",
]  # fmt: skip


_PANELS = (
    ("reward", ("reward/mean",)),
    ("evaluation", ("eval/mean",)),
    ("accuracy of pairs", ("eval/accuracy", "pairs/accuracy", "lists/accuracy")),
    ("margin of pairs", ("eval/margin", "pairs/margin", "lists/margin")),
    ("correct labels", ("eval/correct", "points/correct", "steps/correct")),
    ("squared error", ("eval/mse", "points/mse", "steps/mse")),
    ("calibration error", ("eval/ece",)),
    ("reward of pairs", ("pairs/reward_chosen", "pairs/reward_rejected")),
    ("log-prob of a response [nats]", ("pairs/logp_chosen", "pairs/logp_rejected")),
    ("trainer - sampler log-prob [nats]", ("policy/logp_gap",)),
    ("entropy [nats]", ("policy/entropy",)),
    ("response length [tokens]", ("rollout/length_mean", "rollout/length_max")),
    ("gradient norm", ("grad/norm",)),
)
_LOSS = ("loss", ("eval/loss", "loss"))  # of runs without a reward
_SHARES = ("reward", "evaluation", "accuracy of pairs", "correct labels")  # panels from 0 to 1
_PHASE = "phase/"  # before the name of a phase in timing.jsonl
_COLUMNS = 3  # panels side by side
_SHORT = 20  # steps: shorter curves have markers, longer ones of rewards a running mean
_BLUE = "#2a5db0"
_GREY = "#9aa4b2"


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.jsonl."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw only to files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def figure(rows: int, widths: Sequence[float], *, height: float) -> tuple[Any, Any]:
    """Return (figure, axes [rows][columns]) with columns of these widths, rows of a height [inches]."""
    size = sum(widths), height * rows
    return _pyplot().subplots(rows, len(widths), figsize=size, width_ratios=widths, squeeze=False)


def save(fig: Any, out: str | Path) -> Path:
    """Write a figure as a PNG, and free it."""
    from matplotlib.layout_engine import TightLayoutEngine

    # fig.tight_layout() would set an engine that makes savefig draw everything twice
    TightLayoutEngine().execute(fig)
    return _write(fig, out)


def _write(fig: Any, out: str | Path) -> Path:
    """Write a figure without a new layout, and free it."""
    fig.savefig(out, dpi=130)
    _pyplot().close(fig)
    return Path(out)


# ---------------------------------------------------------------------------------------------- curves


def curve(metrics: str | Path, out: str | Path, *, title: str = "") -> Path:
    """Draw the curves of a metrics.jsonl, one panel for each quantity that it has.

    They are reward or loss, evaluation, the parts of a reward that has several, pairs, log-prob gap, entropy,
    lengths and gradient norm.
    """
    plt = _pyplot()
    rows = read_metrics(metrics)
    panels = _panels(rows)
    height = math.ceil(len(panels) / _COLUMNS)
    width = min(len(panels), _COLUMNS)
    fig, axes = plt.subplots(height, width, figsize=(4 * width, 2.7 * height), squeeze=False)
    _space(fig, height, width)
    for ax, (name, keys) in zip(axes.flat, panels):
        _panel(ax, rows, name, keys)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    return _write(fig, out)


def _space(fig: Any, rows: int, columns: int) -> None:
    """Leave room around each panel for its title and its numbers.

    Their sizes are known. To measure them would take as long as to draw the figure.
    """
    wide, high = fig.get_size_inches()
    left, right, top, bottom = 0.8, 0.12, 0.62, 0.5  # [inches]
    across, down = left + right, 0.8  # between two panels
    panel_width = (wide - columns * across) / columns
    panel_height = (high - top - bottom - (rows - 1) * down) / rows
    fig.subplots_adjust(
        left=left / wide,
        right=1 - right / wide,
        top=1 - top / high,
        bottom=bottom / high,
        wspace=across / panel_width,
        hspace=down / panel_height,
    )


def _panels(rows: Sequence[Mapping[str, float]]) -> list[tuple[str, list[str]]]:
    """Return (title, names of curves) of panels with values; with the loss if there is no reward."""
    wanted = _PANELS if any("reward/mean" in row for row in rows) else (_LOSS, *_PANELS)
    wanted = (*wanted[:2], *_parts(rows), *wanted[2:])
    found = [(title, [key for key in keys if _series(rows, key)[0]]) for title, keys in wanted]
    return [(title, keys) for title, keys in found if keys]


def _parts(rows: Sequence[Mapping[str, float]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return panels of the parts that training and evaluation both have; none if there is only one."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            name = key.removeprefix("eval/")
            if name != key and name != "mean" and "/" not in name and f"reward/{name}" in row:
                names[name] = None
    if len(names) < 2:
        return []
    return [(f"reward: {name}", (f"eval/{name}", f"reward/{name}")) for name in names]


def _panel(ax: Any, rows: Sequence[Mapping[str, float]], title: str, keys: Sequence[str]) -> None:
    for color, key in zip((_BLUE, _GREY), keys):
        x, y = _series(rows, key)
        # rewards are noisy: the line is a running mean over the raw values
        if key == "reward/mean" and len(y) > _SHORT:
            ax.plot(x, y, color=_GREY, lw=0.8, alpha=0.7)
            y = _running_mean(y, max(len(y) // 25, 2))
        marker = "o" if len(x) < _SHORT else None
        ax.plot(x, y, color=color, lw=1.6, marker=marker, ms=3, label=_label(key))

    if len(keys) > 1:
        ax.legend(frameon=False, fontsize=8)
    if title in _SHARES:
        low, high = ax.get_ylim()
        ax.set_ylim(min(-0.03, low), max(1.05, high))
    ax.set_title(title, fontsize=10, loc="left", y=1.0)  # without y matplotlib looks for one
    ax.grid(alpha=0.25, lw=0.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("step", fontsize=8)
    ax.yaxis.set_major_formatter("{x:.4g}")  # no power of ten above the panel, where the title is
    ax.tick_params(labelsize=8)


def _series(rows: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]]:
    """Return (steps, values) of the rows that have `key`."""
    having = [row for row in rows if key in row]
    return [row["step"] for row in having], [row[key] for row in having]


def _running_mean(y: Sequence[float], span: int) -> list[float]:
    """Return the mean of each value and the values before it, `span` in all."""
    out = []
    for i in range(len(y)):
        window = y[max(0, i - span + 1) : i + 1]
        out.append(sum(window) / len(window))
    return out


def _label(key: str) -> str:
    """Return the name of a curve in its panel: mean, max, chosen; held out or training."""
    if key.startswith("eval/"):
        return "held out"
    if "_" in key and not key.startswith("reward/"):
        return key.split("_")[-1]
    return "training"


# ---------------------------------------------------------------------------------------------- others


def length_histogram(lengths: Sequence[int], out: str | Path) -> Path:
    """Draw a histogram of response lengths [tokens], with the median and the 90th percentile marked."""
    plt = _pyplot()
    ranked = sorted(lengths)
    fig, ax = plt.subplots(figsize=(5, 3))
    ax.hist(ranked, bins=min(40, max(len(set(ranked)), 1)), color=_BLUE)
    for percent, side in ((50, "right"), (90, "left")):  # to the sides of their lines, which may be one
        at = ranked[min(percent * len(ranked) // 100, len(ranked) - 1)]
        ax.axvline(at, color="black", lw=0.8, ls=":")
        ax.text(at, 1, f" p{percent} ", fontsize=8, ha=side, va="bottom", transform=ax.get_xaxis_transform())
    ax.set_xlabel("response length [tokens]")
    ax.spines[["top", "right"]].set_visible(False)
    return save(fig, out)


def reliability(
    bins: Sequence[tuple[float, float, float]], out: str | Path, *, ece: float, title: str = ""
) -> Path:
    """Draw how often predictions come true: the observed share over the predicted probability.

    `bins` come from `metric.reliability`: (predictions, their mean probability, the share that came true).
    A calibrated model lies on the diagonal. `ece` is the expected calibration error, the mean distance from
    the diagonal, and is written in the title.
    """
    fig, axes = figure(2, (4.6,), height=2.8)
    ax, below = axes[0][0], axes[1][0]
    predicted = [p for _, p, _ in bins]
    ax.plot((0, 1), (0, 1), color=_GREY, lw=0.9, ls="--", label="calibrated")
    ax.plot(predicted, [share for *_, share in bins], color=_BLUE, lw=1.4, marker="o", ms=4, label="model")
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), ylabel="observed share")
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    ax.set_title(f"{title}  ECE {ece:.3f}".strip(), fontsize=10, loc="left")

    # the number of predictions of each bin is written on its bar
    counts = [int(count) for count, *_ in bins]
    bars = below.bar(predicted, counts, width=0.05, color=_BLUE, alpha=0.6)
    below.bar_label(bars, fontsize=7, padding=1)
    below.set(xlim=(-0.03, 1.03), ylim=(0, 1.2 * max(counts, default=1)))
    below.set(xlabel="predicted probability", ylabel="predictions")
    for each in (ax, below):
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25, lw=0.5)
    return save(fig, out)


def phases(timing: str | Path, out: str | Path, *, bars: int = 60) -> Path | None:
    """Draw where the seconds of a run went: bars over its steps, stacked by phase.

    In a run of more than `bars` steps, a bar is the mean of several steps. Returns None for a run without
    phases.
    """
    rows = read_metrics(timing)
    names = list(dict.fromkeys(k for row in rows for k in row if k.startswith(_PHASE)))
    if not names:
        return None
    plt = _pyplot()
    from matplotlib.ticker import MaxNLocator

    # the steps of each bar, and the phases on top of each other
    size = math.ceil(len(rows) / bars)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    middle = [(part[0]["step"] + part[-1]["step"]) / 2 for part in parts]
    fig, ax = plt.subplots(figsize=(8, 3.2))
    floor = [0.0] * len(parts)
    for i, name in enumerate(names):
        seconds = [sum(row.get(name, 0.0) for row in part) / len(part) for part in parts]
        label = name.removeprefix(_PHASE)
        ax.bar(middle, seconds, width=0.9 * size, bottom=floor, color=f"C{i}", label=label)
        floor = [a + b for a, b in zip(floor, seconds)]
    ax.set(xlabel="step", ylabel="seconds per step")
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))

    # the legend lists the phases as they are stacked, from the top
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    ax.spines[["top", "right"]].set_visible(False)
    return save(fig, out)


def terminal_curve(y: Sequence[float], *, title: str, width: int = 72, height: int = 12) -> str:
    """Return a curve as text, for the end of a run."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot(list(range(len(y))), list(y), marker="braille")
    plotext.title(title)
    plotext.xlabel("step")
    return plotext.build()
