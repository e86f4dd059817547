"""Rows of a run as curves, bars and bands that a page can draw: thinned, with their extremes kept."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rft_fn.run.symptoms import RULES
from rft_fn.run.warnings import WARNING

__all__ = ["MOST", "curve", "fan", "found_symptoms", "metric_names", "phases", "thinned"]

MOST = 2000  # points of a curve
_BARS = 60
_BANDS = 300  # steps of a band of quantiles


def short(x: float) -> float:
    """A number with six digits."""
    return float(f"{x:.6g}")


def metric_names(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """The metrics of some runs, what matters most first."""
    first = ("reward/mean", "eval/mean", "loss")
    names = dict.fromkeys(name for rows in runs for row in rows for name in row if name != "step")

    def place(name: str) -> tuple[int, str]:
        if name in first:
            return first.index(name), ""
        return len(first), name

    return sorted(names, key=place)


def thinned(y: Sequence[float], most: int = MOST) -> list[int]:
    """The indices of at most `most` values, among them the least and the largest of each stretch."""
    if len(y) <= most:
        return list(range(len(y)))
    count = most // 2
    kept = []
    for k in range(count):
        part = range(k * len(y) // count, (k + 1) * len(y) // count)
        kept += sorted({min(part, key=y.__getitem__), max(part, key=y.__getitem__)})
    return kept


def curve(runs: Sequence[Sequence[Mapping[str, Any]]], name: str) -> dict[str, list[float]] | None:
    """{x, y, and for several runs lo, hi} of a metric: the mean, least and largest over runs at each step."""
    values: dict[int, list[float]] = {}
    for rows in runs:
        for row in rows:
            if row.get(name) is not None:
                values.setdefault(row["step"], []).append(row[name])
    if not values:
        return None

    # what a stretch leaves out of the mean is left out of the band too, whose extremes are kept
    steps = sorted(values)
    y = [sum(values[step]) / len(values[step]) for step in steps]
    kept = thinned(y)
    found = {"x": [steps[i] for i in kept], "y": [short(y[i]) for i in kept]}
    if len(runs) > 1:
        ends = [0, *kept[1:], len(steps)]
        parts = [[x for step in steps[i:j] for x in values[step]] for i, j in pairwise(ends)]
        found["lo"] = [short(min(part)) for part in parts]
        found["hi"] = [short(max(part)) for part in parts]
    return found


def phases(timing: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{x, size, names, seconds [bar][phase]}: the mean seconds of each phase over the steps of a bar.

    The rest of a step, outside of all phases, is the phase "other".
    """
    names = list(dict.fromkeys(k for row in timing for k in row if k.startswith("phase/")))
    size = max(-(-len(timing) // _BARS), 1)
    bars = [timing[i : i + size] for i in range(0, len(timing), size)]
    seconds = []
    for bar in bars:
        parts = [sum(row.get(name) or 0 for row in bar) / len(bar) for name in names]
        rest = sum(row.get("seconds") or 0 for row in bar) / len(bar) - sum(parts)
        seconds.append([short(x) for x in (*parts, max(rest, 0))])
    labels = [name.removeprefix("phase/") for name in names] + ["other"]
    return {"x": [bar[0]["step"] for bar in bars], "size": size, "names": labels, "seconds": seconds}


def fan(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """{x, q [quantile][step]} of the lengths or the rewards of a run.

    Of many steps the least of the lowest and the largest of the highest quantile stay, of the others a mean.
    """
    having = [row for row in rows if name in row]
    if not having:
        return None
    size = -(-len(having) // _BANDS)
    parts = [having[i : i + size] for i in range(0, len(having), size)]
    last = len(having[0][name]) - 1
    q = []
    for level in range(last + 1):
        values = [[row[name][level] for row in part] for part in parts]
        if level == 0:
            q.append([short(min(x)) for x in values])
        elif level == last:
            q.append([short(max(x)) for x in values])
        else:
            q.append([short(sum(x) / len(x)) for x in values])
    return {"x": [part[0]["step"] for part in parts], "q": q}


def found_symptoms(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each symptom that a run noted: its first and last step, the sentence of the last one and the remedy."""
    found = []
    for rule in RULES:
        places = [i for i, row in enumerate(rows) if row.get(WARNING + rule.name)]
        if places:
            first, last = places[0], places[-1]
            entry = {"name": rule.name, "first": rows[first]["step"], "last": rows[last]["step"]}
            # a rule that has changed since the run finds nothing there
            sentence = rule.find(rows[: last + 1]) or rule.condition
            found.append(entry | {"sentence": sentence, "remedy": rule.remedy})
    return sorted(found, key=lambda entry: entry["first"])
