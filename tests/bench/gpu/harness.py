"""Holds what a stage runs on: its device and sizes, the clock, and forks with a result."""

import contextlib
import gc
import json
import os
import runpy
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
Row = dict[str, Any]
Cases = Iterator[tuple[Row, Callable[[], Row]]]  # what a case is about, and the call that measures it


@dataclass(frozen=True)
class Setting:
    """The device, the sizes and the type that the stages measure with."""

    device: torch.device
    dtype: torch.dtype
    tokens: int  # of a pack
    lengths: tuple[int, int]  # of its sequences, from and to
    rounds: int  # timed repetitions
    peak: float  # FLOP/s of the device, dense
    dry: bool  # tiny shapes: the times say nothing
    out: Path  # folder of the results

    @property
    def cuda(self) -> bool:
        """Return whether there is a device besides the host."""
        return self.device.type == "cuda"


def setting_of(device: str, out: Path, *, dry: bool, rounds: int, peak: float) -> Setting:
    """Return the sizes of a measurement, or of a dry run."""
    on_cuda = device == "cuda"
    return Setting(
        device=torch.device("cuda", 0) if on_cuda else torch.device("cpu"),
        dtype=torch.bfloat16 if on_cuda else torch.float32,
        tokens=48 if dry else 16384,
        lengths=(4, 20) if dry else (256, 4096),
        rounds=1 if dry else rounds,
        peak=peak * 1e12,
        dry=dry,
        out=out,
    )


def now(setting: Setting) -> float:
    """Return the seconds of a clock, when all that was started on the device is done."""
    if setting.cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(setting: Setting, call: Callable[[], object]) -> float:
    """Return the median seconds of the rounds, after one that compiles and warms up."""
    call()
    found = []
    for _ in range(setting.rounds):
        began = now(setting)
        call()
        found.append(now(setting) - began)
    return statistics.median(found)


def forget() -> None:
    """Give back the memory that the last case held on the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def reset_peak(setting: Setting) -> None:
    """Begin to measure the peak of torch's allocator."""
    if setting.cuda:
        torch.cuda.reset_peak_memory_stats()


def peak_gib(setting: Setting) -> float | None:
    """Return the peak of torch's allocator since `reset_peak` [GiB]; None without one."""
    return torch.cuda.max_memory_allocated() / 2**30 if setting.cuda else None


def attempt(call: Callable[[], Row]) -> Row:
    """Return the numbers of a case, or its error in one line: the next case runs in any event."""
    began = time.perf_counter()
    try:
        row = call()
    except torch.cuda.OutOfMemoryError:
        row = {"error": "does not fit into the memory of the device"}
    except Exception as error:
        traceback.print_exc()  # to the log
        row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    with contextlib.suppress(Exception):  # an error that stays with the CUDA context is raised here again
        forget()
    return row | {"took": round(time.perf_counter() - began, 3)}


# ---------- forks within a stage that has not touched the device itself


def forked(*calls: Callable[[], Row]) -> list[Row]:
    """Return the result of each call, all at once, each from a fork of this process."""
    if torch.cuda.is_initialized():
        raise RuntimeError("forked: expected a process that has not touched the device")
    sys.stdout.flush()
    sys.stderr.flush()
    started = []
    for call in calls:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.write(write, json.dumps(attempt(call)).encode())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.close(write)
        started.append((pid, read))
    found = []
    for pid, read in started:
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        found.append(json.loads(text) if text else {"error": f"died with status {status}"})
    return found


def run_script(name: str, given: list[str], log: Path) -> Row:
    """Run a script of train_scripts in this process, a fork, with its output in a file."""
    with log.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.argv = [f"train_scripts/{name}.py", *given]
    sys.path.insert(0, str(ROOT / "train_scripts"))
    try:
        runpy.run_path(str(ROOT / "train_scripts" / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        return {"exit": end.code or 0, "said": log.read_text()[-300:] if end.code else ""}
    sys.stdout.flush()
    return {"exit": 0}
