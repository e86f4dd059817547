"""Delivers adapters that come alone to servers: a folder and a name for each load.

Requests name the adapters that are to answer, so a server that lacks them refuses them.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from rft_fn.engine.adapters_alone import PROBE, SLOTS, check_arrived, may_show, rank_of, write
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.server_protocol import Ask, Described, Fault, Refused, Reply, ServerProtocol, checked
from rft_fn.engine.weight_folder import remove_all
from rft_fn.text import printable
from rft_fn.types import Sampling

__all__ = ["AdapterDelivery", "Adapters"]


FRESH = ("", "default")  # labels of servers with the weights that they were started with
LENGTH = 2  # tokens of a sample that shows whether adapters have arrived


class Adapters(NamedTuple):
    """Adapters that servers answer by."""

    name: str
    folder: str
    version: int
    rank: int
    shows: bool  # whether log-probs must change


class AdapterDelivery:
    """The newest adapters, and how a server gets them."""

    def __init__(self, config: EngineConfig, protocol: ServerProtocol, home: Callable[[], Path]):
        """Folders are made in `home()`."""
        self.config = config
        self.protocol = protocol
        self.home = home
        self.wanted = bool(config.lora_rank) and not config.alone and config.adapters != "merged"
        self.newest: Adapters | None = None
        self.count = 0  # loads, which name the next one
        self.written: list[Path] = []  # folders
        self.tidy = weakref.finalize(self, remove_all, self.written)  # also where nobody calls `close`

    def refusal(self, known: Described) -> str:
        """Return what a server lacks for taking adapters alone; empty where it lacks nothing."""
        rank, room = self.config.lora_rank, known.room
        if room is None:
            return (
                f"a server that takes adapters, started with {self.protocol.adapters_hint}, got one without"
            )
        if room.rank and room.rank < rank:
            return f"room for adapters of rank {rank}, got {room.rank} (--max-lora-rank)"
        if room.slots and room.slots < SLOTS:
            return f"room for {SLOTS} adapters, got {room.slots} (--max-loras)"
        if room.base is not None and self.config.base and room.base != self.config.base:
            got = room.base or "full precision"
            return f"a base in {self.config.base} (--quantization torchao, docs/engines.md), got {got}"
        if known.label not in FRESH:
            return f"the base model's own weights below the adapters, got {known.label!r}: start it again"
        return ""

    def check(self, known: Described) -> None:
        """Raise Refused for a server without room for adapters, with `adapters="alone"`."""
        reason = self.refusal(known) if self.wanted and self.config.adapters == "alone" else ""
        if reason:
            raise Refused(f"engine_adapters alone: expected {reason}")

    def decide(self, known: Mapping[str, Described]) -> bool:
        """Return whether adapters come alone; with `auto`, if all servers report room for them."""
        if not self.wanted or self.config.adapters == "alone":
            return self.wanted
        if not self.protocol.adapters_ran:
            return False
        told = {server: x for server, x in known.items() if x.room is not None and x.room.rank}
        for server, x in told.items():
            reason = self.refusal(x)
            if reason:
                line = f"warning: {server}: expected {reason}; adapters come merged into whole weights"
                print(printable(line), file=sys.stderr, flush=True)
                return False
        return len(told) == len(self.config.servers)

    def offer(self, tensors: Mapping[str, Tensor], run: str, version: int) -> Adapters:
        """Write the folder of the newest adapters. OSError for a full disk."""
        self.count += 1
        name = f"rft-{run}-{version}-{self.count}"
        folder = (self.home() / name).resolve()
        self.written.append(folder)
        write(folder, tensors)
        return Adapters(name, str(folder), version, rank_of(tensors), may_show(tensors))

    def give(
        self, server: str, known: Described, new: Adapters, sample: Callable[[str, Described, Ask], Reply]
    ) -> Described:
        """Make a server answer by adapters. Fault or Refused where they have not arrived."""
        room = known.room
        if room is not None and 0 < room.rank < new.rank:
            raise Refused(f"weights: expected adapters of rank {room.rank} at most, got {new.rank}")
        self.protocol.load_adapter(server, new.folder, new.name)
        changed = known._replace(adapter=new.name)
        if new.shows:
            ask = Ask(list(PROBE), 0, Sampling(), LENGTH, ())
            without, under = (sample(server, x, ask) for x in (known._replace(adapter=""), changed))
            if without.tokens == under.tokens:
                self._check_arrived(server, new, without, under)
        return changed

    def _check_arrived(self, server: str, new: Adapters, without: Reply, under: Reply) -> None:
        """Raise Fault where adapters have not arrived, and say so: the server is left out."""
        try:
            with checked():
                check_arrived(new.name, new.version, without.logp, under.logp)
        except Fault as error:
            print(printable(f"warning: {server}: {error}"), file=sys.stderr, flush=True)
            raise

    def settle(self, new: Adapters, servers: Iterable[str]) -> None:
        """Make servers forget the adapters before the newest ones, and delete their folders."""
        old, self.newest = self.newest, new
        if old is not None:
            for server in servers:
                with suppress(Fault, Refused):  # it never had them, or takes the next ones in their place
                    self.protocol.unload_adapter(server, old.name)
        remove_all(self.written[:-1])
        del self.written[:-1]

    def close(self) -> None:
        """Delete the folders."""
        self.tidy()
