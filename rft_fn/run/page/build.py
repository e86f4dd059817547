"""The page of some runs: its data, thinned to a size, and its parts put together."""

import base64
import bisect
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_fn.check import writable
from rft_fn.run.files import write_whole
from rft_fn.run.page import recorded, series
from rft_fn.run.page.fields import FIELDS
from rft_fn.run.page.recorded import Recorded

__all__ = ["write_page"]

MOST_BYTES = 9_500_000  # of a page
_MOST_STEPS = 1000  # of a run whose responses are on the page: each is an entry of a menu
_PICTURE_BYTES = 600_000
_SCRIPTS = ("charts.js", "tokens.js", "page.js")
_HERE = Path(__file__).parent


def write_page(folders: Sequence[str | Path], out: str | Path, *, most_bytes: int = MOST_BYTES) -> Path:
    """Write the page of the runs in some folders, and return its path.

    It is one file of at most `most_bytes`: responses of fewer steps are in it where all would not fit, and of
    at most 1,000 of a run.
    ValueError for a folder that holds no run, and for an `out` that cannot be written.
    """
    out = Path(out)
    runs = recorded.read_all(folders)
    about, parts = _data(runs, most_bytes)
    blocks = [_block("fields", FIELDS), _block("data", about)]
    blocks += [_block(name, part) for name, part in parts.items()]
    title = " · ".join(run.name for run in runs)
    text = (_HERE / "page.html").read_text()
    filled = {
        "TITLE": html.escape(writable(title)),
        "STYLE": (_HERE / "page.css").read_text(),
        "BLOCKS": "\n".join(blocks),
        "SCRIPT": "\n".join((_HERE / name).read_text() for name in _SCRIPTS),
    }
    for name, x in filled.items():
        text = text.replace(f"<!--{name}-->", x, 1)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
    except OSError as error:
        raise ValueError(f"out: {out} cannot be written: {error.strerror}; choose another") from error
    return out


def _block(name: str, data: Any) -> str:
    """Data inside the page; nothing in it can end the element."""
    text = writable(json.dumps(data, separators=(",", ":"), ensure_ascii=False)).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _data(runs: Sequence[Recorded], most_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the page shows at once, {name: the responses that it reads when they are asked for})."""
    groups = recorded.grouped(runs)
    names = series.metric_names([run.metrics for run in runs])
    metrics = {}
    for name in names:
        found = [series.curve([runs[i].metrics for i in group], name) for group in groups]
        metrics[name] = found
    about: dict[str, Any] = {
        "groups": [{"name": _group_name(runs, group), "runs": group} for group in groups],
        "metrics": metrics,
        "differences": recorded.config_differences(runs),
        "runs": [_run(run) for run in runs],
    }

    # what is left of the size goes to the responses, to those of each run alike
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
    """What the page shows of a run by itself."""
    return {
        "name": run.name,
        "config": run.config,
        "steps": len(run.metrics),
        "symptoms": series.found_symptoms(run.metrics),
        "phases": series.phases(run.timing),
        "length": series.fan(run.distributions, "length"),
        "reward": series.fan(run.distributions, "reward"),
        "pictures": _pictures(run.pictures),
    }


def _pictures(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """(name, data URI) of pictures that are not too large."""
    found = []
    for path in paths:
        if path.stat().st_size <= _PICTURE_BYTES:
            content = path.read_bytes()
            found.append((path.stem, f"data:image/png;base64,{base64.b64encode(content).decode()}"))
    return found


def _fitting(rows: Sequence[Mapping[str, Any]], most_bytes: int) -> dict[int, list[Mapping[str, Any]]]:
    """The rows by step: of all steps, or evenly of as many as may be, the first and the last among them."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    sizes = {}
    for step, found in steps.items():
        sizes[step] = len(writable(json.dumps(found, ensure_ascii=False)).encode())

    def too_large(count: int) -> bool:
        return sum(sizes[step] for step in _even(list(steps), count)) > most_bytes

    count = bisect.bisect_left(range(1, min(len(steps), _MOST_STEPS) + 1), True, key=too_large)
    return {step: steps[step] for step in _even(list(steps), count)}


def _even(steps: Sequence[int], count: int) -> list[int]:
    """`count` of the steps, evenly, with the first and the last."""
    if count == 1:
        return [steps[-1]]
    return [steps[i * (len(steps) - 1) // max(count - 1, 1)] for i in range(count)]
