"""Memory that is freed stays with the process on a CPU, so that the next pack touches no new page of it."""

import ctypes
import resource
import sys

import pytest
import ranks
import torch
from families import small
from test_probe import rows

import rft_fn as rft
from rft_fn.strategy import StrategyConfig, get_strategy, host
from rft_fn.strategy.host import disable_malloc_trim

GLIBC = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def faults(rank, option):
    """The most page faults of 64 MiB, once the heap has found a place for them.

    That is above every threshold that glibc chooses by itself.
    """
    st = get_strategy(StrategyConfig(keep_memory=option != "off"))
    apply, state = st.init(small("Llama"), rft.optim.adamw(0.1))
    if option != "before":
        st.grad(state, apply, lambda out, b: -out.logp, st.shard(rows([(2, 3)]), 100))
    found = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return max(found[6:])


@pytest.mark.skipif(not GLIBC, reason="other allocators decide for themselves")
def test_what_was_freed_is_used_again():
    """From the first gradient on no page is new; without the option all are, in pages of at most 2 MiB."""
    found = {option: ranks.run(1, "test_malloc:faults", option)[0] for option in ("on", "before", "off")}
    assert found["on"] < 8
    assert found["before"] >= 32 and found["off"] >= 32


def test_elsewhere_nothing_is_promised(monkeypatch):
    """Another system, or a library of C that has no such call."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not disable_malloc_trim()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert not disable_malloc_trim()


def test_memory_beside_a_gpu_is_left_alone(monkeypatch):
    """The tensors of a step are not in it."""
    asked = []
    monkeypatch.setattr(host, "disable_malloc_trim", lambda: asked.append(True))
    strategy = get_strategy()
    apply, state = strategy.init(small("Llama"), rft.optim.adamw(0.1))
    packs = strategy.shard(rows([(2, 3)]), 100)
    strategy.grad(state, apply, lambda out, b: -out.logp, packs)
    assert asked
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        beside = get_strategy()
    beside.grad(state, apply, lambda out, b: -out.logp, packs)
    assert len(asked) == 1
