"""The folder of a run: what it leaves behind, and what the same command finds there when it starts again.

runs/NAME/config.json         the options, of the last start that changed some
          overrides.jsonl     options that changed the mathematics in mid-run, with the step of the change
          metrics.jsonl       a row a step, a function of the config alone: a resumed run's is equal
          timing.jsonl        seconds, in all and by phase, tokens/s and peak memory
          trajectories.jsonl  sampled responses with their rewards, to be read
          curve.png  lengths.png  phases.png  checkpoints/
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rft_fn import check, dist
from rft_fn.run import lock, plot, signals
from rft_fn.run import trackers as trackers_lib
from rft_fn.run.files import append, differences, jsonable, keep_until, write_whole
from rft_fn.types import Rollout, Session

__all__ = ["Run", "last_model", "settings"]


def settings(folder: str | Path) -> dict[str, Any]:
    """The options of the run in a folder. ValueError if there is none, or if its config.json is damaged."""
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("expected an object")
        return found
    except FileNotFoundError:
        raise ValueError(f"run: expected the folder of a run, got {folder}: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"run folder {folder}: config.json is damaged ({error}); delete that file to continue with the "
            "options of this command, or put back a copy"
        ) from error


def last_model(name: str) -> str:
    """A model's name; of the folder of a run the model that it left. ValueError if it has left none."""
    folder = Path(name)
    if not (folder / "metrics.jsonl").is_file():
        return name
    if not (folder / "model").is_dir():
        raise ValueError(
            f"model: the run {folder} has left no model yet; python train_scripts/export.py {folder} makes "
            "one of its newest checkpoint"
        )
    return str(folder / "model")


class Run:
    """The folder of a run. On rank 0 it writes; on other ranks it does nothing."""

    def __init__(
        self,
        folder: str | Path,
        config: Any,
        *,
        total: int,
        rank: int = 0,
        trackers: Sequence[str] = (),
        project: str = "rft_fn",
        name: str = "",
        free: Sequence[str] = (),
        override: bool = False,
        log_dir: str | Path = "",
        plot_every: int = 0,
        session: Session | None = None,
    ):
        """Make the folder and lock it, or continue the run in it.

        A run may continue with other values of the options that are `check.Free` in the config's class or
        named in `free`; with `override` any may change, and what changed is noted in overrides.jsonl.
        Pictures and tensorboard files go to `log_dir`, or to the folder; a histogram of response lengths
        every `plot_every` steps (0: only at the end). `project` and `name` are what trackers show. Dumps of
        gradients that are not finite go to the folder too, with the `session` of the run's strategy.

        ValueError on every rank, before anything is computed, for a folder that cannot be written, that
        another process is using, or that holds another run, and for a tracker that is not installed.
        """
        self.folder, self.total, self.main = Path(folder), total, rank == 0
        self.pictures, self._plot_every = Path(log_dir or folder), plot_every
        self._watch = nullcontext
        if session is not None:
            session.set_dump_dir(self.folder)
            self._watch = session.watch
        self.config = jsonable(config)
        self._free = {"out", "override", *free}
        self._free |= check.free(type(config)) if dataclasses.is_dataclass(config) else set()
        self._changed: dict[str, tuple] = {}
        self._trackers: list[trackers_lib.Track] = []
        self._bar: Any = None
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._phases: dict[str, float] = {}
        self._start = 0
        self._clock = self._began = time.perf_counter()
        with self._watch():
            lines = dist.differences({"config": json.dumps(self.config, default=str)})
        if lines:
            raise ValueError(f"ranks: expected the same config on all: {lines[0]}")

        def begin() -> None:
            trackers_lib.check(trackers)
            self._claim(override)
            self.pictures.mkdir(parents=True, exist_ok=True)
            self._trackers = trackers_lib.start(
                trackers, self.folder, self.pictures, self.config, project, name
            )

        self._on_rank_0(begin)

    def _on_rank_0(self, act: Callable[[], None]) -> None:
        """Do it on rank 0; every rank raises what went wrong there."""
        error = None
        if self.main:
            try:
                act()
            except (ValueError, OSError) as found:
                error = found
        text = None
        if error is not None:
            text = str(error)
        with self._watch():
            line = dist.all_gather_object(text)[0]
        if error is not None:
            raise error
        if line is not None and not self.main:
            raise ValueError(line)

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.folder / "checkpoints"

    def _claim(self, override: bool) -> None:
        """Take the folder: writable, locked, and of this run or none."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / ".probe", "")
            (self.folder / ".probe").unlink()
        except OSError as error:
            raise ValueError(
                f"run folder {self.folder} cannot be written: {error.strerror}; choose another with --out"
            ) from error
        lock.acquire(self.folder)
        try:
            self._compare(override)
        except ValueError:
            lock.release(self.folder)
            raise

    def _compare(self, override: bool) -> None:
        """Refuse another run than the one whose steps are here; write the config where there are none."""
        path = self.folder / "config.json"
        # a command that stopped at its preflight has claimed nothing: the mended one may be another
        if not (self.folder / "metrics.jsonl").exists() or not path.exists():
            self._write_config()
            return
        changed = differences(settings(self.folder), self.config)
        self._changed = {name: pair for name, pair in changed.items() if name not in self._free}
        if self._changed and not override:
            named = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in self._changed.items()]
            raise ValueError(
                f"run folder {self.folder} holds a run with other arguments: {'; '.join(named[:4])}; "
                "give --override to continue it with these, --out another folder, or delete this one to "
                "start again"
            )

    def _write_config(self) -> None:
        path, text = self.folder / "config.json", json.dumps(self.config, indent=1) + "\n"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text)

    def resume(self, step: int) -> None:
        """Cut the files back to the checkpoint that the run continues from: `step` steps are done.

        ValueError if there were checkpoints and none is left: the rows of the run are not wiped for that.
        """
        self._start = step
        self._on_rank_0(lambda: self._take_up(step))
        signals.enter_steps()
        self._phases = {}
        self._clock = self._began = time.perf_counter()

    def _take_up(self, step: int) -> None:
        if step == 0 and (self.folder / ".saved").exists():
            raise ValueError(
                f"run folder {self.folder}: its steps are here, but no checkpoint is left in "
                f"{self.checkpoints}; put that folder back, give --out another folder, or delete this one to "
                "start again"
            )
        for name in ("metrics.jsonl", "timing.jsonl", "trajectories.jsonl"):
            keep_until(self.folder / name, step)
        # the changes are noted before the config has them: a kill between the two notes them again
        for name, (old, new) in self._changed.items():
            self._append("overrides.jsonl", {"step": step, "name": name, "old": old, "new": new})
        self._write_config()
        if step:
            print(f"{self.folder}: continuing after step {step}", flush=True)
        path = self.folder / "metrics.jsonl"
        rows = plot.read_metrics(path) if path.exists() else []
        self._rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under `name` in the step's row of timing.jsonl."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - before

    def stopping(self) -> bool:
        """Whether a signal asked any process to stop: the same on every rank, which all ask once a step."""
        with self._watch():
            return bool(signals.stopping())

    def stop(self, step: int) -> None:
        """End the process after its last checkpoint, of `step` steps: raises `Stopped`."""
        self._mark_saved()
        self._close()
        where = f" after step {step}; the same command continues from there"
        raise signals.Stopped(signals.asked(), where)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        append(self.folder / name, json.dumps(row) + "\n")

    def _mark_saved(self) -> None:
        """Note that a checkpoint exists: from then on the rows are worth more than a fresh start."""
        marker = self.folder / ".saved"
        if self.main and not marker.exists() and any(self.checkpoints.glob("step_*")):
            write_whole(marker, "")

    def write(self, step: int, metrics: Mapping[str, float], *, tokens: int = 0) -> None:
        """One step's metrics to every place; `tokens` were processed since the last call.

        Non-finite values become null. The seconds of a phase after this call (a checkpoint's) are in the row
        of the next step.
        """
        if not self.main:
            return
        self._mark_saved()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        row = {k: float(v) if math.isfinite(v) else None for k, v in metrics.items()}
        timing = {"seconds": seconds, "tokens_per_s": tokens / max(seconds, 1e-9), "peak_gib": _peak_gib()}
        timing |= {f"phase/{name}": x for name, x in self._phases.items()}
        self._phases = {}
        self._append("metrics.jsonl", {"step": step, **row})
        self._append("timing.jsonl", {"step": step, **timing})
        for track in self._trackers:
            track(step, {**metrics, **{f"time/{k}": v for k, v in timing.items()}})
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        self._show(step, metrics, timing)

    def trajectories(
        self, step: int, prompts: Sequence[Any], rollout: Rollout, judged: Any, *, count: int = 4
    ) -> None:
        """The first response of the first `count` prompts with its reward, one JSON line each.

        The lengths of all responses are kept for the picture.
        """
        self._lengths = rollout.mask.sum(-1).tolist()
        if not self.main:
            return
        if self._plot_every and (step + 1) % self._plot_every == 0:
            plot.length_histogram(self._lengths, self.pictures / f"lengths_{step + 1:08d}.png")
        group = judged.reward.shape[1]
        for i, p in enumerate(prompts[:count]):
            row = {
                "prompt": p.text,
                "response": judged.texts[i * group],
                "reward": float(judged.reward[i, 0]),
            }
            numbers = {**judged.parts, **judged.metrics}
            row |= {name: float(x[i, 0]) for name, x in numbers.items() if not x[i, 0].isnan()}
            row |= {name: values[i * group] for name, values in judged.extra.items()}
            self._append("trajectories.jsonl", {"step": step, **row})

    def _show(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        name = "reward" if "reward/mean" in metrics else "loss"
        value = metrics.get("reward/mean", metrics.get("loss", math.nan))
        speed = f"{timing['tokens_per_s']:,.0f} tok/s"
        if sys.stderr.isatty():
            self._progress().update(0, completed=step + 1, note=f"{name} {value:.3f}  {speed}")
        elif step + 1 == self.total or (step + 1) % max(self.total // 20, 1) == 0:
            left = (time.perf_counter() - self._began) / (step + 1 - self._start) * (self.total - step - 1)
            print(f"step {step + 1}/{self.total}  {name} {value:.3f}  {speed}  {left:.0f} s left", flush=True)

    def _progress(self) -> Any:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.add_task(self.folder.name, total=self.total, completed=self._start, note="")
            self._bar.start()
        return self._bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.main:
            lock.release(self.folder)

    def finish(self) -> None:
        """Draw the pictures, show the curve in the terminal, name the files, and unlock the folder."""
        self._mark_saved()
        self._close()
        if not self.main:
            return
        if (self.folder / "metrics.jsonl").exists():
            plot.curve(self.folder / "metrics.jsonl", self.pictures / "curve.png", title=self.folder.name)
            plot.phases(self.folder / "timing.jsonl", self.pictures / "phases.png")
        if self._lengths:
            plot.length_histogram(self._lengths, self.pictures / "lengths.png")
        if len(self._rewards) > 1:
            last = self._rewards[-10:]
            print(plot.terminal_curve(self._rewards, title="reward"))
            print(f"reward: {sum(last) / len(last):.3f}, the mean of the last {len(last)} steps")
        picture = self.pictures / "curve.png"
        print(f"run: {self.folder}  (metrics.jsonl, trajectories.jsonl)  {picture}", flush=True)


def _peak_gib() -> float:
    """The most memory that this process has had: of its GPU, or without one of the host [GiB]."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    unit = 30 if sys.platform == "darwin" else 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**unit
