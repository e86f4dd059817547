"""What the growth bench found: tables, a picture, and their places in the documents."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import comm
import host

sys.path.append(str(Path(__file__).resolve().parents[1]))
from record import put

GIB = 2**30


def power(points: list[dict[str, float]], y: str) -> float:
    """The exponent between the last two points: 1 where twice the size costs twice as much."""
    a, b = points[-2:]
    return math.log(b[y] / a[y]) / math.log(b["x"] / a["x"])


def growth_table(found: dict[str, Any]) -> str:
    """A row for each axis."""
    lines = [
        "| | sizes | seconds | the last doubling, seconds x | MiB at the peak | the last doubling, bytes x |"
    ]
    lines.append("|---" * 6 + "|")
    for name, points in found.items():
        first, last = points[0], points[-1]
        cells = [name, f"{first['x']:,} to {last['x']:,}", f"{first['seconds']:.2f} to {last['seconds']:.2f}"]
        cells += [
            f"{2 ** power(points, 'seconds'):.2f}",
            f"{first['bytes'] / 2**20:.1f} to {last['bytes'] / 2**20:.1f}",
        ]
        cells.append(f"{2 ** power(points, 'bytes'):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranks_table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each strategy and number of ranks: the slowest rank."""
    lines = ["| | ranks | gradients of 4 packs a rank | update | export | gradients, over one rank |"]
    lines.append("|---" * 6 + "|")
    for name in found["1"][0]:
        one = found["1"][0][name]["gradients"]
        for world, rows in found.items():
            worst = {k: max(r[name][k] for r in rows) for k in ("gradients", "update", "export")}
            cells = [name, world, *(f"{worst[k]:.2f}" for k in worst), f"{worst['gradients'] / one:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gather_table(found: list[dict[str, Any]]) -> str:
    """A row for each size of the rollout, and one that is extrapolated."""
    phases = list(found[0]["cpu"])
    lines = ["| responses x tokens | GiB | " + " | ".join(phases) + " | peak GiB | |"]
    lines.append("|---" * (len(phases) + 4) + "|")
    last = found[-1]
    more = {"responses": 100 * last["responses"], "bytes": 100 * last["bytes"], "peak": 100 * last["peak"]}
    more |= {"cpu": {k: 100 * x for k, x in last["cpu"].items()}, "tokens": last["tokens"]}
    for x, word in [*((x, "measured") for x in found), (more, "extrapolated, x 100")]:
        cells = [f"{x['responses']:,} x {x['tokens']:,}", f"{x['bytes'] / GIB:.3g}"]
        cells += [f"{x['cpu'][k]:.3g} s" for k in phases]
        lines.append("| " + " | ".join([*cells, f"{x['peak'] / GIB:.3g}", word]) + " |")
    return "\n".join(lines)


def counted_table(found: dict[str, Any]) -> str:
    """A row for each kind of collective, in units of the parameters."""
    lines = ["| four ranks | collective | calls a pack | bytes a pack | over the bytes of all parameters |"]
    lines.append("|---" * 5 + "|")
    for name, x in found.items():
        steps = x["packs"] * x["sp"]  # the ranks of a group work on the packs of all of them
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
            if kind in x:
                calls, size = x[kind]
                share = size / steps / (4 * x["parameters"])
                lines.append(f"| {name} | {kind} | {calls / steps:g} | {size / steps:,.0f} | {share:.3f} |")
    return "\n".join(lines)


def comm_table(rows: list[dict[str, Any]]) -> str:
    """A row for each model, scheme and number of GPUs."""
    head = ["model", "scheme", "GPUs", "GB a GPU sends a pack", "compute, s", "communication, s"]
    head += ["not hidden, s", "of the time in compute", "hidden from tokens a GPU"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for x in rows:
        cells = [x["model"], x["scheme"], f"{x['gpus']:,}", f"{x['bytes'] / 1e9:.1f}"]
        cells += [f"{x[k]:.2f}" for k in ("compute", "communication", "exposed")]
        cells += [f"{100 * x['efficiency']:.1f} %", f"{x['hidden_from']:,.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def load_table(found: list[dict[str, float]]) -> str:
    """A row for each start, with its exponent."""
    lines = ["| start | " + " | ".join(f"{x['x']:,} rows" for x in found) + " | exponent |"]
    lines.append("|---" * (len(found) + 2) + "|")
    for start in ("first", "second"):
        cells = [start, *(f"{x[start]:.2f} s" for x in found), f"{power(found, start):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def held(found: dict[str, Any]) -> dict[str, tuple[list[dict[str, float]], float]]:
    """The points and the exponent of each cost of the host that is held near proportion."""
    series = {}
    if "host" in found:
        series |= found["host"]["found"]
    if "load" in found:
        for start in ("first", "second"):
            points = [{"x": p["x"], "seconds": p[start]} for p in found["load"]["found"]]
            series[f"load, {start} start"] = points
    return {name: (points, power(points, "seconds")) for name, points in series.items()}


def host_table(found: dict[str, Any]) -> str:
    """A row for each cost of the host."""
    lines = ["| | sizes | seconds | exponent |", "|---|---|---|---|"]
    for name, (points, exponent) in held({"host": {"found": found}}).items():
        sizes = f"{points[0]['x']:,} to {points[-1]['x']:,} {host.CASES[name][2]}"
        cells = [name, sizes, " ".join(f"{p['seconds']:.2f}" for p in points), f"{exponent:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of what has been measured, by their marks in the document."""
    out = {}
    makers = {
        "axes": ("growth", growth_table),
        "ranks": ("ranks", ranks_table),
        "gather": ("gather", gather_table),
        "load": ("load", load_table),
        "host": ("host", host_table),
    }
    for part, (mark, make) in makers.items():
        if part in found:
            out[mark] = make(found[part]["found"])
    if "comm" in found:
        x = found["comm"]["found"]
        out["counted"] = counted_table(x["counted"])
        usual, slower = x["tables"].values()
        out["network"] = comm_table(usual)
        out["slower"] = comm_table([row for row in slower if row["gpus"] == max(comm.WORLDS)])
    return out


def picture(found: dict[str, Any], path: Path) -> None:
    """A panel for each axis, seconds and bytes over their first point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series = found["axes"]["found"]
    fig, panels = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    for ax, (name, points) in zip(panels.flat, series.items()):
        x = [p["x"] for p in points]
        for y, word in (("seconds", "seconds of the processor"), ("bytes", "bytes at the peak")):
            ax.plot(x, [p[y] / points[0][y] for p in points], "o-", label=word)
        ax.plot(x, [v / x[0] for v in x], ":", color="grey", label="in proportion")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(x, [f"{v:,}" for v in x], fontsize=8)
        ax.minorticks_off()
        ax.set_title(name, fontsize=10)
        ax.grid(alpha=0.3)
    panels[0, 0].set_ylabel("over the first point")
    panels[1, 0].set_ylabel("over the first point")
    panels[0, 0].legend(fontsize=8)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def write(found: dict[str, Any], out: Path, root: Path) -> None:
    """Put the data and the picture into docs/results/growth, and the tables between their marks."""
    folder = root / "docs" / "results" / "growth"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.json").write_text(json.dumps(found, indent=1) + "\n")
    if (out / "growth.png").exists():
        shutil.copyfile(out / "growth.png", folder / "growth.png")
    put("docs/scaling.md", tables(found))
