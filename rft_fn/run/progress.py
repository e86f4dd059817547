"""Progress on the terminal: a bar where there is one, lines where the output goes to a file."""

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rft_fn.check import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "track"]

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
        name = "loss"
        if "reward/mean" in metrics:
            name = "reward"
        value = metrics.get("reward/mean", metrics.get("loss", math.nan))
        text = f"{name} {value:.3f}  {tokens_per_s:,.0f} tok/s"

        done = step + 1
        if sys.stderr.isatty():
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
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.stop()


def track(items: Sequence[Any], note: str, *, rank: int = 0) -> Iterable[Any]:
    """The items, with a progress bar on rank 0 where there is a terminal."""
    if rank or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track as rich_track

    return rich_track(items, note, console=Console(stderr=True))
