"""Measure on a GPU all that a CPU cannot show, in two calls of minutes: `make gpu` prints them.

    python tests/bench/gpu/run.py --out runs/gpu               # every stage
    python tests/bench/gpu/run.py --only head bars             # some
    python tests/bench/gpu/run.py --dry --out runs/gpu-dry     # tiny shapes on the CPU; times say nothing

This process imports and never touches the device. Each stage is a fork with a time limit, or a fresh process
where a fork cannot start CUDA, so a crash, a hang or an error that stays with a CUDA context costs one stage.
results.json is written again with every row that a stage measures, and the last lines printed are the table
of what was. Models have Qwen2.5's shapes and random weights: no network is needed.
"""

import argparse
import atexit
import contextlib
import faulthandler
import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
# CUDA must not begin in the process that forks: torch asks the driver's library in place of the runtime
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # nobody waits for a name that is not found
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

from plan import STAGES, Stage, commands, fetch, groups, seconds_of  # noqa: E402

MODULES = ("harness", "checks", "speed", "state")
AUTO = ROOT / "kernels" / "rft_kernels" / "auto.json"

# ---------- a stage is a process


def work(stage: Stage, setting: Any, rows: Path) -> None:
    """Measure the cases of a stage, in its process, and write each row when it is there."""
    import importlib

    import harness
    import torch

    warnings.filterwarnings("ignore", message="engine: about")  # weights are random, and so are their words
    tempfile.tempdir = str(rows.parent)  # which goes with the run, whatever becomes of a stage

    # where a stage is that hangs, and its forks, whose own output may go to files; no thread of faulthandler,
    # for which forks would wait
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(2), "w"))
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


def forked(call: Callable[[], None]) -> int:
    """Return the process of a fork that makes a call and ends with 0, or with 1 and its error."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def fresh(name: str, setting: Any, rows: Path) -> int:
    """Return a new process with a stage, which imports everything again."""
    given = ["--stage", name, "--rows", str(rows), "--out", str(setting.out)]
    given += ["--device", setting.device.type, "--rounds", str(setting.rounds)]
    given += ["--peak", str(setting.peak / 1e12), *(["--dry"] if setting.dry else [])]
    command = [sys.executable, str(HERE / "run.py"), *given]
    return os.posix_spawn(sys.executable, command, os.environ, setsid=True)


TOUCH = "import torch; assert torch.zeros(1, device='cuda').item() == 0"


def starts_cuda(begin: str = TOUCH, *, seconds: float = 60.0) -> Callable[[str, Any, Path], int] | None:
    """Return how to start a process that reaches the device: by a fork, or anew; None if neither does.

    Where the driver's library cannot be asked, whatever asks for the device spoils each later fork.
    """
    pid = forked(lambda: exec(begin))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done and status == 0:
            return fork
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
    print("a fork cannot start CUDA: each stage is a fresh process", flush=True)
    try:
        done = subprocess.run([sys.executable, "-c", begin], timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    return fresh if done.returncode == 0 else None


def fork(name: str, setting: Any, rows: Path) -> int:
    """Return a fork of this process with a stage."""
    return forked(lambda: work(STAGES[name], setting, rows))


class Running:
    """A stage that runs: its process, and the file that its rows go to."""

    def __init__(
        self,
        name: str,
        setting: Any,
        folder: Path,
        seconds: float,
        start: Callable[[str, Any, Path], int] = fork,
    ):
        self.name = name
        self.seconds = seconds
        self.rows = folder / f"{name}.jsonl"
        self.rows.touch()
        self.began = time.perf_counter()
        self.ended: str | None = None
        self.took = 0.0
        self.pid = start(name, setting, self.rows)

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
    names: list[str],
    setting: Any,
    found: dict[str, Any],
    *,
    began: float,
    budget: float,
    scale: float,
    start: Callable[[str, Any, Path], int] = fork,
) -> None:
    """Run groups of stages one after another within a budget of seconds; results.json has all measured.

    A group is killed once it would take from the seconds that are kept for the later ones.
    """
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

    def watch(stages: list[Running]) -> None:
        sizes = dict.fromkeys((stage.name for stage in stages), -1)
        going = list(stages)
        while going:
            for other in beside:
                other.poll()
            for stage in list(going):
                ended = stage.poll()
                size = stage.rows.stat().st_size
                if ended or size != sizes[stage.name]:
                    sizes[stage.name] = size
                    write(stage)
                if ended:
                    going.remove(stage)
                    print(f"== {stage.name}: {stage.ended}, {stage.took:.1f} s", flush=True)
            time.sleep(0.05)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        beside = [
            Running(n, setting, folder, scale * STAGES[n].seconds, start) for n in names if STAGES[n].beside
        ]
        parts = groups(names)
        for number, part in enumerate(parts):
            later = scale * seconds_of(parts[number + 1 :])
            limit = max(min(scale * seconds_of([part]), left()), left() - later)
            if limit < 5:
                for missed in part:
                    found["stages"][missed] = {"limit": 0, "seconds": 0, "rows": []}
                    found["stages"][missed]["ended"] = "left out: the budget is spent"
                write()
                continue
            print(f"== {', '.join(part)}, at most {limit:.0f} s", flush=True)
            watch([Running(n, setting, folder, limit, start) for n in part])
        for stage in beside:
            stage.seconds = min(stage.seconds, time.perf_counter() - stage.began + max(left(), 0))
        watch(beside)


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
    given = ["runs/gpu" if x == str(args.out) else x for x in sys.argv[1:]]  # of no machine
    return {
        "date": date.today().isoformat(),
        "device": device,
        "dry": args.dry,
        "command": shlex.join(["python", "tests/bench/gpu/run.py", *given]),
        "peak_tflops": args.peak,
        "rounds": args.rounds,
        "mfu": f"{models.FORMULA}, over seconds and peak",
        "stages": {},
    }


def summary(found: dict[str, Any]) -> str:
    """Return the table of what was measured, whatever was not."""
    import page

    rows = page.Found(found)
    ran = [[name, x["ended"], x["seconds"], len(x["rows"])] for name, x in found["stages"].items()]
    errors = [
        f"{name}: {row['error'][:200]}"
        for name, x in found["stages"].items()
        for row in x["rows"]
        if "error" in row
    ]
    return "\n".join([page.table(["stage", "", "s", "rows"], ran), "", page.goals(rows), *errors])


def imported() -> None:
    """Import all that the forks need, which takes seconds; what cannot be costs the stages that use it."""
    import importlib

    for name in (*MODULES, "transformers.models.qwen2.modeling_qwen2", "rft_fn.run"):
        try:
            importlib.import_module(name)
        except Exception:
            print(f"{name} cannot be imported:", flush=True)
            traceback.print_exc()


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run the stages; return the results, which the folder has too."""
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.auto is not None and args.auto.exists() and not args.dry:
        shutil.copy(args.auto, AUTO)
        print(f"{AUTO.relative_to(ROOT)}: from {args.auto}", flush=True)
    imported()
    import harness
    import torch

    start = fork
    if args.device == "cuda" and not args.dry:
        if torch.cuda.is_initialized():
            raise SystemExit("run.py: expected imports that leave the device alone, got one that touches it")
        start = starts_cuda()
        if start is None:
            raise SystemExit("run.py: device: expected a CUDA device, got none; --dry runs on a CPU")
    setting = harness.setting_of(
        args.device, args.out.resolve(), dry=args.dry, rounds=args.rounds, peak=args.peak
    )
    found = provenance(args)
    print(f"{found['device']}, imported in {time.perf_counter() - began:.1f} s", flush=True)
    os.chdir(ROOT)
    gc.freeze()  # no fork looks through what was imported
    atexit.register(gc.unfreeze)  # nanobind reports what is not collected at the end
    names = args.only or list(STAGES)
    try:
        run(names, setting, found, began=began, budget=args.budget, scale=args.scale, start=start)
    finally:
        print(summary(found), flush=True)
    made = args.out / "auto.json"
    if args.auto is not None and made.exists() and not args.dry:
        shutil.copy(made, args.auto)
    print(f"{args.out / 'results.json'}: {time.perf_counter() - began:.0f} s", flush=True)
    return found


def one_stage(args: argparse.Namespace) -> None:
    """Run one stage in this process, which was started for it."""
    import harness

    os.chdir(ROOT)
    setting = harness.setting_of(args.device, args.out, dry=args.dry, rounds=args.rounds, peak=args.peak)
    work(STAGES[args.stage], setting, args.rows)


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
    parser.add_argument("--auto", type=Path, help="auto.json of an earlier call, and for a later one")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)  # by a run itself
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
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
    if chosen.stage:
        one_stage(chosen)
    elif not (chosen.fetch or chosen.commands):
        main(chosen)
