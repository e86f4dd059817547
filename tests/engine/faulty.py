"""Engines that a process of their own builds for tests: they do what the name of their model says."""

import ctypes
import os
import signal
import time

import torch

from rft_fn.engine import dead_after_failure
from rft_fn.engine.requests import BadPrompt, Response, assemble
from rft_fn.types import Engine
from rft_fn.types.engine import Delivered

__all__ = ["Unsendable", "build", "hang"]


class Unsendable(Exception):
    """An error that pickle cannot bring back."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def hang(*, keeps_the_lock=False):
    """Wait in C for ever, where no signal reaches; perhaps with the lock of the interpreter."""
    library = ctypes.PyDLL if keeps_the_lock else ctypes.CDLL
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        library(None).pthread_mutex_lock(mutex)


class Faulty:
    """Answers with what it was built of; a prompt's first token says what else it does."""

    def __init__(self, config):
        self.config = config
        self.version = 0
        self.kept = []

    def generate(self, prompts, keys, *, n=1, sampling, max_new=None, start=None):
        deed = prompts[0][0]
        if deed == 1:
            time.sleep(1000)
        elif deed in (7, 8):
            hang(keeps_the_lock=deed == 8)
        elif deed == 2:
            raise Unsendable("one", "two")
        elif deed == 3:
            raise FloatingPointError("not finite")
        elif deed == 4:
            os._exit(7)
        elif deed == 5:
            raise BadPrompt(3, "another", "this one")
        elif deed == 6:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C in a terminal does
        about = [torch.get_num_threads(), int("RANK" in os.environ), len(self.kept), *(start or [])]
        responses = [Response(about, [0.0] * len(about), True)] * (len(prompts) * n)
        return assemble(prompts, responses, pad=0, version=self.version)

    def load(self, weights, *, version):
        self.frozen = weights.frozen
        self.kept.append(dict(weights))
        for x in self.kept[-1].values():
            x.mul_(2)  # in place: nobody else reads this memory
        self.version = version
        return Delivered(len(self.kept[-1]), 1, 0.0, version)

    def score(self, rollout, *, sampling=None):
        if rollout is None:
            raise ValueError("rollout: expected one")
        return self.kept, self.frozen

    def status(self):
        return {
            "engine": "faulty",
            "alive": True,
            "version": self.version,
            "asleep": False,
            "supported": frozenset({"score"}),
        }


def build(config, model, tokenizer):
    if model == "broken":
        raise ValueError("model: expected another, got broken")
    engine = Faulty(config)
    nothing = engine.status
    functions = (engine.generate, engine.score, engine.load, nothing, nothing, engine.status)
    return dead_after_failure(Engine(*functions))
