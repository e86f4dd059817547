"""A run in the terminal while it goes on: the last responses in colour, quantiles, phases and metrics."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rft_fn.run import claim
from rft_fn.run.samples import QUANTILES
from rft_fn.run.symptoms import symptoms
from rft_fn.text import printable
from rft_fn.tools.page.build import metric_names, phases, top_metrics
from rft_fn.tools.page.recorded import FIELDS, Name, Recorded, full_scale, hue, level, read

__all__ = ["HUES", "follow", "frame", "sparkline"]


_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # characters of a sparkline or a bar, at most
_WIDE = 72  # characters of a terminal with room for the range of each metric
_RECENT = 20  # steps in the mean seconds of the phases
_RESPONSES = 6
HUES = {"good": (31, 111, 178), "bad": (214, 90, 20), "much": (120, 60, 170)}  # as on the page
_BEHIND = "          "  # under a response, where its reward ends


def sparkline(y: Sequence[float], width: int = _WIDTH) -> str:
    """Draw numbers as a line of blocks, least to largest; each block is the mean of a stretch."""
    if not y:
        return ""
    count = min(width, len(y))
    parts = [y[k * len(y) // count : (k + 1) * len(y) // count] for k in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low = min(means)
    span = max(means) - low or 1.0
    return "".join(_BLOCKS[int((x - low) / span * (len(_BLOCKS) - 1) + 0.5)] for x in means)


def frame(run: Recorded, color: Name = "push", *, width: int = 80) -> Group:
    """Return the present state of a run for a terminal of `width` columns.

    Tokens are coloured by the number `color`. In a narrow terminal the lines of blocks are shorter, so that
    their end, the newest steps, is never cut off.
    """
    last = run.metrics[-1]["step"] + 1
    of = run.config.get("steps")
    head = f"{run.name}  step {last}"
    if of:
        head += f" of {of}"
    parts: list[Any] = [Text(printable(head), style="bold")]
    parts += [Text(x.line, style="yellow") for x in symptoms(run.metrics)]

    # a low terminal cuts off the end, where the metrics of least interest are
    names = metric_names([run.metrics])
    values = {name: [float(row[name]) for row in run.metrics if row.get(name) is not None] for name in names}
    first = {name: values.pop(name) for name in top_metrics([run.metrics])}
    if first:
        parts.append(_metrics(first, width))
    if run.tokens:
        parts.append(_responses(run.tokens, color))
    if run.distributions:
        parts.append(_spread(run.distributions[-1]))
    parts.append(_phases(run.timing, width))
    changing = {name: y for name, y in values.items() if len(set(y)) > 1}
    if changing:
        parts.append(_metrics(changing, width))
    still = [f"{printable(name)} {y[0]:.4g}" for name, y in values.items() if len(set(y)) == 1]
    if still:
        parts.append(Text("with a single value: " + ", ".join(still), style="dim"))
    return Group(*parts)


def _metrics(values: Mapping[str, Sequence[float]], width: int) -> Table:
    """Return the last value of each metric, a line of blocks, and the range where there is room for it."""
    rows = [
        (_shortened(name, width), f"{y[-1]:.4g}", f"{min(y):.4g}", f"{max(y):.4g}")
        for name, y in values.items()
    ]
    heads = ("metric", "last", "least", "largest")
    if width < _WIDE:
        rows = [row[:2] for row in rows]
        heads = heads[:2]
    taken = sum(max(map(len, column)) + 2 for column in zip(heads, *rows))
    blocks = max(min(width - taken, _WIDTH), 1)

    table = Table(box=None, pad_edge=False)
    for name in (*heads[:2], "", *heads[2:]):
        table.add_column(name, no_wrap=True)
    for (name, last, *ends), y in zip(rows, values.values()):
        # as a text: brackets in a name are no markup
        table.add_row(Text(name), last, sparkline(y, blocks), *ends)
    return table


def _shortened(name: str, width: int) -> str:
    """Return a name that takes at most two fifths of a line."""
    name = printable(name)
    most = 2 * width // 5
    return name if len(name) <= most else name[: most - 1] + "…"


def _phases(timing: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Return the mean seconds of each phase over the last steps, as bars."""
    head = f"seconds per step, last {_RECENT}"
    table = Table(box=None, pad_edge=False)
    for name in (head, "", ""):
        table.add_column(name, no_wrap=True)
    rows = timing[-_RECENT:]
    if not rows:
        return table
    found = phases(rows)
    bars = found["seconds"]
    means = [sum(bar[k] for bar in bars) / len(bars) for k in range(len(found["names"]))]
    most = max(*means, 1e-9)
    names = [_shortened(name, width) for name in found["names"]]
    numbers = [f"{seconds:.3g}" for seconds in means]
    taken = max(map(len, (head, *names))) + max(map(len, numbers)) + 4
    longest = max(min(width - taken, _WIDTH), 1)
    for name, number, seconds in zip(names, numbers, means):
        table.add_row(Text(name), number, "█" * round(longest * seconds / most))
    return table


def _spread(row: Mapping[str, Any]) -> Table:
    """Return the quantiles of the lengths and the rewards of a step."""
    table = Table(box=None, pad_edge=False)
    for name in (f"step {row['step'] + 1}", "min", *(f"{q:.0%}" for q in QUANTILES[1:-1]), "max"):
        table.add_column(name)
    for name, label in (("length", "lengths [tokens]"), ("reward", "rewards")):
        if name in row:
            table.add_row(Text(label), *(f"{x:.4g}" for x in row[name]))
    return table


def _responses(rows: Sequence[Mapping[str, Any]], color: Name) -> Group:
    """Return the last group with differing rewards, else the last; colour each token by its number."""
    step = rows[-1]["step"]
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["step"] == step:
            groups.setdefault(row["group"], []).append(row)
    shown = list(groups.values())[-1]
    for group in groups.values():
        if len({row.get("reward") for row in group}) > 1:
            shown = group

    # media are shown by their names, before the text about them
    media = [f"[{kind} {name}] " for row in shown for kind, name, _ in row.get("media", ())]
    head = f"step {step + 1}  {''.join(media)}{shown[0].get('prompt', '')}"
    field = FIELDS[color]
    key = f"coloured by {color}, {field.label}: {field.meaning}"
    if not any(color in row for row in shown):
        key = f"{color}, {field.label}: not recorded in this run"
    lines = [Text(printable(head), style="bold"), Text(key, style="dim")]
    full = full_scale(shown, color)
    for row in shown[:_RESPONSES]:
        lines.append(_tokens(row, color, full))
        if row.get("conversation"):
            lines.append(_turns(row["conversation"]))
    return Group(*lines)


def _tokens(row: Mapping[str, Any], color: Name, full: float) -> Text:
    text = Text()
    if "name" in row:
        text.append(printable(f"{row['name']:>8}  "))
    if row.get("reward") is not None:
        text.append(f"{row['reward']:8.3g}  ")
    values = row.get(color) or [None] * len(row["pieces"])
    for piece, learned, x in zip(row["pieces"], row["mask"], values):
        style = ""
        if not learned:
            style = "dim italic"
        elif x is not None:
            style = _background(color, level(color, x), full)
        text.append(printable(piece.replace("\n", "↵")), style=style)
    return text


def _background(color: Name, size: float, full: float) -> str:
    """Return a style of the background, darker for a smaller level, none for 0."""
    if not size:
        return ""
    share = 0.25 + 0.75 * min(abs(size) / full, 1.0)
    red, green, blue = (round(share * c) for c in HUES[hue(color, size)])
    return f"white on rgb({red},{green},{blue})"


def _turns(conversation: Sequence[Mapping[str, Any]]) -> Text:
    """Return the turns of a conversation, each after its role."""
    text = Text(_BEHIND)
    for turn in conversation:
        said = turn.get("content")
        if not isinstance(said, str):
            said = json.dumps(said)
        text.append(printable(f"{turn.get('role', '')}: "), style="dim")
        text.append(printable(said.replace("\n", "↵")) + "  ")
    return text


def follow(folder: str | Path, *, every: float = 2.0, once: bool = False, color: Name = "push") -> None:
    """Show a run until it ends, or one time with `once`; tokens are coloured by `color`.

    The folder is read every `every` seconds. A run that has begun and finished no step yet is waited for.
    Raises ValueError for a folder without a run.
    """
    if not math.isfinite(every) or every <= 0:
        raise ValueError(f"every: expected above 0, got {every}")
    folder = Path(folder)
    console = Console()
    if once or not claim.held(folder):
        console.print(frame(read(folder), color, width=console.width))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        going = True
        while going:
            going = claim.held(folder)  # asked first, so that the last frame has the last rows
            if (folder / "metrics.jsonl").exists() or not going:
                live.update(frame(read(folder), color, width=console.width), refresh=True)
            if going:
                time.sleep(every)
