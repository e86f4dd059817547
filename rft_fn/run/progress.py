"""The progress of a run: a bar or lines, the seconds of each step, the peak of memory."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rft_fn.model.bounds import COUNTS
from rft_fn.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "Timing", "idle", "track"]


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

    def show(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Show that step number `step` is done, with its reward or else its loss, and its `Timing.row`."""
        name = "reward" if "reward/mean" in metrics else "loss"
        value = metrics.get("reward/mean", metrics.get("loss", math.nan))
        text = f"{name} {value:.3f}  {timing['tokens_per_s']:,.0f} tok/s"
        if timing.get("computed", 1.0) < 1:
            text += f", {timing['computed']:.0%} computed"

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


class Timing:
    """Counts the seconds between two rows of timing.jsonl."""

    def __init__(self) -> None:
        self.since = time.perf_counter()  # the last row
        self.counts = replace(COUNTS)  # of tokens up to then
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
        row["idle"] = idle(row)
        # beginnings that rows have in common are computed once
        if read := COUNTS.read - self.counts.read:
            row["computed"] = (COUNTS.computed - self.counts.computed) / read
        self.since = now
        self.counts = replace(COUNTS)
        self.phases = {}
        self.beside = {}
        return row


_WAITS = ("judge", "sync", "save")  # phases in which the device has nothing to compute


def idle(row: Mapping[str, float]) -> float:
    """Return the share of a step, a row of timing.jsonl, in which neither sampling nor training computes.

    It waits for rewards, the transfer of weights or a checkpoint, or is outside of all phases, for data and
    reports. An engine that works beside the phases computes as long as it works. Rewards that are models on
    the device count as waited for.
    """
    seconds = row["seconds"]
    phases = {name: x for name, x in row.items() if name.startswith("phase/")}
    waited = seconds - sum(x for name, x in phases.items() if name.removeprefix("phase/") not in _WAITS)
    return max(min(waited, seconds - row.get("beside/engine", 0.0)), 0.0) / max(seconds, 1e-9)


def _peak_gib() -> float:
    """Return the peak memory of this process [GiB]: of its GPU, or without one of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    # macOS counts bytes, Linux KiB
    unit = 30 if sys.platform == "darwin" else 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**unit
