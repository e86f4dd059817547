"""This process in its run: its phase, the other processes, and how it leaves them."""

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as torch_dist

from rft_fn.dist import group
from rft_fn.dist.collectives import rank, world
from rft_fn.text import printable

__all__ = [
    "LOST", "Heartbeat", "LostProcess", "Processes", "abort", "begin", "describe", "is_lost", "lost_line",
]  # fmt: skip


# ---------- each process tells the others what it is doing, so that a lost one can be named


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
            self.store.set(f"{rank()}", f"{self.count + 1} {self.BYE}")

    def beat(self) -> None:
        """Write this process's beat, and read all others."""
        self.count += 1
        self.store.set(f"{rank()}", f"{self.count} {self.phase()}")
        for r, (_, _, last) in list(self.heard.items()):
            if not self.store.check([f"{r}"]):
                continue  # it has not begun
            now = self.store.get(f"{r}").decode()
            if now != last:
                phase = now.partition(" ")[2]
                self.heard[r] = (time.monotonic(), phase, now)

    def silent(self, seconds: float) -> list[tuple[int, float, str]]:
        """Return (rank, seconds of silence, last phase) of processes silent for more than `seconds`."""
        now = time.monotonic()
        beats = [(r, now - heard, phase) for r, (heard, phase, _) in self.heard.items()]
        return [(r, age, phase) for r, age, phase in beats if age > seconds and phase != self.BYE]

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


# ---------- errors about processes that are gone: how torch words them, and how a run reports them


LOST = 3  # exit code of a process that lost others

_GLOO = re.compile(r"\[[^]\s]*gloo/[^]\s]+\.(cc|h):\d+\] ")  # the source location in every error of gloo
_REMEDY = (
    "run the same command again to resume from the last checkpoint "
    "(torchrun --max-restarts does so automatically)"
)


class LostProcess(RuntimeError):
    """Another process of the run is gone; the message names it, and the phase of every process."""


def is_lost(error: BaseException) -> bool:
    """Return whether torch.distributed raised `error` because of another process.

    Recognized by its type, or by the wording of gloo. Time limits and connections of anything else do not
    count.
    """
    if world() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch_dist.DistError) or _GLOO.search(str(error)) is not None


def describe(who: str, doing: Sequence[str], error: BaseException | None = None) -> str:
    """Return one line: `who` is gone, what the rest was `doing`, the remedy, the error."""
    parts = [f"lost {who}", *doing, _REMEDY]
    if error:
        parts.append(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    return "; ".join(parts)


def lost_line(error: BaseException) -> str:
    """Return the line about lost processes, for a LostProcess or an error that `is_lost`."""
    return str(error) if isinstance(error, LostProcess) else describe("other processes", [], error)


def abort(text: str) -> None:
    """Print the line and end this process at once: tidying up would wait for the others."""
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(LOST)


# ---------- this process in its run: its phase, the other processes, and how it leaves them


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
        names = [f"rank {r} (last in {phase}, {age:.0f} s ago)" for r, age, phase in gone]
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
