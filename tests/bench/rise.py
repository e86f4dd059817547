"""The picture at the front of the README: `python tests/bench/rise.py`.

A language model whose share of right answers rises: the reward of samples over the steps, held-out questions
on the way, and held-out questions before and after, all with Wilson's 95 % intervals. It is drawn from the
sums in docs/results/smollm2; gsm8k_rise.py draws its own picture by the same function.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PICTURE = ROOT / "docs" / "pictures" / "rise.svg"
Z = 1.959964  # of 95 %
BLUE, GREY, ORANGE = "#1f6fb2", "#8a94a3", "#d65a14"


class Share(NamedTuple):
    """Right answers of some."""

    right: int
    total: int

    def interval(self) -> tuple[float, float]:
        """Return Wilson's interval (low, high) of the probability of a right answer."""
        share = self.right / self.total
        scale = 1 + Z**2 / self.total
        middle = (share + Z**2 / (2 * self.total)) / scale
        half = Z / scale * math.sqrt(share * (1 - share) / self.total + Z**2 / (4 * self.total**2))
        return max(middle - half, 0.0), min(middle + half, 1.0)


class Rise(NamedTuple):
    """What the picture shows of a run."""

    title: str
    rewards: Sequence[Sequence[float]]  # of samples, in each step of each seed
    held_out: dict[int, Share]  # greedy answers after so many steps
    stages: dict[str, tuple[Share, Share]]  # way of answering: before GRPO, after it


def share_of(found: dict[str, Any]) -> Share:
    """Return the right answers of a result of evaluate.py."""
    return Share(round(found["avg@1"] * found["questions"]), int(found["questions"]))


def sums() -> Rise:
    """Return SmolLM2-135M on sums of two numbers below 100, as docs/results/smollm2 has it."""
    run = json.loads((RESULTS / "smollm2" / "run.json").read_text())
    found = json.loads((RESULTS / "smollm2" / "evaluations.json").read_text())
    found = found.get("results", found)
    count = run["config"]["eval_prompts"]
    points = run["metrics"]["eval/mean"].items()
    return Rise(
        title="SmolLM2-135M-Instruct: sums of two numbers below 100",
        rewards=[run["metrics"]["reward/mean"]],
        held_out={int(step) + (step != "0"): Share(round(x * count), count) for step, x in points},
        stages={
            "greedy": (share_of(found["after_sft"]), share_of(found["after_grpo"])),
            "sampled": (share_of(found["after_sft_sampled"]), share_of(found["after_grpo_sampled"])),
        },
    )


def errors(shares: Sequence[Share]) -> list[list[float]]:
    """Return how far the intervals reach below and above the shares, in percent."""
    ends = [(x.right / x.total, *x.interval()) for x in shares]
    return [
        [100 * (share - low) for share, low, _ in ends],
        [100 * (high - share) for share, _, high in ends],
    ]


def percent(shares: Sequence[Share]) -> list[float]:
    return [100 * x.right / x.total for x in shares]


def draw(rise: Rise, path: Path) -> None:
    """Draw the curve on the left, and before and after on the right."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    from rft_fn.run.plot import running_mean

    pyplot.rcParams["svg.hashsalt"] = "rise"
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(7.8, 3.3), width_ratios=(3, 2), layout="constrained"
    )
    for i, rewards in enumerate(rise.rewards):
        steps = range(1, len(rewards) + 1)
        values = [100 * x for x in rewards]
        left.plot(steps, values, color=BLUE, alpha=0.3, linewidth=0.8)
        label = "samples, training questions" if i == 0 else None
        left.plot(steps, running_mean(values, max(len(values) // 6, 2)), color=BLUE, linewidth=2, label=label)
    points = list(rise.held_out.values())
    left.errorbar(
        list(rise.held_out),
        percent(points),
        yerr=errors(points),
        label=f"greedy, {points[0].total} held-out questions",
        color=ORANGE,
        marker="o",
        markersize=5,
        capsize=3,
        linewidth=1.5,
    )
    left.set(xlabel="step of GRPO", ylabel="right, %", ylim=(0, None))
    left.legend(frameon=False, fontsize=9, loc="lower right")
    left.set_title(rise.title, fontsize=10, loc="left")

    for k, (stage, color) in enumerate((("after the warm-up", GREY), ("after GRPO", BLUE))):
        shares = [pair[k] for pair in rise.stages.values()]
        places = [i + 0.38 * k for i in range(len(shares))]
        bars = right.bar(
            places, percent(shares), 0.36, yerr=errors(shares), color=color, label=stage, capsize=3
        )
        right.bar_label(bars, fmt="%.1f", fontsize=9, label_type="center", color="white")
    right.set_xticks([i + 0.19 for i in range(len(rise.stages))], list(rise.stages))
    top = max(100 * x.interval()[1] for pair in rise.stages.values() for x in pair)
    right.set(ylabel="right, % of held-out questions", ylim=(0, 1.45 * top))
    right.legend(frameon=False, fontsize=9, loc="upper left")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # for --help
    draw(sums(), PICTURE)
