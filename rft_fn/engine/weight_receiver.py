"""Receives weights in a worker of a server, and loads them at one go.

They are staged on the host, and compared with a manifest. Nothing touches the model before all has arrived.
So a trainer that dies, stops sending or sends too little leaves a server that samples from its old weights,
and the next trainer can load. Where there is no room for all of them they come in parts, each as one update.
"""

import time
from collections.abc import Callable, Iterator

from torch import Tensor

from rft_fn.engine.weight_channel import (
    NO_ROOM,
    PROTOCOL,
    Bucket,
    Channel,
    Connect,
    Update,
    entries_of,
    join,
    own_address,
    total_bytes,
)
from rft_fn.engine.weight_stage import Stage
from rft_fn.memory import host_free

__all__ = ["Receiver"]

_GIB = 2**30


class Receiver:
    """One worker's end of the channel. Every error is a ValueError or a RuntimeError of one line."""

    def __init__(self, rank: int, device: str):
        """`rank` is the worker's among those of its server, `device` where its model is."""
        self.rank = rank
        self.device = device
        self.channel: Channel | None = None
        self.run = ""
        self.stage: Stage | None = None
        self.staged: list[Bucket] | None = None  # None outside of an update
        self.whole = False  # all has arrived
        self.tied: dict[str, str] = {}
        self.first = self.last = True  # part of the weights that have arrived
        self.seconds = 0.0  # that the trainer has for a phase
        self.until = 0.0  # of the monotonic clock: when the update has to be over

    def connect(self, info: Connect) -> None:
        """Meet a trainer. ValueError for a second one while the first sends."""
        if info.rft != PROTOCOL:
            raise ValueError(
                f"rft: expected protocol {PROTOCOL}, got {info.rft}: install one version on both sides"
            )
        if info.kind not in ("gloo", "nccl") or (info.kind == "nccl" and not self.device.startswith("cuda")):
            raise ValueError(f"rft: expected gloo on {self.device}, got {info.kind}")
        if not info.store:
            return
        left = self.until - time.monotonic()
        if self.staged is not None and self.run != info.run and left > 0 and self._sender_lives():
            raise ValueError(
                f"rft: expected one trainer at a time, got {info.run} while {self.run} sends, for at most "
                f"{left:.0f} s more"
            )
        self.close()
        host, _, port = info.store.rpartition(":")
        store = join(host, int(port), info.seconds)
        address = own_address(host)
        self.channel = Channel(
            store, info.kind, address, rank=self.rank + 1, world=info.world, seconds=info.seconds
        )
        self.stage = Stage(store, rank=self.rank + 1, world=info.world, seconds=info.seconds)
        self.run = info.run
        self.seconds = info.seconds

    def start(self) -> None:
        """Begin an update. ValueError without a trainer."""
        if self.channel is None:
            raise ValueError("rft: expected a trainer that has connected, got none")
        self.staged, self.whole = [], False
        self.until = time.monotonic() + self.seconds

    def take(self, info: Update) -> None:
        """Stage one bucket; the last must make up the manifest. After any error nothing is staged."""
        try:
            self._take(info)
        except BaseException:
            self.staged = None
            raise

    def _take(self, info: Update) -> None:
        if info.abandon:
            raise ValueError(f"rft: abandoned: {info.abandon}")
        if self.channel is None or self.stage is None or self.staged is None or self.run != info.run:
            raise ValueError(f"rft: expected weights of {self.run or 'no run'}, got those of {info.run}")
        began = time.monotonic()
        self.until = began + info.seconds
        entries = entries_of(info.entries)
        if not self.staged:
            free = host_free()
            if info.total > free:
                raise ValueError(
                    f"rft: expected {info.total / _GIB:.2f} GiB {NO_ROOM}, got {free / _GIB:.2f}"
                )
        data = self.stage.room(total_bytes(entries))
        self.channel.broadcast(data, info.seconds)
        left = info.seconds - (time.monotonic() - began)
        self.staged.append(Bucket(self.stage.keep(data, left), entries))
        if info.manifest is not None:
            self._compare(info)
            self.tied = info.tied
            self.first, self.last = info.first, info.last
            self.whole = True

    def _compare(self, info: Update) -> None:
        """Raise ValueError, by name, unless just what the manifest names has arrived."""
        want = info.manifest or {}
        got: dict[str, list[object]] = {}
        for bucket in self.staged or ():
            for name, *about in bucket.described():
                if name in got:
                    raise ValueError(f"weights: {name}: expected it once, got it twice")
                got[name] = about
        for name in sorted(want.keys() | got.keys()):
            if want.get(name) != got.get(name):
                count = sum(want.get(x) != got.get(x) for x in want.keys() | got.keys())
                raise ValueError(
                    f"weights: {name}: expected {_shown(want.get(name))}, got {_shown(got.get(name))} "
                    f"({count} of {len(want)} tensors differ from the manifest)"
                )
        for name, by in info.tied.items():
            if by not in got or name in got:
                raise ValueError(f"weights: {name}: expected to be tied to one that came, got {by}")

    def finish(self, load: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
        """Give everything that has arrived to `load`. ValueError if that is not all."""
        staged, whole = self.staged or [], self.whole
        self.staged, self.whole = None, False
        if self.stage is not None:
            self.stage.close()
        if not whole:
            raise ValueError("rft: expected a whole update before its end, got a part")
        load(self._tensors(staged))

    def _tensors(self, staged: list[Bucket]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by all of their names."""
        names: dict[str, list[str]] = {}
        for name, by in self.tied.items():
            names.setdefault(by, []).append(name)
        for bucket in staged:
            for name, x in bucket.tensors():
                for each in (name, *names.get(name, ())):
                    yield each, x

    def close(self) -> None:
        """Leave the trainer, and drop what is staged."""
        if self.stage is not None:
            self.stage.close()
        self.channel, self.stage, self.staged, self.whole = None, None, None, False

    def _sender_lives(self) -> bool:
        return self.channel is not None and self.channel.alive()


def _shown(about: object) -> str:
    return "none" if not isinstance(about, list) else f"{about[0]} {about[1]}"
