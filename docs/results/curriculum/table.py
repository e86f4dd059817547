"""Prints the share of right answers by level, with Wilson's 95 % intervals.

It reads the evaluations that lie beside this file.

python docs/results/curriculum/table.py
"""

import json
import math
from pathlib import Path

HERE = Path(__file__).parent
STAGES = {"before": "as it comes", "after_sft": "after SFT", "after_grpo": "after GRPO"}
LEVELS = {1: "one digit", 2: "two digits", 3: "three digits"}
Z = 1.959964  # of 95 %


def wilson(right: int, count: int) -> tuple[float, float]:
    """(low, high) of the probability of a right answer: where it is Z standard errors from the share seen."""
    share = right / count
    scale = 1 + Z**2 / count
    middle = (share + Z**2 / (2 * count)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def cell(stage: str, level: int, temperature: int) -> str:
    """The share of right answers in percent, with its interval."""
    found = json.loads((HERE / f"{stage}_{level}_{temperature}.json").read_text())["result"]
    count = int(found["questions"])
    low, high = wilson(round(found["avg@1"] * count), count)
    return f"{100 * found['avg@1']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def table() -> str:
    """Stages by level, greedy and sampled, as Markdown."""
    heads = [f"{level}, {how}" for level in LEVELS.values() for how in ("greedy", "sampled")]
    lines = ["| right, % | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for stage, name in STAGES.items():
        cells = [cell(stage, level, temperature) for level in LEVELS for temperature in (0, 1)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
