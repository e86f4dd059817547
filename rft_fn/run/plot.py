"""Pictures of a run: curves as a PNG and in the terminal, and the distribution of lengths."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["curve", "length_histogram", "phases", "read_metrics", "terminal_curve"]

_PANELS = (
    ("reward", ("reward/mean",)),
    ("evaluation", ("eval/mean",)),
    ("accuracy of pairs", ("eval/accuracy", "pairs/accuracy")),
    ("margin of pairs", ("eval/margin", "pairs/margin")),
    ("implicit reward", ("pairs/reward_chosen", "pairs/reward_rejected")),
    ("log-prob of a response [nats]", ("pairs/logp_chosen", "pairs/logp_rejected")),
    ("trainer - sampler log-prob [nats]", ("policy/logp_gap",)),
    ("entropy [nats]", ("policy/entropy",)),
    ("response length [tokens]", ("rollout/length_mean", "rollout/length_max")),
    ("gradient norm", ("grad/norm",)),
)
_LOSS = ("loss", ("eval/loss", "loss"))  # of runs without a reward
_SHARES = ("reward", "evaluation", "accuracy of pairs")  # panels from 0 to 1
_PHASE = "phase/"  # how timing.jsonl names the seconds of a phase
_BLUE, _GREY = "#2a5db0", "#9aa4b2"


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _series(rows: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]]:
    pairs = [(r["step"], r[key]) for r in rows if key in r]
    return [s for s, _ in pairs], [v for _, v in pairs]


def _smooth(y: Sequence[float], span: int) -> list[float]:
    return [sum(y[max(0, i - span + 1) : i + 1]) / (i + 1 - max(0, i - span + 1)) for i in range(len(y))]


def _panels(rows: Sequence[Mapping[str, float]]) -> list[tuple[str, list[str]]]:
    """(title, names of curves) of what a run has; the loss where it has no reward."""
    rewarded = any("reward/mean" in row for row in rows)
    wanted = _PANELS if rewarded else (_LOSS, *_PANELS)
    found = [(title, [key for key in keys if _series(rows, key)[0]]) for title, keys in wanted]
    return [(title, keys) for title, keys in found if keys]


def _label(key: str) -> str:
    """What a curve is beside others in its panel: mean, max, chosen; held out or training."""
    if "_" in key:
        return key.split("_")[-1]
    return "held out" if key.startswith("eval/") else "training"


def _panel(ax: Any, rows: Sequence[Mapping[str, float]], title: str, keys: Sequence[str]) -> None:
    for color, key in zip((_BLUE, _GREY), keys):
        x, y = _series(rows, key)
        if key == "reward/mean" and len(y) > 20:
            ax.plot(x, y, color=_GREY, lw=0.8, alpha=0.7)
            y = _smooth(y, max(len(y) // 25, 2))
        ax.plot(x, y, color=color, lw=1.6, marker="o" if len(x) < 20 else None, ms=3, label=_label(key))
    if len(keys) > 1:
        ax.legend(frameon=False, fontsize=8)
    if title in _SHARES:
        ax.set_ylim(-0.03, max(1.05, ax.get_ylim()[1]))
    ax.set_title(title, fontsize=10, loc="left")
    ax.grid(alpha=0.25, lw=0.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("step", fontsize=8)
    ax.tick_params(labelsize=8)


def curve(metrics: str | Path, out: str | Path, *, title: str = "") -> Path:
    """Draw the run behind a metrics.jsonl: reward or loss, evaluation, pairs, log-prob gap, entropy, lengths,
    gradient norm, as far as it has them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(metrics)
    panels = _panels(rows)
    lines = -(-len(panels) // 3)
    fig, axes = plt.subplots(
        lines, min(len(panels), 3), figsize=(4 * min(len(panels), 3), 2.7 * lines), squeeze=False
    )
    for ax, (name, keys) in zip(axes.flat, panels):
        _panel(ax, rows, name, keys)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    fig.tight_layout()
    fig.savefig(out, dpi=130)
    plt.close(fig)
    return Path(out)


def length_histogram(lengths: Sequence[int], out: str | Path) -> Path:
    """Histogram of response lengths [tokens], with the median and the 90th percentile marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ranked = sorted(lengths)
    fig, ax = plt.subplots(figsize=(5, 3))
    ax.hist(ranked, bins=min(40, max(len(set(ranked)), 1)), color=_BLUE)
    for share in (0.5, 0.9):
        at = ranked[min(int(share * len(ranked)), len(ranked) - 1)]
        ax.axvline(at, color="black", lw=0.8, ls=":")
        ax.text(at, ax.get_ylim()[1], f" p{share:.0%}"[:-1], fontsize=8, va="top")
    ax.set_xlabel("response length [tokens]")
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(out, dpi=130)
    plt.close(fig)
    return Path(out)


def phases(timing: str | Path, out: str | Path, *, bars: int = 60) -> Path | None:
    """Draw where the seconds of a run went: bars over its steps, stacked by phase.

    A run of more than `bars` steps has the mean of several steps in a bar. None for a run without phases.
    """
    rows = read_metrics(timing)
    names = list(dict.fromkeys(k for row in rows for k in row if k.startswith(_PHASE)))
    if not names:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = -(-len(rows) // bars)
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
    ax.xaxis.get_major_locator().set_params(integer=True)
    # the legend lists the phases as they are stacked, from the top
    handles, labels = ax.get_legend_handles_labels()
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    ax.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, **beside)
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(out, dpi=130)
    plt.close(fig)
    return Path(out)


def terminal_curve(y: Sequence[float], *, title: str, width: int = 72, height: int = 12) -> str:
    """A curve as text, for the end of a run."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot(list(range(len(y))), list(y), marker="braille")
    plotext.title(title)
    plotext.xlabel("step")
    return plotext.build()
