"""Carries weights from a trainer to the workers of a server: a store, a group, and flat buckets.

Both ends use it, so it knows nothing of either. The trainer is rank 0 of the group, the workers follow. The
group is gloo's between CPUs and NCCL's between GPUs. A server has a group of its own, so that one that dies
breaks no other's.
"""

import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor

__all__ = [
    "BUCKET", "NO_ROOM", "PROTOCOL", "Bucket", "Channel", "Connect", "Parcel", "Update", "all_ready",
    "entries_of", "join", "listen", "own_address", "total_bytes",
]  # fmt: skip

PROTOCOL = 2  # of the records below
NO_ROOM = "of free host memory for the stage"  # words of a worker that refuses weights, which fewer may pass
BUCKET = 256 << 20  # bytes of a bucket, or one larger tensor
_ANSWERS = 2.0  # seconds that a store has to answer
_ALIGN = 16  # bytes: a multiple of every type's size


@dataclass
class Connect:
    """What a trainer tells the workers before anything else."""

    rft: int = PROTOCOL  # no other backend takes this name
    kind: str = "gloo"  # of the group, or nccl
    store: str = ""  # HOST:PORT of the trainer's store; empty only to ask whether there is such a backend
    run: str = ""
    world: int = 2  # the trainer and the workers
    seconds: float = 60.0  # for the group to come together


@dataclass
class Update:
    """What a trainer tells the workers about the bucket that it sends now."""

    run: str = ""
    entries: list[list[Any]] = field(default_factory=list)  # [name, type, shape] of each tensor
    total: int = 0  # bytes that have to be staged at a time
    first: bool = True  # no other part of these weights came before
    last: bool = True  # none comes after
    seconds: float = 60.0  # for all that is left to do
    manifest: dict[str, list[Any]] | None = None  # of the last bucket: {name: [type, shape]} of all tensors
    tied: dict[str, str] = field(default_factory=dict)  # {a further name: the name that came}
    abandon: str = ""  # why no more will come


class Entry(NamedTuple):
    """A tensor's place in a bucket."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int  # in bytes
    size: int


def _entry(name: str, dtype: torch.dtype, shape: Iterable[int], after: int) -> Entry:
    shape = torch.Size(shape)
    return Entry(name, dtype, shape, -(-after // _ALIGN) * _ALIGN, shape.numel() * dtype.itemsize)


def entries_of(described: Sequence[Sequence[Any]]) -> list[Entry]:
    """Return the entries that [name, type, shape] describe. ValueError for what is none."""
    entries: list[Entry] = []
    for name, kind, shape in described:
        dtype = getattr(torch, str(kind), None)
        if not isinstance(dtype, torch.dtype) or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"weights: {name}: expected a type and a shape, got {kind} {shape}")
        entries.append(_entry(str(name), dtype, shape, total_bytes(entries)))
    return entries


def total_bytes(entries: Sequence[Entry]) -> int:
    """Return the bytes that a bucket of these entries has."""
    return entries[-1].start + entries[-1].size if entries else 0


class Bucket(NamedTuple):
    """Several tensors in one."""

    data: Tensor  # [bytes] uint8, on the host
    entries: list[Entry]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, which share the bucket's memory."""
        for entry in self.entries:
            part = self.data[entry.start : entry.start + entry.size]
            yield entry.name, part.view(entry.dtype).view(entry.shape)

    def cut(self, entries: Sequence[Entry]) -> "Bucket":
        """Return a bucket of some entries that follow each other; it shares the memory."""
        start = entries[0].start
        moved = [entry._replace(start=entry.start - start) for entry in entries]
        return Bucket(self.data[start : start + total_bytes(moved)], moved)

    def described(self) -> list[list[Any]]:
        """Return [name, type, shape] of each tensor, as JSON holds it."""
        return [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape)] for e in self.entries]


class Parcel:
    """The weights of one load, in buckets on the host of the first rank."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.tied: dict[str, str] = {}
        self._open: Tensor | None = None  # the last bucket, while there is room in it

    def add(self, name: str, x: Tensor) -> None:
        """Take a copy of one tensor."""
        entry = _entry(name, x.dtype, x.shape, total_bytes(self.buckets[-1].entries) if self.buckets else 0)
        if self._open is None or entry.start + entry.size > len(self._open):
            self._close()
            entry = _entry(name, x.dtype, x.shape, 0)
            self._open = torch.empty(max(BUCKET, entry.size), dtype=torch.uint8)  # pages come when written to
            self.buckets.append(Bucket(self._open, []))
        self.buckets[-1].entries.append(entry)
        part = self._open[entry.start : entry.start + entry.size]
        part.view(entry.dtype).view(entry.shape).copy_(x.detach())

    def finish(self, tied: Mapping[str, str]) -> None:
        """End the last bucket."""
        self._close()
        self.tied = dict(tied)

    def parts(self, count: int) -> "list[Parcel]":
        """Cut into at most `count` parts of whole layers, which share the memory."""
        sizes: dict[str, int] = {}
        for bucket in self.buckets:
            for entry in bucket.entries:
                sizes[_layer(entry.name)] = sizes.get(_layer(entry.name), 0) + entry.size
        begins = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        place = {x: min(begin * count // max(self.total, 1), count - 1) for x, begin in begins.items()}

        found = [Parcel() for _ in range(count)]
        for bucket in self.buckets:
            for part, entries in groupby(bucket.entries, lambda entry: place[_layer(entry.name)]):
                found[part].buckets.append(bucket.cut(list(entries)))
        for name, by in self.tied.items():
            found[place[_layer(by)]].tied[name] = by
        return [part for part in found if part.buckets]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all buckets."""
        for bucket in self.buckets:
            yield from bucket.tensors()

    @property
    def total(self) -> int:
        """Return the bytes of all buckets."""
        return sum(total_bytes(bucket.entries) for bucket in self.buckets)

    def manifest(self) -> dict[str, list[Any]]:
        """Return {name: [type, shape]} of all tensors."""
        return {name: about for bucket in self.buckets for name, *about in bucket.described()}

    def _close(self) -> None:
        if self._open is not None:
            last = self.buckets[-1]
            self.buckets[-1] = Bucket(self._open[: total_bytes(last.entries)], last.entries)
        self._open = None


def _layer(name: str) -> str:
    """Return the layer of a weight: up to its first number, or its module where it has none."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return numbered[0] if numbered else name.rpartition(".")[0]


class Channel:
    """A process group of the trainer and the workers of one server, and the store that it met by."""

    def __init__(
        self,
        store: c10d.TCPStore,
        kind: str,
        address: str,
        *,
        rank: int,
        world: int,
        seconds: float,
        prefixes: Sequence[str] = ("weights",),
    ):
        """Meet the others within `seconds`, or RuntimeError; `address` is this machine's as they see it.

        They meet below `prefixes` of the store, the outermost first.
        """
        self.store = store
        self.kind = kind
        self.rank = rank
        self.world = world
        self.moved = 0  # broadcasts so far
        say_ready(store, rank, 0)
        met: Any = store
        for prefix in prefixes:
            met = c10d.PrefixStore(prefix, met)
        limit = timedelta(seconds=max(seconds, 1e-3))
        self.group: Any
        if kind == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = limit
            self.group = c10d.ProcessGroupNCCL(met, rank, world, options)
        else:
            options: Any = c10d.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = limit
            self.group = c10d.ProcessGroupGloo(met, rank, world, options)

    def broadcast(self, data: Tensor, seconds: float) -> None:
        """Fill `data` on the workers with the trainer's. RuntimeError if that takes longer than `seconds`."""
        self.moved += 1
        say_ready(self.store, self.rank, self.moved)
        limit = timedelta(seconds=max(seconds, 1e-3))
        options = c10d.BroadcastOptions()
        options.timeout = limit
        if self.kind == "nccl":
            there = data.to("cuda")
            self.group.broadcast([there], options).wait(limit)
            torch.cuda.synchronize()
            data.copy_(there)
        else:
            self.group.broadcast([data], options).wait(limit)

    def ready(self) -> bool:
        """Return whether all workers wait for the next broadcast."""
        return all_ready(self.store, self.world, self.moved + 1)

    def alive(self) -> bool:
        """Return whether the trainer's store is still there."""
        self.store.set_timeout(timedelta(seconds=_ANSWERS))
        try:
            self.store.check(["weights"])
        except RuntimeError:
            return False
        return True


def say_ready(store: c10d.Store, rank: int, turn: int) -> None:
    """Tell that this rank is about to meet the others (turn 0), or to broadcast."""
    store.set(f"ready/{turn}/{rank}", "")


def all_ready(store: c10d.Store, world: int, turn: int) -> bool:
    """Return whether all workers have told so."""
    return store.check([f"ready/{turn}/{rank}" for rank in range(1, world)])


def listen(address: str, seconds: float) -> c10d.TCPStore:
    """Return a store that others can reach at `address` and its port."""
    limit = timedelta(seconds=max(seconds, 1e-3))
    return c10d.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)


def join(host: str, port: int, seconds: float) -> c10d.TCPStore:
    """Return the store of another process. OSError or RuntimeError where it cannot be reached."""
    socket.create_connection(
        (host, port), seconds
    ).close()  # torch tries a port that nobody has until the limit
    limit = timedelta(seconds=max(seconds, 1e-3))
    return c10d.TCPStore(host, port, is_master=False, timeout=limit)


def own_address(host: str) -> str:
    """Return this machine's address as `host` sees it. OSError for a host that has none."""
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # of datagrams: nothing is sent
        return probe.getsockname()[0]
