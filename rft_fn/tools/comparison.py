"""What a comparison of estimators shows: a table, a file of numbers, and a picture of why rows differ."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_fn.algorithm import get_algorithm
from rft_fn.analysis import loss_slopes
from rft_fn.model.load import read_vocabulary
from rft_fn.run import options, plot
from rft_fn.run.earlier_run import last_model
from rft_fn.run.files import jsonable, write_whole
from rft_fn.run.rollout_files import read_rollout
from rft_fn.types import Experience, Rollout, Sampling

__all__ = ["describe", "draw", "evidence", "recorded", "show", "write"]

_POINTS = 400  # most tokens of a row in the picture


def recorded(file: str, rows: Sequence[str], model: str, wanted: options.Sampling) -> tuple[Rollout, Tensor]:
    """Return the responses of a run's step and their rewards [N, G], to compare rows on them.

    ValueError if they were drawn otherwise than `wanted`, or if a row asks for others.
    """
    for name in rows:
        if ":" not in name and get_algorithm(name).greedy:
            raise ValueError(f"rollouts: expected none with {name}, which asks for greedy answers")
    rollout, reward = read_rollout(file, vocabulary=read_vocabulary(last_model(model)))
    drawn = rollout.sampling or Sampling()
    for name in ("temperature", "top_p", "max_new"):
        if (own := getattr(wanted, name)) != getattr(drawn, name):
            raise ValueError(f"{name}: expected {getattr(drawn, name)}, as of {file}, got {own}")
    return rollout, reward


def describe(rollout: Rollout, reward: Tensor, logp: Tensor) -> dict[str, Any]:
    """Return what a buffer is: its size, its rewards [N, G], and how far the policy is from its samples."""
    gap = (logp - rollout.logp)[rollout.mask].double()
    return {
        "prompts": len(reward),
        "responses": reward.numel(),
        "tokens": int(rollout.mask.sum()),
        "length_mean": float(rollout.mask.sum(-1).double().mean()),
        "truncated": float(rollout.truncated.double().mean()),
        "reward_mean": float(reward.double().mean()),
        "flat_groups": float((reward.amax(-1) == reward.amin(-1)).double().mean()),
        "log_ratio_std": float(gap.std()),
        "log_ratio_max": float(gap.abs().max()),
    }


def evidence(buffers: Mapping[str, tuple[Experience, Tensor]], logp: Tensor) -> dict[str, Any]:
    """Return why rows differ: the push of responses by their length, and what a token's ratio becomes."""
    found: dict[str, Any] = {}
    for name, (exp, slope) in buffers.items():
        length = exp.mask.sum(-1)
        push = slope.double().abs().sum(-1)
        sizes = length.unique().tolist()
        share = [float(push[length == size].mean() / push.mean().clamp(min=1e-300)) for size in sizes]
        ratio, gain = loss_slopes.gains(exp, slope, logp)
        order = ratio.argsort()[:: max(len(ratio) // _POINTS, 1)]
        found[name] = {
            "length": sizes,
            "push": share,
            "ratio": [round(x, 5) for x in ratio[order].exp().tolist()],
            "gain": [round(x, 5) for x in gain[order].tolist()],
        }
    return found


def write(found: Mapping[str, Any], folder: Path, *, rank: int = 0) -> None:
    """Write estimators.json and estimators.png into a folder, and print the table, on rank 0."""
    if rank:
        return
    plain: dict[str, Any] = {name: jsonable(x) for name, x in found.items()}
    rows = found["rows"].items()
    plain["rows"] = {name: {k: x if math.isfinite(x) else None for k, x in row.items()} for name, row in rows}
    write_whole(folder / "estimators.json", json.dumps(plain, indent=1) + "\n")
    draw(plain, folder / "estimators.png")
    show(found)
    print(f"{folder / 'estimators.png'}")


def show(found: Mapping[str, Any]) -> None:
    """Print a comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    of, ref = found["buffer"], found["reference"]
    print(
        f"buffer: {of['prompts']} prompts, {of['responses']} responses of {of['length_mean']:.1f} tokens, "
        f"reward {of['reward_mean']:.3f}, {of['flat_groups']:.0%} of groups without signal\n"
        f"policy: {of['drift']} updates away from the samples, log-ratios of std {of['log_ratio_std']:.3f}, "
        f"at most {of['log_ratio_max']:.2f}\n"
        f"reference: {ref['what']}; the true gradient has a cosine of {ref['ceiling']:.3f} with it"
        + ("" if ref["ceiling"] else ", as no signal was seen: take more --reference-prompts")
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("row")
    for head in _COLUMNS:
        table.add_column(head, justify="right")
    for name, row in found["rows"].items():
        table.add_row(name, *(text(row) for text in _COLUMNS.values()))
    width = None if Console().is_terminal else 200
    Console(width=width).print(table)


def _with_error(name: str) -> Any:
    def text(row: Mapping[str, float]) -> str:
        return f"{row[name]:.3f} ± {row[f'{name}_se']:.3f}" if math.isfinite(row[f"{name}_se"]) else "-"

    return text


def _number(name: str, form: str) -> Any:
    return lambda row: format(row[name], form) if math.isfinite(row[name]) else "-"


_COLUMNS = {
    "cosine": _with_error("cosine"),
    "vs first": _with_error("minus_first"),
    "direction": _with_error("direction"),
    "with first": _number("with_first", ".3f"),
    "norm": _number("norm", ".3g"),
    "noise: prompts": _with_error("noise_prompts"),
    "tokens": _number("noise_tokens", ".2f"),
    "scale": _number("noise_scale", ".0f"),
    "effective": _number("effective", ".0f"),
    "stopped": _number("stopped", ".1%"),
    "top ten": _number("largest", ".1%"),
    "longest": _number("longest", ".1%"),
    "by length": _number("length", ".2f"),
}


# four panels, read from top to bottom as they are on the picture
def draw(found: Mapping[str, Any], out: Path) -> Path:
    """Draw a comparison: cosines, noise, the weight of a response by length and of a token by ratio."""
    from matplotlib.ticker import MaxNLocator

    rows, seen = found["rows"], found["evidence"]
    names = list(rows)
    at = list(range(len(names)))
    high = max(0.28 * len(names) + 1.1, 2.8)
    fig, axes = plot.figure(2, (5.6, 5.6), height=high)
    ax = axes[0][0]
    for key, marker, color, shift, label in (
        ("cosine", "o", "#2a5db0", -0.12, "of this batch"),
        ("direction", "D", "#c0392b", 0.12, "of its expectation"),
    ):
        x = [_or_nan(row[key]) if row[f"{key}_se"] is not None else math.nan for row in rows.values()]
        error = [_or_nan(row[f"{key}_se"]) for row in rows.values()]
        ax.errorbar(
            x, [i + shift for i in at], xerr=error, fmt=marker, ms=4, color=color, lw=1.2, label=label
        )
    ax.axvline(found["reference"]["ceiling"], color="#9aa4b2", lw=0.9, ls="--", label="of the true gradient")
    ax.set_xlabel("cosine with the reference (± standard error)", fontsize=8)
    ax.set_title("which points closer", fontsize=10, loc="left")

    # shares of the squared norm, of which all beyond 1 would cancel in a larger batch
    ax = axes[0][1]
    bars = (
        ("noise_prompts", "#2a5db0", "draw of prompts"),
        ("noise_tokens", "#9aa4b2", "tokens, if independent"),
    )
    for k, (key, color, label) in enumerate(bars):
        x = [_or_nan(row[key]) for row in rows.values()]
        ax.barh([i + 0.36 * k - 0.18 for i in at], x, height=0.34, color=color, label=label)
    ax.axvline(1, color="#9aa4b2", lw=0.9, ls="--")
    ax.set_xlabel("variance / |g|²: at 1 all is noise", fontsize=8)
    ax.set_title("what the noise is", fontsize=10, loc="left")
    for ax in axes[0]:
        ax.set_yticks(at, names, fontsize=8)
        ax.invert_yaxis()
        ax.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.5 / high), ncols=3)

    # a row differs from another by how it weighs responses, and by what it makes of a ratio
    for i, (name, row) in enumerate(seen.items()):
        style = ("-", "--", ":", "-.")[i // 10 % 4]
        axes[1][0].plot(
            row["length"], row["push"], style, color=f"C{i % 10}", lw=1.3, marker="o", ms=2.5, label=name
        )
        axes[1][1].plot(row["ratio"], row["gain"], ".", color=f"C{i % 10}", ms=3, alpha=0.6, label=name)
    axes[1][0].set(xlabel="response length [tokens]", ylabel="push / mean push")
    axes[1][0].set_title("weight of a response by length", fontsize=10, loc="left")
    axes[1][0].legend(frameon=False, fontsize=7, ncols=2)
    axes[1][1].set(xlabel="ratio π / π_sampler of a token", ylabel="slope / (weight × advantage)")
    axes[1][1].set_title("what a loss makes of a ratio", fontsize=10, loc="left")
    axes[1][1].legend(frameon=False, fontsize=7, ncols=2, markerscale=2)
    if max((abs(x - 1) for row in seen.values() for x in row["ratio"]), default=0) < 1e-3:
        axes[1][1].set(xlim=(0.5, 1.5), ylim=(0, 2))
        note = "the policy is the sampler: every ratio is 1"
        axes[1][1].text(0.5, 0.1, note, fontsize=8, ha="center", transform=axes[1][1].transAxes)
    axes[1][0].xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    for ax in axes.flat:
        ax.grid(alpha=0.25, lw=0.5)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
        ax.xaxis.label.set_size(8)
        ax.yaxis.label.set_size(8)
    return plot.save(fig, out)


def _or_nan(x: float | None) -> float:
    return math.nan if x is None else x
