"""The two ends of a transfer of weights in processes of their own, which a test kills.

Run as a program it reads a line for each process that it forks off: `serve PHASE KIND` or
`send SERVER SECONDS KIND PARTS`, where the kind is that of the fake server.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import tiny
import torch
from fake_server import FakeServer, serving

import rft_fn as rft
from rft_fn import engine, rng
from rft_fn.engine.engine_groups import TorchGroups
from rft_fn.engine.server_protocol import Client
from rft_fn.engine.weight_channel import Parcel
from rft_fn.engine.weight_sender import Senders

__all__ = ["gone", "holds", "left_out", "load", "parcel", "processes", "samples"]

PROMPTS = [[3, 4, 5, 6, 7], [8, 9]]
KEYS = [rng.fold_in(0, i) for i in range(2)]
SAMPLING = rft.Sampling(max_new=5)


def load(eng, seed, version=1):
    return eng.load(tiny.llama(seed).named_parameters(), version=version)


def samples(eng, seed):
    """Whether the rollouts are those of the weights of this seed."""
    want = engine.hf(tiny.llama(seed), tiny.tokenizer()).generate(PROMPTS, KEYS, sampling=SAMPLING)
    got = eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
    return torch.equal(got.tokens, want.tokens) and bool((got.logp - want.logp).abs().max() < 1e-5)


def holds(server, seed):
    """Whether a server has just these weights."""
    own = dict(server.lm.named_parameters())
    return all(torch.equal(own[name], x) for name, x in tiny.llama(seed).named_parameters())


def left_out(eng, pid, well):
    """Whether a server that is killed in a load is given up, and the other one has the weights."""
    began = time.monotonic()
    load(eng, 5)
    assert time.monotonic() - began < 10
    gone(pid)
    return holds(well, 5) and samples(eng, 5)


def parcel(seed):
    """The weights of a model, as the first rank has collected them."""
    found = Parcel()
    for name, x in tiny.llama(seed).named_parameters():
        found.add(name, x)
    found.finish({})
    return found


def serve(path, kind="rft"):
    """A server that is killed as a phase begins."""
    fake = FakeServer(tiny.llama(), tiny.tokenizer(), transfer=kind)
    fake.phase = path, lambda: os.kill(os.getpid(), signal.SIGKILL)
    with serving(fake):
        print(os.getpid(), fake.url, flush=True)
        time.sleep(60)


def send(url, seconds, kind="rft", parts=1):
    """A trainer that sends one load."""
    print(os.getpid(), flush=True)
    sender = (Senders if kind == "rft" else TorchGroups)(Client(), float(seconds))
    if kind == "rft":
        sender.parts[url] = int(parts)
    sender.send(url, parcel(6), "other:1")


@contextmanager
def processes():
    """Yield a function that starts a process by a line of words, and returns what it says first."""
    here = Path(__file__).parent
    path = os.pathsep.join(str(x) for x in (here, here.parent, *sys.path) if x)
    with subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    ) as process:

        def begin(*words):
            print(*words, file=process.stdin, flush=True)
            return process.stdout.readline().split()

        yield begin
        process.kill()


def gone(pid):
    """Wait for the end of a process."""
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child waits for its end to be read
    tiny.llama()  # imports are made once
    for line in sys.stdin:
        what, *words = line.split()
        if not os.fork():
            {"serve": serve, "send": send}[what](*words)
            os._exit(0)
