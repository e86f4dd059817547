"""Plots of the metrics, lengths and times of a run: PNG files, and a curve in the terminal."""

import math
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import bfloat16

from rft_fn import border
from rft_fn.collect import gap_limit, noise_floor
from rft_fn.precision import gap_by_rounding
from rft_fn.reward.from_spec import HELD
from rft_fn.run import progress
from rft_fn.types import Sampling

__all__ = [
    "curve", "figure", "length_histogram", "phase_color", "phase_names", "phases", "read_metrics",
    "reliability", "running_mean", "save", "terminal_curve", "unit",
]  # fmt: skip


class _Panel(NamedTuple):
    """A panel of the picture of curves."""

    title: str
    unit: str
    keys: Sequence[str]  # of its curves


_GAP = "policy/logp_gap"
_KL = _Panel("KL to the reference", "nats per token", ("policy/kl_ref", "kl/ref"))
_PANELS = (
    _Panel("reward", "mean reward", ("reward/mean",)),
    _Panel("evaluation", "mean reward", ("eval/mean",)),
    _Panel("accuracy of pairs", "share", ("eval/accuracy", "pairs/accuracy", "lists/accuracy")),
    _Panel("margin of pairs", "reward", ("eval/margin", "pairs/margin", "lists/margin")),
    _Panel("correct labels", "share", ("eval/correct", "points/correct", "steps/correct")),
    _Panel("squared error", "score squared", ("eval/mse", "points/mse", "steps/mse")),
    _Panel("calibration error", "probability", ("eval/ece",)),
    _Panel("reward of pairs", "reward", ("pairs/reward_chosen", "pairs/reward_rejected")),
    _Panel("log-prob of a response", "nats", ("pairs/logp_chosen", "pairs/logp_rejected")),
    _Panel("trainer - sampler log-prob", "nats per token", (_GAP,)),
    _KL,
    _Panel("KL to the teacher", "nats per token", ("distill/divergence", "distill/kl_sampled")),
    _Panel("same likeliest word as the teacher", "share of tokens", ("distill/agreement",)),
    _Panel("entropy", "nats per token", ("policy/entropy",)),
    _Panel("response length", "tokens", ("rollout/length_mean", "rollout/length_max")),
    _Panel("gradient norm", "norm", ("grad/norm",)),
)
_LOSS = _Panel("loss", "mean loss", ("eval/loss", "loss"))  # of runs without a reward
_SHARES = ("accuracy of pairs", "correct labels", "same likeliest word as the teacher")  # panels from 0 to 1
_PHASE = "phase/"  # before the name of a phase in timing.jsonl

# a phase has the same colour in every picture of every run; from the bottom of a bar to its top
_PHASE_COLORS = {
    "generate": "#2b8a57",
    "judge": "#b8860b",
    "score": "#8e44ad",
    "teach": "#0b7285",
    "train": "#1f6fb2",
    "sync": "#66a80f",
    "evaluate": "#d65a14",
    "record": "#d6a2c2",
    "save": "#c2255c",
    "other": "#adb5bd",  # of a step, outside of all phases
}
_OWN_COLORS = ("#5c4b3a", "#3b3b98", "#00a8a8", "#e17a9c", "#7a8b00", "#444444")  # of names that scripts give
_COLUMNS = 3  # panels side by side
_BARS = 40  # at most, of a histogram
_SHORT = 20  # steps: shorter curves have markers, longer ones of rewards a running mean
# points of the text of curves: three panels of 4 inches are shown 750 pixels wide, as 9 and 10 pixels
_SMALL, _LARGE = 11, 12.5
_TICKS = (1, 2, 2.5, 5, 10)  # steps between the numbers of an axis, at any power of ten
_BLUE = "#2a5db0"
_GREY = "#9aa4b2"
_RED = "#c0392b"


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.jsonl."""
    return border.json_rows(Path(path))


def unit(key: str) -> str:
    """Return the unit of a metric that the picture of curves has, or an empty text."""
    return next((panel.unit for panel in (*_PANELS, _LOSS) if key in panel.keys), "")


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


def curve(
    metrics: str | Path, out: str | Path, *, title: str = "", config: Mapping[str, Any] | None = None
) -> Path:
    """Draw the curves of a metrics.jsonl over its steps from 1, one panel for each quantity that it has.

    They are reward or loss, evaluation, the parts of a reward that has several, pairs, log-prob gap, KL,
    entropy, lengths and gradient norm. With the `config` of the run the log-prob gap has its limit drawn.
    """
    plt = _pyplot()
    rows = read_metrics(metrics)
    panels = _panels(rows)
    height = max(math.ceil(len(panels) / _COLUMNS), 1)  # an empty picture of a run without a number
    width = max(min(len(panels), _COLUMNS), 1)
    fig, axes = plt.subplots(height, width, figsize=(4 * width, 2.9 * height), squeeze=False)
    _space(fig, height, width)
    for ax, panel in zip(axes.flat, panels):
        _panel(ax, rows, panel.title, panel.keys, unit=panel.unit)
        if _GAP in panel.keys:
            _draw_limit(ax, rows, config or {})
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    fig.suptitle(title, fontsize=_LARGE, x=0.01, ha="left")
    return _write(fig, out)


def _space(fig: Any, rows: int, columns: int) -> None:
    """Leave room around each panel for its title, its numbers and their units.

    Their sizes are known. To measure them would take as long as to draw the figure.
    """
    wide, high = fig.get_size_inches()
    left, right, top, bottom = 1.05, 0.14, 0.68, 0.62  # [inches]
    across, down = left + right, 0.98  # between two panels
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


def _panels(rows: Sequence[Mapping[str, Any]]) -> list[_Panel]:
    """Return the panels with values; the loss is among them if there is no reward."""
    wanted = _PANELS if any("reward/mean" in row for row in rows) else (_LOSS, *_PANELS)
    wanted = (*wanted[:2], *_held(rows), *_parts(rows), *wanted[2:])
    panels = [panel._replace(keys=[key for key in panel.keys if _numbers(rows, key)]) for panel in wanted]
    if not any(x for key in _KL.keys for x in _numbers(rows, key)):  # not measured
        panels = [panel for panel in panels if panel.title != _KL.title]
    return [panel for panel in panels if panel.keys]


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the values of a metric that are numbers: neither missing nor NaN."""
    return [row[key] for row in rows if row.get(key) is not None and math.isfinite(row[key])]


def _held(rows: Sequence[Mapping[str, Any]]) -> list[_Panel]:
    """Return a panel for each held reward, with the one that is learned."""
    names = dict.fromkeys(
        key for row in rows for key in row if key.startswith("reward/") and key.endswith(HELD)
    )
    return [_Panel("learned and held reward", "mean reward", ("reward/mean", name)) for name in names]


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[_Panel]:
    """Return panels of the parts that training and evaluation both have; none if there is only one."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            name = key.removeprefix("eval/")
            if name != key and name != "mean" and "/" not in name and f"reward/{name}" in row:
                names[name] = None
    if len(names) < 2:
        return []
    unit = "mean of responses"
    return [_Panel(f"reward: {name}", unit, (f"eval/{name}", f"reward/{name}")) for name in names]


def _panel(
    ax: Any, rows: Sequence[Mapping[str, Any]], title: str, keys: Sequence[str], *, unit: str = ""
) -> None:
    for color, key in zip((_BLUE, _GREY), keys):
        x, y = _series(rows, key)
        # rewards are noisy: the line is a running mean over the raw values
        if key == "reward/mean" and len(y) > _SHORT:
            ax.plot(x, y, color=_GREY, lw=0.8, alpha=0.7)
            y = running_mean(y, max(len(y) // 25, 2))
        marker = "o" if len(x) <= _SHORT else None
        ax.plot(x, y, color=color, lw=1.6, marker=marker, ms=3, label=_label(key))

    if len(keys) > 1:
        ax.legend(frameon=False, fontsize=_SMALL)
    if title in _SHARES:
        low, high = ax.get_ylim()
        ax.set_ylim(min(-0.03, low), max(1.05, high))
    ax.set_title(title, fontsize=_LARGE, loc="left", y=1.0)  # without y matplotlib looks for one
    ax.grid(alpha=0.25, lw=0.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("step", fontsize=_SMALL)
    ax.set_ylabel(unit, fontsize=_SMALL)
    first, last = rows[0]["step"] + 1, rows[-1]["step"] + 1  # the same for all panels of a run
    margin = 0.05 * max(last - first, 1)
    ax.set_xlim(max(first - margin, 0.5), last + margin)  # there is no step 0
    _whole_numbers(ax.xaxis)
    ax.yaxis.set_major_formatter("{x:.4g}")  # no power of ten above the panel, where the title is
    ax.tick_params(labelsize=_SMALL)


def _whole_numbers(axis: Any) -> None:
    """Number an axis only at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=_TICKS, integer=True, min_n_ticks=1))


def _draw_limit(ax: Any, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> None:
    """Give the panel of the log-prob gap a logarithmic axis, and draw the gap that would end the run."""
    limit, steps = _gap_limit(rows, config)
    gaps = [x for x in _numbers(rows, _GAP) if x > 0]
    if steps:
        marker = "_" if len(steps) == 1 else None
        y = [limit if row["step"] + 1 in steps else math.nan for row in rows]
        x = [row["step"] + 1 for row in rows]
        ax.plot(x, y, color=_RED, lw=1, ls="--", marker=marker, label=f"limit {limit:.2g}")
        ax.legend(frameon=False, fontsize=_SMALL)
        gaps.append(limit)
    if gaps:  # whole powers of ten, so that there are numbers at the axis
        low, high = math.log10(min(gaps)), math.log10(max(gaps))
        ax.set_yscale("log")
        ax.set_ylim(10 ** math.floor(low), 10 ** (math.floor(high) + 1))
        ax.yaxis.set_major_formatter("{x:.4g}")
        ax.yaxis.set_minor_formatter("")


def _gap_limit(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> tuple[float, set[int]]:
    """Return the limit of the log-prob gap, and the steps that it applies to, as `run.check_gap` has them."""
    corrected = config.get("mismatch") not in (None, "none")
    stale = bool(corrected or config.get("ahead") or config.get("partial"))  # such rows have no limit
    checked = [
        row
        for row in rows
        if row.get(_GAP) is not None and not (stale and row.get("rollout/staleness_max", 0) > 0)
    ]
    if not checked or not {"max_gap", "gap_factor"} <= set(config):
        return math.inf, set()
    floor = noise_floor(checked[0][_GAP], Sampling(top_p=config.get("top_p", 1.0)))
    most = config["max_gap"]
    if most is None:  # by the type, which the noise shows: that of float32 is below 1e-4
        most = gap_by_rounding([bfloat16] if floor > 3e-4 else [])
    limit = gap_limit(most, config["gap_factor"], floor)
    return limit, {row["step"] + 1 for row in checked}


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return (steps from 1, values) of the rows that have `key`; a value that is no number is NaN."""
    having = [row for row in rows if key in row]
    values = [math.nan if row[key] is None else row[key] for row in having]
    return [row["step"] + 1 for row in having], values


def running_mean(y: Sequence[float], span: int) -> list[float]:
    """Return the mean of each value and the values before it, `span` in all, without NaN."""
    values = np.asarray(y, np.float64)
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.where(known, values, 0.0).cumsum()])
    count = np.concatenate([[0], known.cumsum()])
    end = np.arange(1, len(values) + 1)
    first = np.maximum(end - span, 0)
    found = count[end] - count[first]
    mean = (total[end] - total[first]) / np.maximum(found, 1)
    return np.where(found > 0, mean, np.nan).tolist()


def _label(key: str) -> str:
    """Return the name of a curve in its panel: mean, max, chosen; held out or training."""
    if key.startswith("eval/"):
        return "held out"
    if "_" in key and not key.startswith("reward/"):
        return key.split("_")[-1]
    return "training"


def length_histogram(lengths: Sequence[int], out: str | Path) -> Path:
    """Draw a histogram of response lengths [tokens], with the median and the 90th percentile marked.

    A bar holds the same number of whole lengths as the others, one where there are few.
    """
    plt = _pyplot()
    ranked = sorted(lengths)
    fig, ax = plt.subplots(figsize=(5, 3))
    width = -(-(ranked[-1] - ranked[0] + 1) // _BARS)
    edges = np.arange(ranked[0], ranked[-1] + width + 1, width) - 0.5
    ax.hist(ranked, bins=edges, rwidth=0.9, color=_BLUE)
    for percent, side in ((50, "right"), (90, "left")):  # to the sides of their lines, which may be one
        at = ranked[min(percent * len(ranked) // 100, len(ranked) - 1)]
        ax.axvline(at, color="black", lw=0.8, ls=":")
        ax.text(at, 1, f" p{percent} ", fontsize=8, ha=side, va="bottom", transform=ax.get_xaxis_transform())
    ax.set_xlabel("response length [tokens]")
    ax.set_ylabel("responses")
    _whole_numbers(ax.xaxis)
    _whole_numbers(ax.yaxis)
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


def phase_color(name: str) -> str:
    """Return the colour of a phase, which depends on its name alone."""
    own = _OWN_COLORS[zlib.crc32(name.encode("utf-8", "replace")) % len(_OWN_COLORS)]
    return _PHASE_COLORS.get(name, own)


def phase_names(timing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the phases of some rows of timing.jsonl, in the order in which they are drawn."""
    found = dict.fromkeys(k.removeprefix(_PHASE) for row in timing for k in row if k.startswith(_PHASE))
    return [name for name in _PHASE_COLORS if name in found] + [x for x in found if x not in _PHASE_COLORS]


def phases(timing: str | Path, out: str | Path, *, bars: int = 60) -> Path | None:
    """Draw where the seconds of a run went: bars over its steps, stacked by phase, and the idle share.

    In a run of more than `bars` steps, a bar is the mean of several steps. Returns None for a run without
    phases.
    """
    rows = read_metrics(timing)
    names = phase_names(rows)
    if not names:
        return None
    plt = _pyplot()

    # the steps of each bar, and the phases on top of each other
    size = math.ceil(len(rows) / bars)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    middle = [(part[0]["step"] + part[-1]["step"]) / 2 + 1 for part in parts]
    fig, ax = plt.subplots(figsize=(8, 3.2))
    floor = [0.0] * len(parts)
    for name in names:
        seconds = [sum(row.get(_PHASE + name, 0.0) for row in part) / len(part) for part in parts]
        ax.bar(middle, seconds, width=0.9 * size, bottom=floor, color=phase_color(name), label=name)
        floor = [a + b for a, b in zip(floor, seconds)]
    share = [
        sum(progress.idle(row) * row["seconds"] for row in part)
        / max(sum(row["seconds"] for row in part), 1e-9)
        for part in parts
    ]
    ax.set(xlabel="step", ylabel=f"seconds per step, of them {sum(share) / len(share):.0%} idle")
    right = ax.twinx()
    right.plot(middle, share, color="black", lw=1, marker=".", ms=3, label="idle")
    right.set(ylim=(0, 1), ylabel="idle share (line)")
    right.spines["top"].set_visible(False)
    ax.set_xlim(left=max(ax.get_xlim()[0], 0.5))  # there is no step 0
    _whole_numbers(ax.xaxis)

    # the legend lists the phases as they are stacked, from the top
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.1, 0.5)
    )
    ax.spines[["top", "right"]].set_visible(False)
    return save(fig, out)


def terminal_curve(y: Sequence[float], *, title: str, width: int = 72, height: int = 12) -> str:
    """Return a curve over steps from 1 as plain text, for the end of a run.

    It is at most as wide as the terminal, and has no escapes.
    """
    import plotext

    points = [(i, x) for i, x in enumerate(y, 1) if math.isfinite(x)]
    if not points:
        return f"{title}: no number in {len(y)} steps"
    width = min(width, shutil.get_terminal_size().columns)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot([i for i, _ in points], [x for _, x in points], marker="braille")
    plotext.xticks(_round_steps(points[0][0], points[-1][0], most=width // 12))
    plotext.title(title)
    plotext.xlabel("step")
    return "\n".join(line.rstrip() for line in plotext.uncolorize(plotext.build()).splitlines())


def _round_steps(first: int, last: int, *, most: int) -> list[int]:
    """Return `first`, and at most `most` steps after it that are multiples of 1, 2 or 5 x a power of ten."""
    sizes = (k * 10**power for power in range(12) for k in (1, 2, 5))
    size = next(size for size in sizes if (last - first) // size <= most)
    return [first, *(step for step in range(0, last + 1, size) if step > first)]
