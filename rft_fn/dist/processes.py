"""This process in its run: its phase, the other processes, and how it leaves them."""

import atexit
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as torch_dist

from rft_fn.dist import group
from rft_fn.dist.collectives import rank
from rft_fn.dist.heartbeat import Heartbeat
from rft_fn.dist.lost import LostProcess, abort, describe, is_lost

__all__ = ["Processes", "begin"]


_QUIET = 3.0  # s without a beat, which no live process has: beats are half a second apart


class Processes:
    """The phase of this process, and what it knows of the others.

    With `began` the process group goes with this object. Without a heartbeat no lost process can be named: a
    run of one process needs none. An error about a lost one waits `patience` [s], in which whoever is alive
    is heard.
    """

    def __init__(self, *, began: bool = False, heartbeat: Heartbeat | None = None, patience: float = 4.0):
        self.began = began
        self.heartbeat = heartbeat
        self.patience = patience
        self.current_phase = "start"
        self._depth = 0

    def listen(self, timeout: float) -> None:
        """Start the heartbeat; a process that is silent for `timeout` [s] ends this one with a line.

        Nothing for a single process, or where no store can be reached.
        """
        if torch_dist.get_world_size() == 1:
            return
        store = group.store_client(min(timeout, 30))
        if store is None:
            return
        self.heartbeat = Heartbeat(store, lambda: self.current_phase, timeout=timeout, alarm=self._abort)
        self.heartbeat.start()

    def _abort(self) -> None:
        abort(self.describe())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Call what this process does inside the block `name`, in the line about lost processes.

        The name stays when an error leaves the block; after the outermost block the phase is that of the
        script's own code. LostProcess where the block lost another process.
        """
        before = self.current_phase
        outermost = self._depth == 0
        self.current_phase = name
        self._depth += 1
        try:
            with self.watch():
                yield
        finally:
            self._depth -= 1

        self.current_phase = f"the script after {name}" if outermost else before

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raise LostProcess, with the description, for an error in the block about a lost process."""
        try:
            yield
        except LostProcess:  # an inner block has described it
            raise
        except RuntimeError as error:
            if is_lost(error):
                raise LostProcess(self.describe(error, patience=self.patience)) from error
            raise

    def describe(self, error: BaseException | None = None, *, patience: float = 0.0) -> str:
        """Return one line after `patience` [s]: who is gone, every last phase, the `error` met here."""
        doing = [f"rank {rank()} was in {self.current_phase}"]
        time.sleep(patience)
        if self.heartbeat is None:
            return describe("other processes", doing, error)

        gone = self.heartbeat.silent(min(_QUIET, self.heartbeat.timeout))
        names = [f"{self.heartbeat.named(r)} (last in {phase}, {age:.0f} s ago)" for r, age, phase in gone]
        who = ", ".join(names) or "other processes"
        doing += self.heartbeat.phases(without=[r for r, _, _ in gone])
        return describe(who, doing, error)

    def close(self) -> None:
        """Stop the heartbeat, and take the group down where this object began it. Twice is once."""
        atexit.unregister(self.close)
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None
        if self.began:
            self.began = False
            group.part()


def begin(timeout: float) -> Processes:
    """Join the processes that torchrun started (or make a group of one), unless that is done already.

    timeout [s] bounds every wait for another process, once all have started. Whoever begins the group takes
    it down, by `close` or at exit; an object that meets one does not touch it.
    """
    began = not torch_dist.is_initialized()
    if began:
        group.join(timeout)
    processes = Processes(began=began)
    atexit.register(processes.close)
    try:
        processes.listen(timeout)
    except BaseException:
        processes.close()
        raise
    return processes
