"""What a run reports: results, progress, timing, trackers, and rows of sampled responses."""

import hashlib
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rft_fn.check import printable
from rft_fn.reward import Judged
from rft_fn.run.files import jsonable, write_whole
from rft_fn.types import Rollout

__all__ = [
    "QUANTILES", "TRACKERS", "Progress", "Timing", "Track", "check", "check_results", "distribution",
    "identity", "response_row", "rows", "start", "table", "track", "write_results",
]  # fmt: skip


# ---------- the results of a script: a table for the terminal, and files of numbers and responses


def table(values: Mapping[str, float], *, title: str, rank: int = 0) -> None:
    """Print names and numbers in two columns, on rank 0."""
    if rank:
        return
    width = max(map(len, values))
    print(printable(title))
    for name, value in values.items():
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        print(printable(f"  {name:<{width}}  {text}"))


def check_results(path: str | Path) -> None:
    """Raise ValueError for a path that `write_results` cannot write to.

    Call it before the evaluation.
    """
    path = Path(path)
    if path.suffix == ".jsonl" or path.is_dir():
        raise ValueError(
            f"out: expected a file such as {path.with_suffix('.json').name} for the numbers (responses go to "
            f"the .jsonl beside it), got {path}"
        )
    if path.with_suffix(".jsonl").exists() and not path.exists():
        raise ValueError(
            f"out: expected a name that no file beside it has, got {path}, where the responses would be "
            f"written over {path.with_suffix('.jsonl').name}; choose another"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: {path.parent} cannot be made: {error.strerror}; choose another") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"out: {path.parent} cannot be written; choose another")


def write_results(path: str | Path, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `result` as a .json file, and `rows` as the .jsonl file of the same name."""
    check_results(path)
    path = Path(path)
    write_whole(path, json.dumps({k: jsonable(v) for k, v in result.items()}, indent=1) + "\n")
    write_whole(path.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows))


# ---------- progress on the terminal: a bar where there is one, lines where the output goes to a file


if TYPE_CHECKING:
    from rich.progress import Progress as Bar


_LINES = 20  # per run, where there is no terminal


class Progress:
    """The progress of a run of `total` steps."""

    def __init__(self, name: str, total: int):
        self.name = name
        self.total = total
        self.bar: Bar | None = None
        self.begin(0)

    def begin(self, step: int) -> None:
        """Count the time from here, with `step` steps done."""
        self.first = step
        self.began = time.perf_counter()

    def show(self, step: int, metrics: Mapping[str, float], tokens_per_s: float) -> None:
        """Show that step number `step` is done, with its reward or else its loss."""
        name = "reward" if "reward/mean" in metrics else "loss"
        value = metrics.get("reward/mean", metrics.get("loss", math.nan))
        text = f"{name} {value:.3f}  {tokens_per_s:,.0f} tok/s"

        done = step + 1
        if sys.stdout.isatty() and sys.stderr.isatty():
            bar = self._started()
            bar.update(bar.task_ids[0], completed=done, note=text)
        elif done == self.total or done % max(self.total // _LINES, 1) == 0:
            per_step = (time.perf_counter() - self.began) / (done - self.first)
            left = per_step * (self.total - done)
            print(f"step {done}/{self.total}  {text}  {left:.0f} s left", flush=True)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        line = printable(line)
        if self.bar is not None:
            self.bar.console.print(line, style="yellow", markup=False, highlight=False)
        else:
            print(line, flush=True)

    def _started(self) -> "Bar":
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
            )
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.bar.add_task(self.name, total=self.total, completed=self.first, note="")
            self.bar.start()
        return self.bar

    def stop(self) -> None:
        """Stop the bar where it is."""
        if self.bar is not None:
            self.bar.stop()


def track(items: Sequence[Any], note: str, *, rank: int = 0) -> Iterable[Any]:
    """Return the items, with a progress bar on rank 0 where there is a terminal."""
    if rank or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track as rich_track

    return rich_track(items, note, console=Console(stderr=True))


# ---------- the seconds of a step, in all and by phase, and the peak of memory


class Timing:
    """Counts the seconds between two rows of timing.jsonl."""

    def __init__(self) -> None:
        self.since = time.perf_counter()  # the last row
        self.phases: dict[str, float] = {}  # seconds since then
        self.beside: dict[str, float] = {}  # seconds since then of work that this process did not wait for

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under `name`, on a GPU with the work that it began there."""
        before = time.perf_counter()
        try:
            yield
            # else the seconds are those of the next phase that reads a number; after an error it may hang
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - before

    def row(self, tokens: int) -> dict[str, float]:
        """Return the row of a step that processed `tokens`; the next one is counted from here."""
        now = time.perf_counter()
        seconds = now - self.since
        row = {
            "seconds": seconds,
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "peak_gib": _peak_gib(),
        }
        row |= {f"phase/{name}": x for name, x in self.phases.items()}
        row |= {f"beside/{name}": x for name, x in self.beside.items()}
        self.since = now
        self.phases = {}
        self.beside = {}
        return row


def _peak_gib() -> float:
    """Return the peak memory of this process [GiB]: of its GPU, or without one of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    # macOS counts bytes, Linux KiB
    unit = 30 if sys.platform == "darwin" else 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**unit


# ---------- trackers by name: each is a function that takes a step and its metrics


Track = Callable[[int, Mapping[str, float]], None]


def identity(folder: Path) -> str:
    """Return the id of a run at a tracker: its folder's name and a digest of the folder's path."""
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=5).hexdigest()
    return f"{folder.resolve().name}-{digest}"


def _tensorboard(folder: Path, pictures: Path, about: Mapping[str, Any]) -> Track:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(pictures / "tensorboard"))

    def track(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(folder: Path, pictures: Path, about: Mapping[str, Any]) -> Track:
    client = importlib.import_module("wandb")
    return _logged(client.init(**about, dir=str(pictures), id=identity(folder), resume="allow"))


def _trackio(folder: Path, pictures: Path, about: Mapping[str, Any]) -> Track:
    client = importlib.import_module("trackio")
    return _logged(client.init(**about, resume="allow"))


def _logged(run: Any) -> Track:
    """Return the Track of a client's run; wandb and trackio share their interface."""

    def track(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return track


# the packages are optional, so each is imported when it is asked for
TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def check(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker that is not known or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"trackers: expected some of {', '.join(TRACKERS)}, got {name!r}")
        if not _installed(name):
            raise ValueError(
                f"trackers: {name} is not installed; pip install {name}, or leave it out of --trackers"
            )


def _installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def start(
    names: Sequence[str], folder: Path, pictures: Path, config: Mapping[str, Any], project: str, name: str
) -> list[Track]:
    """Start the trackers of a run, under `name` or else the name of its folder."""
    about = {"project": project, "name": name or folder.name, "config": dict(config)}
    return [TRACKERS[x](folder, pictures, about) for x in names]


# ---------- sampled responses with their rewards, to be read


QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The quantiles of `distribution`."""


def distribution(step: int, rollout: Rollout, judged: Judged) -> dict[str, Any]:
    """Return the `QUANTILES` of the lengths [tokens] and rewards of a step's responses, as a row."""
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    row: dict[str, Any] = {"step": step}
    for name, x in (("length", rollout.mask.sum(-1)), ("reward", judged.reward.flatten())):
        finite = x.double()[x.double().isfinite()]
        if len(finite):
            row[name] = finite.quantile(levels).tolist()
    return row


def response_row(prompt: Any, response: str) -> dict[str, Any]:
    """Return a prompt and a response to it, with the names of the prompt's media if it has any."""
    row: dict[str, Any] = {"prompt": prompt.text, "response": response}
    names = getattr(prompt, "media_names", ())
    if names:
        row["media"] = list(names)
    return row


def rows(
    step: int, prompts: Sequence[Any], judged: Judged, *, count: int, split: str
) -> list[dict[str, Any]]:
    """Return a row for every prompt of the first `count`: its first response, with the rewards.

    `split` is "train", or the name that other rows carry. A conversation of several turns is whole in the
    column of that name, where the rewards have it. Numbers that do not apply to a response (NaN) are left
    out.
    """
    found = []
    group = judged.reward.shape[1]
    for i, prompt in enumerate(prompts[:count]):
        first = i * group  # the row of its first response
        row = {"step": step, **response_row(prompt, judged.texts[first])}
        row["reward"] = float(judged.reward[i, 0])
        if split != "train":
            row["split"] = split
        numbers = {**judged.parts, **judged.metrics}
        row |= {name: float(x[i, 0]) for name, x in numbers.items() if not x[i, 0].isnan()}
        row |= {name: values[first] for name, values in judged.extra.items()}
        found.append(row)
    return found
