"""Prints the share of right answers by level, with Wilson's 95 % intervals, and what GRPO changed.

It reads evaluations.json beside this file. A greedy answer is compared with that to the same question
after SFT, by McNemar's exact test; of sampled ones there are only counts, so they are compared by Fisher's.

python docs/results/curriculum/table.py
"""

import json
import math
from pathlib import Path

DATA = json.loads((Path(__file__).parent / "evaluations.json").read_text())
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
    found = DATA["results"][f"{stage}_{level}_{temperature}"]
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


def mcnemar(won: int, lost: int) -> float:
    """The probability that chance alone divides the questions that changed so unevenly, or more so."""
    changed = won + lost
    tail = sum(math.comb(changed, k) for k in range(min(won, lost) + 1)) / 2**changed
    return min(2 * tail, 1.0)


def fisher(right: int, other: int, count: int) -> float:
    """The probability of tables no likelier than this one: right answers of two models of `count` each."""
    both = right + other

    def chance(k: int) -> float:
        return math.comb(count, k) * math.comb(count, both - k) / math.comb(2 * count, both)

    seen = chance(right) * (1 + 1e-9)
    return sum(chance(k) for k in range(max(both - count, 0), min(both, count) + 1) if chance(k) <= seen)


def answers(stage: str, level: int) -> list[bool]:
    """Whether each greedy answer is the sum that its question asks for, and nothing else."""
    return [answer == "1" for answer in DATA["right"][f"{stage}_{level}"]]


def changes(level: int) -> str:
    """What GRPO changed at a level, as a line of text."""
    pairs = list(zip(answers("after_sft", level), answers("after_grpo", level), strict=True))
    won, lost = pairs.count((False, True)), pairs.count((True, False))
    counts = [DATA["results"][f"{stage}_{level}_1"] for stage in STAGES]
    _, before, after = (round(x["avg@1"] * x["questions"]) for x in counts)
    sampled = fisher(after, before, int(counts[0]["questions"]))
    greedy = f"{won} won and {lost} lost (p = {mcnemar(won, lost):.2g})"
    return f"{LEVELS[level]}: greedy {greedy}; sampled {before} to {after} right (p = {sampled:.2g})"


if __name__ == "__main__":
    print(table())
    print(*map(changes, LEVELS), sep="\n")
