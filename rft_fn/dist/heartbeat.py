"""A heartbeat: each process tells the others what it is doing, so that a lost one can be named."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as torch_dist

from rft_fn.dist.collectives import rank, world

__all__ = ["Heartbeat"]


class Heartbeat:
    """A thread that writes this process's phase to the store twice a second, and reads the others'.

    `phase` returns what this process is doing; `alarm` is called in the thread once another process has been
    silent for `timeout` [s]. The store must be a client of this thread only: the main thread may be waiting
    in another one.
    """

    BYE = "its exit"  # the phase of a process that is done: nobody waits for it any more

    def __init__(
        self,
        store: torch_dist.Store,
        phase: Callable[[], str],
        *,
        timeout: float,
        alarm: Callable[[], None],
    ):
        self.store = store
        self.phase = phase
        self.timeout = timeout
        self.alarm = alarm
        self.count = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="rft_fn heartbeat")
        self.host = socket.gethostname()
        self.hosts: dict[int, str] = {}  # by rank, of those that were heard
        # by rank: when it was last heard, its phase, and the text of that beat
        self.heard = {r: (time.monotonic(), "start", "") for r in range(world()) if r != rank()}

    def start(self) -> None:
        """Start to write and listen."""
        self.thread.start()

    def stop(self) -> None:
        """Say goodbye, and wait for the thread, which must not use the store while Python shuts down."""
        self.over.set()
        self.thread.join(5)
        with suppress(RuntimeError):  # the process that held the store may be gone already
            self.store.set(f"{rank()}", f"{self.count + 1} {self.host} {self.BYE}")

    def beat(self) -> None:
        """Write this process's beat, and read all others."""
        self.count += 1
        self.store.set(f"{rank()}", f"{self.count} {self.host} {self.phase()}")
        for r, (_, _, last) in list(self.heard.items()):
            if not self.store.check([f"{r}"]):
                continue  # it has not begun
            now = self.store.get(f"{r}").decode()
            if now != last:
                _, self.hosts[r], phase = now.split(" ", 2)
                self.heard[r] = (time.monotonic(), phase, now)

    def silent(self, seconds: float) -> list[tuple[int, float, str]]:
        """Return (rank, seconds of silence, last phase) of processes silent for more than `seconds`."""
        now = time.monotonic()
        beats = [(r, now - heard, phase) for r, (heard, phase, _) in self.heard.items()]
        return [(r, age, phase) for r, age, phase in beats if age > seconds and phase != self.BYE]

    def named(self, r: int) -> str:
        """Return a rank with its host, where that is known."""
        return f"rank {r} on {self.hosts[r]}" if r in self.hosts else f"rank {r}"

    def phases(self, without: Sequence[int] = ()) -> list[str]:
        """Return the phases of all but `without`: "rank 1, 2 in forward of step 3" for each phase."""
        ranks: dict[str, list[str]] = {}
        for r, (_, phase, _) in self.heard.items():
            if r not in without:
                ranks.setdefault(phase, []).append(str(r))
        return [f"rank {', '.join(who)} in {phase}" for phase, who in ranks.items()]

    def _run(self) -> None:
        while True:
            try:
                self.beat()
            except RuntimeError:  # the store went with the process that held it: the main thread will notice
                return
            if self.silent(self.timeout):
                self.alarm()
            if self.over.wait(min(0.5, self.timeout / 5)):
                return
