"""Delivers the newest weights to servers: by a channel to each, or by a folder that all of them read.

The first rank collects a load as a whole, then all ranks meet, and only then anything is sent: a rank never
waits for a server in the middle of putting a tensor together.
"""

import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_fn.engine import weight_delta, weight_folder
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.server_protocol import Client, Described, Fault, Refused, ServerProtocol
from rft_fn.engine.weight_channel import Parcel
from rft_fn.engine.weight_sender import answered
from rft_fn.text import printable

__all__ = ["Collected", "Delivery"]

WHOLE = 16  # every so many versions one is written as a whole


class Collected:
    """The tensors of one load on the first rank: in a folder, in buckets, or in both."""

    def __init__(self, ways: Collection[str], writer: Callable[[], weight_folder.Writer]):
        self.otherwise = writer if "difference" in ways else None  # until the type of the weights is known
        self.writer = writer() if "folder" in ways and self.otherwise is None else None
        self.parcel = Parcel() if {"rft", "nccl"} & {*ways} else None
        self.problem: OSError | None = None  # a full disk is raised at the end: gathering takes all ranks

    def add(self, name: str, x: Tensor) -> None:
        """Take a copy of one tensor."""
        if self.otherwise is not None:  # only weights of 16 bits keep most of their bits in a step
            if x.element_size() <= 2:
                self.parcel = self.parcel or Parcel()
            else:
                self.writer = self.otherwise()
            self.otherwise = None
        if self.parcel is not None:
            self.parcel.add(name, x)
        if self.writer is not None and self.problem is None:
            self.problem = self.writer.add(name, x)

    def add_kept(
        self,
        names: Collection[str],
        before: Path | None,
        tensors: Callable[[Collection[str]], Iterable[tuple[str, Tensor]]],
    ) -> None:
        """Take what is the same in every load; the folder `before` may have it already."""
        if self.parcel is not None:
            for name, x in tensors(names):
                self.parcel.add(name, x)
        if self.writer is not None and self.problem is None:
            self.problem = self.writer.add_kept(names, before, tensors)

    def finish(self, tied: Mapping[str, str]) -> None:
        """Put the folder in its place."""
        if self.problem is not None:
            raise self.problem
        if self.parcel is not None:
            self.parcel.finish(tied)
        if self.writer is not None:
            self.writer.finish(tied)

    def discard(self) -> None:
        """Delete what was collected."""
        self.parcel = None
        if self.writer is not None:
            self.writer.discard()


class Delivery:
    """The newest weights, and the way by which each server gets them."""

    def __init__(self, config: EngineConfig, protocol: ServerProtocol, client: Client):
        self.config = config
        self.protocol = protocol
        self.client = client
        self.temporary: Any = None
        self.newest = Collected((), self._writer)
        self.last: Parcel | None = None  # the version before, while a difference from it may be made
        self.label = ""  # of the newest
        self.base = ""  # of the version before
        self.small = ""  # the folder of the difference between the two, where there is one
        self.since = 0  # versions since the last whole one
        self.names = 0  # tensors of them, by all of their names
        self.folder = ""  # of all of them, where there is one
        self.written: list[Path] = []  # folders of this rank
        self.writing = threading.Lock()
        self.distrusted: set[str] = set()  # servers whose channel has failed
        # also where nobody calls `close`
        self.tidy = weakref.finalize(self, weight_folder.remove_all, self.written)

    def check(self, known: Described) -> None:
        """Raise Refused for a server that cannot take weights as the options want it."""
        if self.config.transfer not in ("auto", *known.ways):
            raise Refused(
                f"engine_transfer: expected a server that takes weights by {self.config.transfer}, got one "
                f"that takes them by {' or '.join(known.ways) or 'nothing'}"
            )

    def way(self, server: str, known: Described) -> str:
        """Return how a server gets weights: rft, nccl, difference or folder."""
        ways = known.ways
        if self.config.transfer in self.protocol.senders:
            return self.config.transfer
        if self.config.transfer == "folder" or server in self.distrusted:
            ways = tuple(way for way in ways if way not in self.protocol.senders)
        return (ways or ("folder",))[0]

    def before(self) -> Path | None:
        """Return the folder of older weights."""
        return next(iter(self.written), None)

    def collect(self, label: str, known: Mapping[str, Described]) -> Collected:
        """Begin to collect weights for servers. What was collected before is given no more."""
        self.label = label
        ways = {self.way(server, x) for server, x in known.items()}
        if len(known) < len(self.config.servers):  # others may join later, and get what there is
            way = "rft" if self.config.transfer == "auto" else self.config.transfer
            ways.add(way if way in self.protocol.senders else "folder")
        self.last = self.newest.parcel if "difference" in ways and self.since + 1 < WHOLE else None
        self.newest.parcel = None  # else there were two copies on the host
        return Collected(ways, self._writer)

    def offer(self, collected: Collected, tied: Mapping[str, str]) -> None:
        """Make the weights the newest ones, which `give` gives. OSError for a full disk."""
        collected.finish(tied)
        self.newest = collected
        self.folder = "" if collected.writer is None else str(collected.writer.folder.resolve())
        base, self.base = self.base, self.label
        self.small, last, self.last = "", self.last, None
        if last is not None and collected.parcel is not None:
            writer = self._writer(".difference")
            with suppress(OSError):  # of a full disk: the whole one says so
                if weight_delta.write(writer, self.label, collected.parcel, last, base):
                    self.small = str(writer.folder.resolve())
                    self.written.append(Path(self.small))
            if not self.small:
                writer.discard()
        self.since = self.since + 1 if self.small else 0

    def give(self, server: str, known: Described, label: str) -> None:
        """Make a server take the newest weights by the way that it has. Fault or Refused if it does not."""
        began = time.monotonic()
        parcel, sender = self.newest.parcel, self.protocol.senders.get(self.way(server, known))
        if sender is not None and parcel is not None:
            try:
                sender.send(server, parcel, label)
                self.protocol.settle(server, label)
                return
            except (Fault, Refused) as error:
                if self.config.transfer != "auto" or "folder" not in known.ways:
                    raise
                self._distrust(server, error)
                if not answered(error) or time.monotonic() - began > self.config.timeout / 2:
                    raise
        if self.small and "difference" in known.ways:
            try:
                self.protocol.load(server, self.small, label, self.names)
                return
            except Fault as error:  # it has missed the last version
                if not str(error).startswith("weights: "):
                    raise
        self.protocol.load(server, self._as_folder(), label, self.names)

    def settle(self) -> None:
        """Delete the folders of older weights."""
        newest = [Path(x) for x in (self.folder, self.small) if x]
        weight_folder.remove_all([old for old in self.written if old not in newest])
        self.written[:] = newest

    def close(self) -> None:
        """Delete the weights, and leave the servers."""
        for sender in self.protocol.senders.values():
            sender.close()
        self.newest = Collected((), self._writer)
        self.tidy()
        if self.temporary is not None:
            self.temporary.cleanup()

    def home(self) -> Path:
        """Return the folder that servers read from."""
        if not self.config.weights and self.temporary is None:
            self.temporary = tempfile.TemporaryDirectory(prefix="rft-weights-")
        return Path(self.config.weights or self.temporary.name)

    def _writer(self, kind: str = "") -> weight_folder.Writer:
        """Return the writer of the folder of these weights."""
        return weight_folder.Writer(self.home() / (self.label.replace(":", "-") + kind))

    def _as_folder(self) -> str:
        """Return the folder of the newest weights, which is written now if only channels wanted them."""
        with self.writing:
            parcel = self.newest.parcel
            if not self.folder and parcel is not None:
                writer = self._writer()
                try:
                    weight_delta.write(writer, self.label, parcel, None)
                except OSError as error:
                    writer.discard()
                    raise Fault(f"weights: {error}") from error
                self.folder = str(writer.folder.resolve())
                self.written.append(Path(self.folder))
        if not self.folder:
            raise Fault("expected to get weights, which the first rank sends, from it")
        return self.folder

    def _distrust(self, server: str, error: Exception) -> None:
        self.distrusted.add(server)
        line = f"warning: {server}: {self.client.line(error)}; it gets weights by a folder from now on"
        print(printable(line), file=sys.stderr, flush=True)
