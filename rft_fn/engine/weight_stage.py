"""Stages weights on the host of a server: once for all of its workers that are on one machine.

Each worker receives each bucket. The first worker of a machine receives into memory without a name, which the
others map by its descriptor, and let go of their own. So a server needs room for one copy of the weights
however many GPUs it has. Nothing is left where a process is killed.
"""

import mmap
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as c10d
from torch import Tensor

__all__ = ["Stage"]


class Stage:
    """Where the workers of a server that share a machine keep what has arrived."""

    def __init__(self, store: c10d.Store, *, rank: int, world: int, seconds: float):
        """Meet the other workers, which are 1 to `world` - 1, within `seconds`, or RuntimeError."""
        self.store = store
        self.turn = 0  # buckets so far
        self.descriptor = -1  # of the last bucket: others have mapped it when the next one comes
        store.set(f"machine/{rank}", _machine())
        names = [f"machine/{other}" for other in range(1, world)]
        store.wait(names, timedelta(seconds=max(seconds, 1e-3)))
        mine = [i for i, name in enumerate(names, 1) if store.get(name) == store.get(f"machine/{rank}")]
        self.first = mine[0]
        self.is_first = self.first == rank
        self.shares = len(mine) > 1

    def room(self, size: int) -> Tensor:
        """Return memory [size] in bytes to receive a bucket into."""
        self.close()
        if not (self.shares and self.is_first):
            return torch.empty(size, dtype=torch.uint8)
        self.descriptor = os.memfd_create("rft weights")
        os.ftruncate(self.descriptor, max(size, 1))
        return _mapped(self.descriptor, size, mmap.MAP_SHARED)

    def keep(self, data: Tensor, seconds: float) -> Tensor:
        """Return what a bucket that has arrived in `data` is kept in, which nobody else can write to."""
        self.turn += 1
        place = f"stage/{self.turn}/{self.first}"
        if not self.shares:
            return data
        if self.is_first:
            kept = _mapped(self.descriptor, len(data), mmap.MAP_PRIVATE)
            self.store.set(place, f"{os.getpid()} {self.descriptor}")
            return kept
        self.store.wait([place], timedelta(seconds=max(seconds, 1e-3)))
        process, descriptor = map(int, self.store.get(place).split())
        try:
            with open(f"/proc/{process}/fd/{descriptor}", "rb") as file:
                return _mapped(file.fileno(), len(data), mmap.MAP_PRIVATE)
        except OSError:  # of another user, or in a container that forbids it: it keeps its own
            return data

    def close(self) -> None:
        """Let nobody map the last bucket any more; what is mapped stays."""
        if self.descriptor >= 0:
            with suppress(OSError):
                os.close(self.descriptor)
        self.descriptor = -1


def _machine() -> str:
    """Return a name that is the same for processes which see each other's descriptors."""
    with suppress(OSError):  # not everywhere Linux, nor with all of its files
        if hasattr(os, "memfd_create"):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return uuid4().hex


def _mapped(descriptor: int, size: int, flags: int) -> Tensor:
    """Map the first `size` bytes of a file as a tensor."""
    memory = mmap.mmap(descriptor, max(size, 1), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]
