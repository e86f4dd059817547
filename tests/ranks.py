"""Functions on several processes over gloo: `run(world, "test_module:function", *args)` -> what each
returned.

Each process, a fork of one that has imported torch, imports the named function of a test module and calls it
with (rank, *args). One process that fails takes the others down; its output is in the error.
"""

import contextlib
import importlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forks
import torch

TESTS = Path(__file__).resolve().parent
FOLDERS = sorted({str(file.parent) for file in TESTS.rglob("test_*.py")})  # of which any may hold a target


def free_port():
    """A port that nobody has, below those that the kernel gives to connections: it stays free until rank 0
    has imported torch."""
    while True:
        port = random.SystemRandom().randrange(16000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def start(world, target, *args, folder, popen=forks.Popen):
    torch.save(args, Path(folder) / "args.pt")
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "kernels"), *FOLDERS, *given])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    shared |= {"PYTHONFAULTHANDLER": "1"}  # a process that dies of a signal says where
    processes = []
    for rank in range(world):
        env_ = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = open(Path(folder) / f"log{rank}", "w")  # noqa: SIM115
        command = [sys.executable, __file__, target, str(folder)]
        processes.append(popen(command, env=env_, stdout=log, stderr=subprocess.STDOUT))
    return processes


def wait(processes, timeout):
    end = time.monotonic() + timeout
    while any(p.poll() is None for p in processes):
        if time.monotonic() > end or any(p.poll() not in (None, 0) for p in processes):
            time.sleep(1)  # the others may still say why
            for p in processes:
                p.kill()
        time.sleep(0.05)
    return [p.wait() for p in processes]


def run(world, target, *args, timeout=800, popen=forks.Popen):
    with tempfile.TemporaryDirectory() as folder:
        codes = wait(start(world, target, *args, folder=folder, popen=popen), timeout)
        if any(codes):
            logs = [
                f"--- rank {r}: {c}\n{(Path(folder) / f'log{r}').read_text()[-9000:]}"
                for r, c in enumerate(codes)
            ]
            raise AssertionError("\n".join(logs))
        return [torch.load(Path(folder) / f"out{r}.pt", weights_only=False) for r in range(world)]


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    module, function = name.split(":")
    args = torch.load(folder / "args.pt", weights_only=False)
    out = getattr(importlib.import_module(module), function)(int(os.environ["RANK"]), *args)
    torch.save(out, folder / f"out{os.environ['RANK']}.pt")
