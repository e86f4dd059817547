"""Measure on a GPU all that a CPU cannot show, in two calls of minutes: `make gpu` prints them.

    python tests/bench/gpu/run.py --out runs/gpu               # every stage
    python tests/bench/gpu/run.py --only head bars             # some
    python tests/bench/gpu/run.py --dry --out runs/gpu-dry     # tiny shapes on the CPU; times say nothing

This process imports and never touches the device. Each stage is a fork with a time limit, so a crash, a hang
or an error that stays with a CUDA context costs one stage. results.json is written again with every row that
a stage measures. Models have Qwen2.5's shapes and random weights: no network is needed.
"""

import argparse
import atexit
import contextlib
import faulthandler
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
# CUDA must not begin in the process that forks: torch asks the driver's library in place of the runtime
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

from plan import STAGES, Stage, commands, fetch  # noqa: E402

# ---------- a stage is a fork


def work(stage: Stage, setting: Any, rows: Path) -> None:
    """Measure the cases of a stage, in its process, and write each row when it is there."""
    import importlib

    import harness
    import torch

    warnings.filterwarnings("ignore", message="engine: about")  # weights are random, and so are their words
    tempfile.tempdir = str(rows.parent)  # which goes with the run, whatever becomes of a stage

    # where a stage is that hangs; no thread of faulthandler, for which forks would wait
    faulthandler.register(signal.SIGUSR1)
    if stage.beside:
        os.nice(10)
        torch.set_num_threads(1)
    module, name = stage.function.split(".")
    with rows.open("a") as file:
        for about, call in getattr(importlib.import_module(module), name)(setting):
            row = about | harness.attempt(call)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(shown(row), flush=True)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # an error that stays ends the stage


def shown(row: dict[str, Any]) -> str:
    """Return a row as one line of text, without what is long."""
    words = []
    for name, value in row.items():
        if not isinstance(value, dict | list) or len(str(value)) <= 60:
            words.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join(words)


class Running:
    """A stage that runs: its process, and the file that its rows go to."""

    def __init__(self, name: str, setting: Any, folder: Path, seconds: float):
        self.name = name
        self.seconds = seconds
        self.rows = folder / f"{name}.jsonl"
        self.rows.touch()
        self.began = time.perf_counter()
        self.ended: str | None = None
        self.took = 0.0
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                work(STAGES[name], setting, self.rows)
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def poll(self) -> bool:
        """Return whether the stage has ended; kill it, and all that it started, where its time is over."""
        if self.ended is not None:
            return True
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.took = time.perf_counter() - self.began
        if pid:
            self.ended = "whole" if status == 0 else f"died: {said(status)}"
        elif self.took > self.seconds:
            self.ended = f"killed after {self.seconds:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGUSR1)  # its processes say where they are
            time.sleep(0.3)
        if self.ended is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if not pid:
                self.reap()
        return self.ended is not None

    def reap(self) -> None:
        """Wait for a killed process, but not for one that the driver holds."""
        for _ in range(50):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return
            time.sleep(0.1)

    def result(self) -> dict[str, Any]:
        """Return what the stage has measured so far."""
        lines = self.rows.read_text().split("\n")[:-1]
        found = {"limit": self.seconds, "seconds": round(self.took, 1), "ended": self.ended or "runs"}
        return found | {"rows": [json.loads(line) for line in lines]}


def said(status: int) -> str:
    """Return why a process ended, by its wait status."""
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def run(
    names: list[str], setting: Any, found: dict[str, Any], *, began: float, budget: float, scale: float
) -> None:
    """Run stages one after another within a budget of seconds; results.json has all that is measured."""
    file = setting.out / "results.json"
    beside: list[Running] = []

    def left() -> float:
        return budget - (time.perf_counter() - began)

    def write(*stages: Running) -> None:
        for stage in stages:
            found["stages"][stage.name] = stage.result()
        part = file.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(file)

    def watch(stage: Running) -> None:
        size = -1
        while not stage.poll():
            for other in beside:
                other.poll()
            if stage.rows.stat().st_size != size:
                size = stage.rows.stat().st_size
                write(stage)
            time.sleep(0.05)
        write(stage)
        print(f"== {stage.name}: {stage.ended}, {stage.took:.1f} s", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        beside = [Running(n, setting, folder, scale * STAGES[n].seconds) for n in names if STAGES[n].beside]
        for name in names:
            if STAGES[name].beside:
                continue
            limit = min(scale * STAGES[name].seconds, left())
            if limit < 5:
                found["stages"][name] = {"limit": 0, "seconds": 0, "ended": "left out: the budget is spent"}
                found["stages"][name]["rows"] = []
                write()
                continue
            print(f"== {name}, at most {limit:.0f} s", flush=True)
            watch(Running(name, setting, folder, limit))
        for stage in beside:
            stage.seconds = min(stage.seconds, time.perf_counter() - stage.began + max(left(), 0))
            watch(stage)


# ---------- a run


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Return when, where and how something is measured; the device by its driver's program."""
    import models

    device = "cpu"
    if args.device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            device = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()[0].strip()
        except (OSError, IndexError):
            device = "cuda"
    return {
        "date": date.today().isoformat(),
        "device": device,
        "dry": args.dry,
        "command": shlex.join(["python", "tests/bench/gpu/run.py", *sys.argv[1:]]),
        "peak_tflops": args.peak,
        "rounds": args.rounds,
        "mfu": f"{models.FORMULA}, over seconds and peak",
        "stages": {},
    }


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run the stages; return the results, which the folder has too."""
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)

    # all that the forks need: an import takes seconds, a fork does not
    import checks  # noqa: F401
    import harness
    import speed  # noqa: F401
    import state  # noqa: F401
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import rft_fn.run  # noqa: F401

    if args.device == "cuda" and not args.dry and not torch.cuda.is_available():
        raise SystemExit("run.py: device: expected a CUDA device, got none; --dry runs on a CPU")
    if torch.cuda.is_initialized():
        raise SystemExit("run.py: expected imports that leave the device alone, got one that touches it")
    setting = harness.setting_of(
        args.device, args.out.resolve(), dry=args.dry, rounds=args.rounds, peak=args.peak
    )
    found = provenance(args)
    print(f"{found['device']}, imported in {time.perf_counter() - began:.1f} s", flush=True)
    os.chdir(ROOT)
    gc.freeze()  # no fork looks through what was imported
    atexit.register(gc.unfreeze)  # nanobind reports what is not collected at the end
    names = args.only or list(STAGES)
    run(names, setting, found, began=began, budget=args.budget, scale=args.scale)
    print(f"{args.out / 'results.json'}: {time.perf_counter() - began:.0f} s", flush=True)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(STAGES), metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument(
        "--budget",
        type=float,
        default=580.0,
        help="seconds of all stages together; a dry run has 10 times as many",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="times the time limit of each stage; a dry run has 10 times as much",
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed repetitions")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the device; an H100's in bf16")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on the CPU unless --device cuda")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda, and cpu in a dry run")
    parser.add_argument("--commands", action="store_true", help="print the two command lines, and end")
    parser.add_argument("--fetch", action="store_true", help="fetch the wheels that they carry, and end")
    args = parser.parse_args(given)
    args.device = args.device or ("cpu" if args.dry else "cuda")
    if args.dry:  # on a machine with other work
        args.scale, args.budget = 10 * args.scale, 10 * args.budget
    if args.device == "cpu" and not args.dry:
        parser.error("--device: expected cuda, got cpu; --dry runs on a CPU")
    return args


if __name__ == "__main__":
    chosen = arguments()
    if chosen.fetch:
        fetch()
    if chosen.commands:
        print(commands())
    if not (chosen.fetch or chosen.commands):
        main(chosen)
