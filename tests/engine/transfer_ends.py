"""The two ends of a transfer of weights in processes of their own, which a test kills.

Run as a program it reads a line for each process that it forks off: `serve PHASE` or `send SERVER SECONDS`.
"""

import os
import signal
import sys
import time

import tiny
from fake_server import FakeServer, serving

from rft_fn.engine.server_protocol import Client
from rft_fn.engine.weight_channel import Parcel
from rft_fn.engine.weight_sender import Senders

__all__ = ["parcel"]


def parcel(seed):
    """The weights of a model, as the first rank has collected them."""
    found = Parcel()
    for name, x in tiny.llama(seed).named_parameters():
        found.add(name, x)
    found.finish({})
    return found


def serve(path):
    """A server that is killed as a phase begins."""
    fake = FakeServer(tiny.llama(), tiny.tokenizer(), transfer="rft")
    fake.phase = path, lambda: os.kill(os.getpid(), signal.SIGKILL)
    with serving(fake):
        print(os.getpid(), fake.url, flush=True)
        time.sleep(60)


def send(url, seconds):
    """A trainer that sends one load."""
    print(os.getpid(), flush=True)
    Senders(Client(), float(seconds)).send(url, parcel(6), "other:1")


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child waits for its end to be read
    tiny.llama()  # imports are made once
    for line in sys.stdin:
        what, *words = line.split()
        if not os.fork():
            {"serve": serve, "send": send}[what](*words)
            os._exit(0)
