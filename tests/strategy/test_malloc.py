"""Memory that is freed stays with the process on a CPU, so that the next pack touches no new page of it."""

import ctypes
import json
import sys

import forks
import pytest
import torch

import rft_fn as rft
from rft_fn.strategy import StrategyConfig
from rft_fn.strategy.malloc import keep_freed

GLIBC = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
# The most page faults of 64 MiB, which is above every threshold that glibc chooses by itself, once the heap
# has found a place for them.
CODE = """
import json, resource, sys, torch
import rft_fn as rft
st = rft.strategy.get_strategy(rft.strategy.StrategyConfig(keep_memory=sys.argv[1] == "on"))
found = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(max(found[6:])))
"""


def faults(option):
    done = forks.run([sys.executable, "-c", CODE, option], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(not GLIBC, reason="other allocators decide for themselves")
def test_what_was_freed_is_used_again():
    """With the option no page is new; without it all are, in pages of at most 2 MiB."""
    assert faults("on") < 8
    assert faults("off") >= 32


def test_elsewhere_nothing_is_promised(monkeypatch):
    """Another system, or a library of C that has no such call."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert not keep_freed()


def test_memory_beside_a_gpu_is_left_alone(monkeypatch):
    """The tensors of a step are not in it."""
    asked = []
    monkeypatch.setattr(rft.strategy, "keep_freed", lambda: asked.append(True))
    rft.strategy.get_strategy(StrategyConfig())
    assert asked
    monkeypatch.setattr(rft.strategy, "usual_device", lambda _: torch.device("cuda"))
    rft.strategy.get_strategy(StrategyConfig())
    assert len(asked) == 1
