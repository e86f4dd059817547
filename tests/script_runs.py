"""Runs of scripts: their processes, what they wrote, and what is left out of runs at which no test looks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import forks
from ranks import free_port

__all__ = ["ROOT", "alone", "leave_out", "rows", "run", "start"]

ROOT = Path(__file__).resolve().parents[1]
SILENT = ("curve", "length_histogram", "phases", "reliability")


def start(script, *args, world=1, restarts=0, interrupted=(), whole=False, **options):
    """Start the process of a script, or torchrun.

    `interrupted` is (signal, step, seconds), see interrupted.py. Only a whole run draws curves, forecasts its
    memory and has a canary.
    """
    env = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": forks.PATH, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable]
    if world > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", world, "--max-restarts", restarts]
        command += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    if interrupted:
        number, *when = interrupted
        command += [ROOT / "tests" / "scripts" / "interrupted.py", int(number), *when]
    command += [ROOT / "train_scripts" / f"{script}.py", *args]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    options["env"] = env | ({} if whole else forks.PLAIN) | options.get("env", {})
    return forks.Popen([str(x) for x in command], text=True, **options)


def run(script, *args, code=0, **options):
    """Run a script to its end: what it printed, or its errors where another code is expected."""
    process = start(script, *args, **options)
    out, err = process.communicate(timeout=800)
    assert process.returncode == code, out + err[-6000:]
    return out if code == 0 else err


def alone(code, *args):
    """Run code in another process, which can import what the tests of this one can."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, args)]
    return forks.run(command, capture_output=True, text=True, timeout=600, env=env)


def rows(folder, name="metrics.jsonl"):
    """The lines of a file that a run wrote."""
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def comparable(folder):
    """The metrics of a run without the noise of its gradients: one pack in all has no estimate of it."""
    return [
        {k: x for k, x in row.items() if k not in ("grad/snr", "grad/noise_scale")} for row in rows(folder)
    ]


# ---------- what is left out: it takes most of a short run


def nothing(*_, **__):
    """What a part does that is left out."""


def only_sent(st, state, engine, *_, version, **__):
    """`sync.canary` without its noise: the engine has the weights."""
    sync = importlib.import_module("rft_fn.sync")
    sync.push(st, state, engine, version=version)
    return sync.Probe(noisy=0.0, floor=0.0, seconds=0.0, key=0)


def leave_out(put=setattr):
    """Scripts draw no curves, forecast no memory and have no canary from now on.

    Gives (owner, name, function) of each part, to put it back.
    """
    instead = {f"run.plot.{name}": nothing for name in SILENT}
    instead |= {"run.opening.print_preflight": nothing, "sync.canary": only_sent}
    parts = []
    for path, function in instead.items():
        module, _, name = path.rpartition(".")
        owner = importlib.import_module(f"rft_fn.{module}")
        parts.append((owner, name, getattr(owner, name)))
        put(owner, name, function)
    return parts
