"""The page of some runs: its data, thinned to a size, and its parts put together."""

import base64
import bisect
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rft_fn.reward.from_spec import HELD
from rft_fn.run import plot
from rft_fn.run.files import write_whole
from rft_fn.run.symptoms import RULES, WARNING
from rft_fn.text import writable
from rft_fn.tools.page import recorded
from rft_fn.tools.page.recorded import FIELDS, Recorded

__all__ = [
    "MOST", "curve", "fan", "found_symptoms", "metric_names", "phases", "thinned", "top_metrics",
    "write_page",
]  # fmt: skip


# ---------- rows of a run as curves, over steps from 1


MOST = 2000  # points of a curve
_BARS = 60
_BANDS = 300  # steps of a band of quantiles
_UNITS = ("nats", "nats per token", "tokens", "share", "probability")  # that no name of a metric says

_DIVERGENCES = ("policy/kl_ref", "kl/ref", "policy/kl_old")
_ROUNDING = 1e-6  # nats per token, below which a divergence is that of two equal policies

# what a reader wants to see first; of several in a line, one that changes
_TOP = (
    ("reward/mean",),
    ("eval/mean",),
    ("loss",),
    ("eval/loss",),
    ("eval/accuracy", "pairs/accuracy", "lists/accuracy"),
    ("eval/correct", "points/correct", "steps/correct"),
    ("eval/mse", "points/mse", "steps/mse"),
    _DIVERGENCES,
    ("rollout/length_mean",),
    ("policy/entropy",),
)
_LOSSES = ("loss", "eval/loss")  # of less interest in runs with a reward


def short(x: float) -> float:
    """Return a number with six digits."""
    return float(f"{x:.6g}")


def top_metrics(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the names of the metrics of some runs that matter most.

    They are reward, held rewards, evaluation, KL, length and entropy; loss and accuracy in place of a reward.
    A KL that is nothing but rounding is not among them.
    """
    values: dict[str, set[float]] = {name: set() for names in _TOP for name in names}
    for rows in runs:
        for row in rows:
            for name, different in values.items():
                if row.get(name) is not None:
                    different.add(row[name])
    for name in _DIVERGENCES:
        if all(abs(x) < _ROUNDING for x in values[name]):
            values[name].clear()
    found = []
    for names in _TOP:
        having = sorted((name for name in names if values[name]), key=lambda name: len(values[name]) < 2)
        if having and not (values["reward/mean"] and having[0] in _LOSSES):
            found.append(having[0])
    held = sorted({name for rows in runs for row in rows for name in row if name.endswith(HELD)})
    return [*found[:1], *(name for name in held if name.startswith("reward/")), *found[1:]]


def metric_names(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the names of the metrics of some runs, the `top_metrics` first."""
    names = {name for rows in runs for row in rows for name in row if name != "step"}
    first = top_metrics(runs)
    return first + sorted(names.difference(first))


def thinned(y: Sequence[float], most: int = MOST) -> list[int]:
    """Return the indices of at most `most` values, with the least and the largest of each stretch."""
    if len(y) <= most:
        return list(range(len(y)))
    count = most // 2
    kept = []
    for k in range(count):
        part = range(k * len(y) // count, (k + 1) * len(y) // count)
        kept += sorted({min(part, key=y.__getitem__), max(part, key=y.__getitem__)})
    return kept


def curve(runs: Sequence[Sequence[Mapping[str, Any]]], name: str) -> dict[str, list[float]] | None:
    """Return {x, y} of a metric by step, the mean over runs; for several runs also lo, hi.

    `lo` and `hi` are the least and the largest value over the runs, and over the steps that a point
    covers.
    """
    values: dict[int, list[float]] = {}
    for rows in runs:
        for row in rows:
            if row.get(name) is not None:
                values.setdefault(row["step"] + 1, []).append(row[name])
    if not values:
        return None

    # steps that the mean leaves out are left out of the band too, but their extremes are kept in it
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
    """Return {x, size, names, fills, seconds [bar][phase]}: means of each phase over the steps of a bar.

    The rest of a step, outside of all phases, is the phase "other". `fills` are the colours.
    """
    names = plot.phase_names(timing)
    size = max(-(-len(timing) // _BARS), 1)
    bars = [timing[i : i + size] for i in range(0, len(timing), size)]
    seconds = []
    for bar in bars:
        parts = [sum(row.get(f"phase/{name}") or 0 for row in bar) / len(bar) for name in names]
        rest = sum(row.get("seconds") or 0 for row in bar) / len(bar) - sum(parts)
        seconds.append([short(x) for x in (*parts, max(rest, 0))])
    labels = [*names, "other"]
    return {
        "x": [bar[0]["step"] + 1 for bar in bars],
        "size": size,
        "names": labels,
        "fills": [plot.phase_color(name) for name in labels],
        "seconds": seconds,
    }


def fan(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """Return {x, q [quantile][step]} of the lengths or the rewards of a run.

    Many steps are joined: the lowest quantile keeps its least value, the highest its largest, and the others
    have a mean.
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
    return {"x": [part[0]["step"] + 1 for part in parts], "q": q}


def found_symptoms(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every symptom of a run: first and last step, the sentence of the last one, the remedy."""
    found = []
    for rule in RULES:
        places = [i for i, row in enumerate(rows) if row.get(WARNING + rule.name)]
        if places:
            first, last = places[0], places[-1]
            entry = {"name": rule.name, "first": rows[first]["step"] + 1, "last": rows[last]["step"] + 1}
            # a rule that has changed since the run finds nothing there
            sentence = rule.find(rows[: last + 1]) or rule.condition
            found.append(entry | {"sentence": sentence, "remedy": rule.remedy})
    return sorted(found, key=lambda entry: entry["first"])


# ---------- the page of some runs: its data, thinned to a size, and its parts put together


MOST_BYTES = 9_500_000  # of a page
_MOST_STEPS = 1000  # steps of a run with responses on the page: a menu lists them
_PICTURE_BYTES = 600_000
_SCRIPTS = ("charts.js", "tokens.js", "page.js")
_HERE = Path(__file__).parent


def write_page(folders: Sequence[str | Path], out: str | Path, *, most_bytes: int = MOST_BYTES) -> Path:
    """Write the page of the runs in some folders, and return its path.

    It is one file of at most `most_bytes`. It has the responses of at most 1,000 steps of a run, and of fewer
    where they would not fit.
    Raises ValueError for a folder that holds no run, and for an `out` that cannot be written.
    """
    out = Path(out)
    runs = recorded.read_all(folders)
    about, parts = _data(runs, most_bytes)
    blocks = [_block("fields", FIELDS), _block("data", about)]
    blocks += [_block(name, part) for name, part in parts.items()]
    title = " · ".join(run.name for run in runs)
    text = (_HERE / "page.html").read_text()
    script = "\n".join((_HERE / name).read_text() for name in _SCRIPTS)
    filled = {
        "POLICY": _policy(f"\n{script}\n"),
        "TITLE": html.escape(writable(title)),
        "STYLE": (_HERE / "page.css").read_text(),
        "BLOCKS": "\n".join(blocks),
        "SCRIPT": script,
    }
    for name, x in filled.items():
        text = text.replace(f"<!--{name}-->", x, 1)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
    except OSError as error:
        raise ValueError(f"out: {out} cannot be written: {error.strerror}; choose another") from error
    return out


def _policy(script: str) -> str:
    """Return the Content-Security-Policy of a page that runs this script and asks nobody for anything.

    The data of a run comes from models and strangers: should any of it become markup, it runs no code, loads
    nothing and sends nothing.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )


def _block(name: str, data: Any) -> str:
    """Return data as an element of the page; nothing in the data can end the element."""
    text = writable(json.dumps(data, separators=(",", ":"), ensure_ascii=False)).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _data(runs: Sequence[Recorded], most_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (what the page shows at once, {name: the responses that it reads on demand})."""
    groups = recorded.grouped(runs)
    names = metric_names([run.metrics for run in runs])
    units = {name: plot.unit(name) for name in names}
    metrics = {}
    for name in names:
        found = [curve([runs[i].metrics for i in group], name) for group in groups]
        metrics[name] = found
    about: dict[str, Any] = {
        "groups": [{"name": _group_name(runs, group), "runs": group} for group in groups],
        "metrics": metrics,
        "top": top_metrics([run.metrics for run in runs]),
        "units": {name: unit for name, unit in units.items() if unit in _UNITS},
        "differences": recorded.config_differences(runs),
        "runs": [_run(run) for run in runs],
    }

    # the rest of the size goes to the responses, with an equal share for every run
    used = len(json.dumps(about)) + 100_000
    share = max(most_bytes - used, 0) // (2 * len(runs))
    parts: dict[str, Any] = {}
    for i, run in enumerate(runs):
        for kind, rows in (("tokens", run.tokens), ("samples", run.trajectories)):
            steps = _fitting(rows, share)
            about["runs"][i][kind] = list(steps)
            parts |= {f"{kind}-{i}-{step}": found for step, found in steps.items()}
    return about, parts


def _group_name(runs: Sequence[Recorded], group: Sequence[int]) -> str:
    name = runs[group[0]].name
    if len(group) == 1:
        return name
    return f"{name} ({len(group)} seeds)"


def _run(run: Recorded) -> dict[str, Any]:
    """Return what the page shows of a single run."""
    return {
        "name": run.name,
        "config": run.config,
        "steps": len(run.metrics),
        "symptoms": found_symptoms(run.metrics),
        "phases": phases(run.timing),
        "length": fan(run.distributions, "length"),
        "reward": fan(run.distributions, "reward"),
        "pictures": _pictures(run.pictures),
    }


def _pictures(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return (name, data URI) of the pictures that are not too large."""
    found = []
    for path in paths:
        if path.stat().st_size <= _PICTURE_BYTES:
            content = path.read_bytes()
            found.append((path.stem, f"data:image/png;base64,{base64.b64encode(content).decode()}"))
    return found


def _fitting(rows: Sequence[Mapping[str, Any]], most_bytes: int) -> dict[int, list[Mapping[str, Any]]]:
    """Return rows by step from 1: of all steps, or evenly of as many as fit, with the first and the last."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        steps.setdefault(row["step"] + 1, []).append(row)
    sizes = {}
    for step, found in steps.items():
        sizes[step] = len(writable(json.dumps(found, ensure_ascii=False)).encode())

    def too_large(count: int) -> bool:
        return sum(sizes[step] for step in _even(list(steps), count)) > most_bytes

    count = bisect.bisect_left(range(1, min(len(steps), _MOST_STEPS) + 1), True, key=too_large)
    return {step: steps[step] for step in _even(list(steps), count)}


def _even(steps: Sequence[int], count: int) -> list[int]:
    """Return `count` of the steps, evenly, with the first and the last."""
    if count == 1:
        return [steps[-1]]
    return [steps[i * (len(steps) - 1) // max(count - 1, 1)] for i in range(count)]
