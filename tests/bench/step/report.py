"""What bench-step found: lines, a table, ratios with their spread, and a picture."""

import os
import platform
import re
import shutil
import statistics
import sys
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from clock import PHASES

sys.path.append(str(Path(__file__).resolve().parents[1]))
import record

KINDS = {"wall": "on the wall", "cpu": "of the processor"}
NAMES = {
    "rft_fn": "rft_fn",
    "every_token": "rft_fn, no shared prompts",
    "trl": "TRL GRPOTrainer",
    "products": "the products alone",
}
RATIO = re.compile(
    r"^(?P<lengths>\w+): (?P<over>\w+) / (?P<under>\w+) (?P<middle>[\d.]+) "
    r"\((?P<least>[\d.]+) to (?P<most>[\d.]+) in (?P<rounds>\d+) rounds\), "
    r"seconds (?P<kind>on the wall|of the processor)$"
)


def made(device: str) -> dict[str, Any]:
    """The date, the machine, and the versions of what was measured."""
    import torch

    known = {}
    for name in ("torch", "transformers", "trl", "rft-fn", "liger-kernel"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    found = {"date": str(date.today()), "processor": record.processor(), "cores": os.cpu_count()}
    found |= {"threads": torch.get_num_threads(), "system": platform.platform(), "versions": known}
    if device == "cpu":
        found["vectors"] = torch.backends.cpu.get_cpu_capability()  # Zen 3 and Zen 4 are of one family
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def command(folder: str, given: list[str]) -> str:
    """The command line, without the folder of the results."""
    kept = [x for before, x in zip(["", *given], given) if before != "--out" and not x.startswith("--out")]
    return " ".join(["python", f"tests/bench/{folder}", *kept])


def processor() -> tuple[float, float, float] | None:
    """(seconds that processors worked, seconds there were, seconds of this process's children) so far."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(x) for x in stat.read_text().splitlines()[0].split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    own = os.times()
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(ticks) / per_second, sum(own[:4])


def others(before: tuple[float, float, float] | None) -> float | None:
    """The share of the processors that other programs had since `before`; None where it is not known."""
    now = processor()
    if before is None or now is None:
        return None
    busy, all_, own = (b - a for a, b in zip(before, now))
    return round(max(busy - own, 0.0) / max(all_, 1e-9), 3)


def seconds(x: dict[str, Any], kind: str) -> float:
    """Of a step, the mean of a turn's."""
    return statistics.mean(sum(step[kind].values()) for step in x["steps"])


def line(side: str, x: dict[str, Any]) -> str:
    """A turn."""
    own = f"{side:<12}{seconds(x, 'wall'):8.2f} s, of the processor {seconds(x, 'cpu'):8.2f} s"
    return f"{own}, peak {x['peak'] / 2**30:.2f} GiB, others had {x['others']} of the machine"


def turns(found: dict[str, Any], lengths: str, side: str) -> list[dict[str, Any]]:
    """A side's turns."""
    return [x for x in found["turns"] if (x["lengths"], x["side"]) == (lengths, side)]


def sides(found: dict[str, Any], lengths: str) -> list[str]:
    """Those that were measured, in the order of the names above."""
    return [side for side in NAMES if turns(found, lengths, side)]


def middle(rows: list[dict[str, Any]], kind: str, phase: str) -> float:
    """The median of a phase over turns."""
    return statistics.median(statistics.mean(step[kind][phase] for step in x["steps"]) for x in rows)


def table(found: dict[str, Any], lengths: str) -> str:
    """Medians over the rounds; tokens are those that were sampled."""
    head = ["seconds", "", *PHASES, "step", "tokens/s", "peak GiB"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for side in sides(found, lengths):
        rows = turns(found, lengths, side)
        for kind, word in KINDS.items():
            parts = [f"{middle(rows, kind, phase):.2f}" for phase in PHASES]
            step = statistics.median(seconds(x, kind) for x in rows)
            rate, peak = rows[0]["steps"][0]["response"] / step, max(x["peak"] for x in rows) / 2**30
            cells = [NAMES[side], word, *parts, f"**{step:.2f}**", f"{rate:.1f}", f"{peak:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    first = turns(found, lengths, sides(found, lengths)[0])[0]["steps"][0]
    size = f"{first['prompt']} tokens of prompts, {first['response']} of responses"
    return "\n".join([f"{lengths} lengths, {size}:", "", *lines])


def ratios(found: dict[str, Any], lengths: str) -> list[str]:
    """Each other side over rft_fn, round by round: median, least and most."""
    out = []
    for side in sides(found, lengths):
        if side == "rft_fn" or not turns(found, lengths, "rft_fn"):
            continue
        for kind, word in KINDS.items():
            own = {x["round"]: x for x in turns(found, lengths, "rft_fn")}
            pairs = [(x, own[x["round"]]) for x in turns(found, lengths, side) if x["round"] in own]
            each = [seconds(a, kind) / seconds(b, kind) for a, b in pairs]
            if not each:
                continue
            spread = (
                f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f} in {len(each)} rounds)"
            )
            out.append(f"{lengths}: {side} / rft_fn {spread}, seconds {word}")
    return out


def parse(text: str) -> dict[str, Any] | None:
    """The parts of a line of `ratios`; None for other lines."""
    match = RATIO.match(text)
    if match is None:
        return None
    numbers = {k: float(match[k]) for k in ("middle", "least", "most")}
    names = {k: match[k] for k in ("lengths", "over", "under", "kind")}
    return names | numbers | {"rounds": int(match["rounds"])}


def text(found: dict[str, Any]) -> str:
    """The part of docs/performance.md that a run makes."""
    made_ = found["made"]
    versions = ", ".join(f"{k} {v}" for k, v in made_["versions"].items())
    machine = f"{made_['processor']}, {made_['cores']} cores, {made_['threads']} threads"
    others_ = _spread(x["others"] for x in found["turns"])
    parts = [f"{made_['date']}, {machine}; {versions}. Weights: {found['weights']}."]
    parts[0] += f" Other programs had {others_} of the machine."
    cfg = found["config"]
    rounds = len({x["round"] for x in found["turns"]})
    size = f"{cfg['prompts']} prompts x {cfg['group']} responses of {cfg['tokens']} tokens, {rounds} rounds"
    cut = f"packs of {cfg['budget']:,} tokens, TRL's micro-batches of {cfg['micro']}"
    parts.append(f"{size}, {cut}; medians over the rounds, the largest peak.")
    if cfg["model"] == "tiny":
        parts.append("**A tiny model: the numbers show that the bench runs, not which side is faster.**")
    limits = [x for x in found["turns"] if x["side"] == "products"]
    if limits:
        rates = [x["steps"][0]["gflops"] for x in limits]
        parts.append(f"Products alone: {statistics.median(rates):.0f} GFLOP/s on average over the step.")
    for lengths in dict.fromkeys(x["lengths"] for x in found["turns"]):
        parts += [table(found, lengths), "\n".join(["```", *ratios(found, lengths), "```"])]
    return "\n\n".join(parts)


def _spread(shares: Iterable[float | None]) -> str:
    known = [x for x in shares if x is not None]
    if not known:
        return "an unknown share"
    return f"{100 * min(known):.0f} to {100 * max(known):.0f} %"


def write(found: dict[str, Any], out: Path, root: Path) -> None:
    """Put the data and the picture into docs/results/step, and the tables into docs/performance.md."""
    folder = root / "docs" / "results" / "step"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("step.json", "step.png"):
        shutil.copyfile(out / name, folder / name)
    record.put("docs/performance.md", {"step": text(found)})


def picture(found: dict[str, Any], path: Path) -> None:
    """Bars of the phases, one for each side, a panel for each kind of lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(x["lengths"] for x in found["turns"]))
    fig, axes = plt.subplots(
        1, len(kinds), figsize=(5.5 * len(kinds), 3.2), squeeze=False, layout="constrained"
    )
    for ax, lengths in zip(axes[0], kinds):
        names = sides(found, lengths)
        at = [0.0] * len(names)
        for phase in PHASES:
            wide = [middle(turns(found, lengths, side), "cpu", phase) for side in names]
            if max(wide) > 0:
                ax.barh([NAMES[x] for x in names], wide, left=at, label=phase)
            at = [a + w for a, w in zip(at, wide)]
        for y, (side, end) in enumerate(zip(names, at)):
            peak = max(x["peak"] for x in turns(found, lengths, side)) / 2**30
            ax.text(end, y, f" {end:.3g} s, {peak:.1f} GiB", va="center", fontsize=8)
        ax.set_xlim(0, 1.45 * max(at))
        ax.invert_yaxis()
        ax.set_title(f"{lengths} lengths", fontsize=10)
        ax.set_xlabel("seconds of the processor, a step")
        ax.legend(fontsize=7)
    fig.savefig(path, dpi=110)
    plt.close(fig)
