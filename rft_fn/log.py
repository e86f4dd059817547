"""What a run leaves behind and what one sees of it: files in its folder, a
progress bar, trackers when asked for.

    runs/NAME/config.json         the arguments
              metrics.jsonl       a row a step, a function of the config alone: a resumed run's is equal
              timing.jsonl        seconds, tokens/s and peak memory, which are not
              trajectories.jsonl  sampled responses with their rewards, to be read
              curve.png  lengths.png  checkpoints/
"""

import dataclasses
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from rft_fn import dist, faults, plot
from rft_fn.types import Rollout

__all__ = ["Run", "cli", "error_line", "table", "track", "write_results"]


def _jsonable(x: Any) -> Any:
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: _jsonable(getattr(x, f.name)) for f in dataclasses.fields(x)}
    return list(x) if isinstance(x, tuple) else x


def _keep_until(path: Path, step: int) -> None:
    """Cut a file of rows back to those before `step`, in one rename; a line that
    a kill cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] < step:
            kept.append(line + "\n")
    tmp = path.with_suffix(".tmp")
    tmp.write_text("".join(kept))
    os.replace(tmp, path)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    out = []
    for name in sorted(set(old) | set(new)):
        a, b = old.get(name), new.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += _differences(a, b, f"{prefix}{name}.")
        elif a != b:
            out.append(f"{prefix}{name} was {a!r} and is {b!r}")
    return out


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
        free: Sequence[str] = (),
        log_dir: str | Path = "",
        plot_every: int = 0,
    ):
        """Make the folder, or go on in it if its steps had the same config but for the fields `free`.

        Pictures and tensorboard files go to `log_dir`, or to the folder; a histogram of response lengths
        every `plot_every` steps (0: only at the end).

        ValueError, before anything is computed, for a folder that cannot be written or that holds another
        run.
        """
        self.folder, self.total, self.main = Path(folder), total, rank == 0
        self.pictures, self._plot_every = Path(log_dir or folder), plot_every
        faults.keep(self.folder)
        self.config, self._free = _jsonable(config), {"out", *free}  # a folder may be moved
        self._trackers: list[Callable[[int, Mapping[str, float]], None]] = []
        self._bar: Any = None
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._start = 0
        self._clock = self._began = time.perf_counter()
        if lines := dist.differences({"config": json.dumps(self.config, default=str)}):
            raise ValueError(f"ranks: expected the same config on all: {lines[0]}")
        if self.main:
            self._claim()
            self.pictures.mkdir(parents=True, exist_ok=True)
            self._trackers = [_TRACKERS[_known(name)](self.pictures, self.config) for name in trackers]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _claim(self) -> None:
        path = self.folder / "config.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".probe"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"run folder {self.folder} cannot be written: {error.strerror}; choose another with --out"
            ) from error
        # a command that stopped at its preflight has claimed nothing: the mended one may be another
        if path.exists() and (self.folder / "metrics.jsonl").exists():
            changed = _differences(
                _without(json.loads(path.read_text()), self._free), _without(self.config, self._free)
            )
            if changed:
                raise ValueError(
                    f"run folder {self.folder} holds a run with other arguments: {'; '.join(changed[:4])}; "
                    "give --out another folder, or delete this one to start again"
                )
        path.write_text(json.dumps(self.config, indent=1) + "\n")

    def resume(self, step: int) -> None:
        """Cut the files back to the checkpoint that the run goes on from: `step` steps are done."""
        self._start = step
        if not self.main:
            return
        for name in ("metrics.jsonl", "timing.jsonl", "trajectories.jsonl"):
            _keep_until(self.folder / name, step)
        if step:
            print(f"{self.folder}: going on after step {step}", flush=True)
        path = self.folder / "metrics.jsonl"
        self._rewards = (
            [r["reward/mean"] for r in plot.read_metrics(path) if "reward/mean" in r] if path.exists() else []
        )
        self._clock = self._began = time.perf_counter()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a") as f:
            f.write(json.dumps(row) + "\n")

    def write(self, step: int, metrics: Mapping[str, float], *, tokens: int = 0) -> None:
        """One step's metrics to every place; `tokens` were processed since the
        last call. Non-finite values become null."""
        if not self.main:
            return
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        row = {k: float(v) if math.isfinite(v) else None for k, v in metrics.items()}
        timing = {"seconds": seconds, "tokens_per_s": tokens / max(seconds, 1e-9), "peak_gib": _peak_gib()}
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
        """The first response of the first `count` prompts with its reward, one JSON line each;
        and the lengths of all of them, for the picture."""
        self._lengths = rollout.mask.sum(-1).tolist()
        if self.main and self._plot_every and (step + 1) % self._plot_every == 0:
            plot.length_histogram(self._lengths, self.pictures / f"lengths_{step + 1:08d}.png")
        group = judged.reward.shape[1]
        for i, p in enumerate(prompts[:count] if self.main else ()):
            parts = {name: float(part[i, 0]) for name, part in judged.parts.items()}
            row = {
                "prompt": p.text,
                "response": judged.texts[i * group],
                "reward": float(judged.reward[i, 0]),
                **parts,
            }
            self._append("trajectories.jsonl", {"step": step, **row})

    def _show(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        name = "reward" if "reward/mean" in metrics else "loss"
        value = metrics.get("reward/mean", metrics.get("loss", math.nan))
        if sys.stderr.isatty():
            self._progress().update(
                0, completed=step + 1, note=f"{name} {value:.3f}  {timing['tokens_per_s']:,.0f} tok/s"
            )
        elif step + 1 == self.total or (step + 1) % max(self.total // 20, 1) == 0:
            left = (time.perf_counter() - self._began) / (step + 1 - self._start) * (self.total - step - 1)
            print(
                f"step {step + 1}/{self.total}  {name} {value:.3f}  {timing['tokens_per_s']:,.0f} tok/s  "
                f"{left:.0f} s left",
                flush=True,
            )

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

    def finish(self) -> None:
        """Draw the pictures, show the curve in the terminal, and say where everything is."""
        if not self.main:
            return
        if self._bar is not None:
            self._bar.stop()
        if (self.folder / "metrics.jsonl").exists():
            plot.curve(self.folder / "metrics.jsonl", self.pictures / "curve.png", title=self.folder.name)
        if self._lengths:
            plot.length_histogram(self._lengths, self.pictures / "lengths.png")
        if len(self._rewards) > 1:
            last = self._rewards[-10:]
            print(plot.terminal_curve(self._rewards, title="reward"))
            print(f"reward: {sum(last) / len(last):.3f}, the mean of the last {len(last)} steps")
        print(
            f"run: {self.folder}  (metrics.jsonl, trajectories.jsonl)  {self.pictures / 'curve.png'}",
            flush=True,
        )


def _peak_gib() -> float:
    """The most memory that this process has had: of its GPU, or without one of the host [GiB]."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)


def _without(config: Mapping[str, Any], free: set[str]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in free}


def _tensorboard(folder: Path, config: Mapping[str, Any]) -> Callable[[int, Mapping[str, float]], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def track(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(folder: Path, config: Mapping[str, Any]) -> Callable[[int, Mapping[str, float]], None]:
    import wandb

    run = wandb.init(
        project="rft_fn",
        name=folder.name,
        dir=str(folder),
        config=dict(config),
        id=folder.name,
        resume="allow",
    )
    return lambda step, metrics: run.log(dict(metrics), step=step)


def _trackio(folder: Path, config: Mapping[str, Any]) -> Callable[[int, Mapping[str, float]], None]:
    import trackio

    run = trackio.init(project="rft_fn", name=folder.name, config=dict(config), resume="allow")
    return lambda step, metrics: run.log(dict(metrics), step=step)


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def _known(name: str) -> str:
    if name not in _TRACKERS:
        raise ValueError(f"trackers: expected some of {', '.join(_TRACKERS)}, got {name!r}")
    return name


def track(items: Sequence[Any], note: str, *, rank: int = 0) -> Iterable[Any]:
    """The items, with a progress bar on rank 0 where there is a terminal."""
    if rank or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track as rich_track

    return rich_track(items, note, console=Console(stderr=True))


def table(values: Mapping[str, float], *, title: str, rank: int = 0) -> None:
    """Names and numbers for the person at the terminal, on rank 0."""
    if rank:
        return
    width = max(map(len, values))
    print(title)
    for name, value in values.items():
        print(
            f"  {name:<{width}}  {value:.4f}" if isinstance(value, float) else f"  {name:<{width}}  {value}"
        )


def write_results(path: str | Path, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """`result` as a .json, and `rows` as the .jsonl beside it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({k: _jsonable(v) for k, v in result.items()}, indent=1) + "\n")
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def error_line(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def cli(main: Callable[[Any], None], config: type) -> None:
    """Run a script: arguments from the dataclass `config` (tyro), errors of the user's as
    one line and exit code 2. An option of a part, as `--strategy.chunk-size`, may be named without the part
    (`--chunk_size`) where nothing else has the name.

    A mistake in an argument, a file or a reward is a line; with RFT_FN_TRACEBACK=1 it is a traceback.
    Everything else is a bug and keeps its traceback.
    """
    import tyro

    guard(main, tyro.cli(config, args=_qualify(sys.argv[1:], config)))


def _qualify(args: Sequence[str], config: type) -> list[str]:
    """args, with --NAME as --PART.NAME for an option that only one dataclass within `config` has."""
    hints = get_type_hints(config)
    owners = {name: [""] for name in hints}
    for part, hint in hints.items():
        for f in dataclasses.fields(hint) if dataclasses.is_dataclass(hint) else ():
            owners.setdefault(f.name, []).append(f"{part}.")

    def whole(match: re.Match[str]) -> str:
        no, name = match[1] or "", match[2]
        found = owners.get(name.replace("-", "_"), [""])
        return f"--{found[0] if len(found) == 1 else ''}{no}{name}"

    return [re.sub(r"^--(no[-_])?([\w-]+)(?==|$)", whole, arg) for arg in args]


def guard(main: Callable[[Any], None], config: Any) -> None:
    """main(config), with errors as `cli` shows them."""
    try:
        main(config)
    except (ValueError, OSError, ModuleNotFoundError, FloatingPointError) as error:
        if os.environ.get("RFT_FN_TRACEBACK"):
            raise
        fail(error)
    except RuntimeError as error:
        if not faults.is_lost(error):
            raise
        if os.environ.get("RFT_FN_TRACEBACK"):
            traceback.print_exc()
        faults.leave(faults.blame(error=error))


def fail(error: Exception) -> None:
    """One line, and exit code 2. Ranks other than 0 wait before they speak: where all have the same to say,
    rank 0 has said it, and torchrun has stopped them, by then."""
    rank = dist.rank()
    if rank:
        time.sleep(3)
    print(f"error{f' on rank {rank}' if rank else ''}: {error_line(error)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if dist.world() > 1:
        os._exit(2)  # tidying up would wait for the others
    sys.exit(2)
