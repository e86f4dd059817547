"""Calls an engine in a thread, in the order of the calls, and builds it again where it dies.

One thread calls the engine. Rollouts are gathered, and weights are put together, by the thread that trains:
this one meets no other rank, but to take turns with servers that the engines of all ranks ask (`Turns`).
"""

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor
from torch import distributed as torch_dist

from rft_fn import rng
from rft_fn.engine import EngineDead
from rft_fn.engine.requests import Request
from rft_fn.model.lora_alone import are_adapters
from rft_fn.sync import CanaryError
from rft_fn.text import printable
from rft_fn.types import Engine, Rollout, Sampling, record
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["EngineWorker", "Turns", "Weights", "name_of"]

T = TypeVar("T")
_POLL = 0.02  # seconds between looks at whether other ranks have come so far


def name_of(keys: Sequence[Any], n: int, sampling: Sampling) -> str:
    """Return the name of a rollout: keys name what is drawn."""
    return f"{rng.fold_in(0, *(str(key) for key in keys), n, repr(sampling)):016x}"


class Weights(Iterable[tuple[str, Tensor]]):
    """A copy of weights on the host: the trainer changes its own in place."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], version: int):
        self.pairs = [(name, x.detach().to("cpu", copy=True)) for name, x in weights]
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))  # once they were read
        self.adapters = are_adapters(name for name, _ in self.pairs)
        self.version = version

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Weights":
        """Rebuild weights from what `saved` gave."""
        weights = cls(saved["weights"].items(), saved["version"])
        weights.frozen = frozenset(saved["frozen"])
        return weights

    def saved(self) -> dict[str, Any]:
        """Return them as a tree for a checkpoint."""
        return {"weights": dict(self.pairs), "frozen": sorted(self.frozen), "version": self.version}

    def __iter__(self):
        return iter(self.pairs)

    def load(self, engine: Engine) -> Delivered:
        """Give them to an engine."""
        return engine.load(self, version=self.version)

    @property
    def delivered(self) -> Delivered:
        """Return the record of a load that takes all of them."""
        size = sum(x.numel() * x.element_size() for _, x in self.pairs)
        return Delivered(len(self.pairs), size, 0.0, self.version)


Check = Callable[[Engine, Weights], object]
"""Checks an engine that was built again: CanaryError unless it samples from what it is sent.

The thread of the trainer calls it, on one rank only; the engine has the given weights at the end.
"""


class Turns:
    """Lets the first rank load the servers that the engines of all ranks ask.

    It does so once the calls before are over on every rank, and each rank's later calls wait for it. In
    flight it loads at once. All ranks make the same calls.
    """

    def __init__(self, store: torch_dist.Store, rank: int, world: int):
        """Take a store that all ranks have, and a client of it that nobody else waits in."""
        self.store = store
        self.rank = rank
        self.world = world

    def wait(self, number: int, ended: Callable[[], bool], *, at_once: bool) -> None:
        """Wait until this rank may make a load, by its number, or until `ended` says that it never will."""
        others = [0] if self.rank else [] if at_once else range(1, self.world)
        if self.rank:
            self.pass_on(number)
        keys = [f"{number} of {rank}" for rank in others]
        while keys and not ended() and not self.store.check(keys):
            time.sleep(_POLL)

    def pass_on(self, number: int) -> None:
        """Let the ranks go on that wait for this one: the first has loaded, another has nothing under way."""
        with suppress(RuntimeError):  # the process that held the store may be gone already
            self.store.set(f"{number} of {self.rank}", "")


class EngineWorker:
    """A thread that calls an engine, in the order in which the calls were made; it never sleeps.

    An engine that dies is built again, at most `rebuilds` times, and gets the weights that it had; then the
    call is repeated. Keys name what is drawn, so the rollout is the same. `check` passes a rebuilt engine
    before any of its rollouts is returned.

    With `in_flight` the rollout under way goes on with the weights of a load, which another thread gives to
    the engine at once; calls that begin later wait for it in any case.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        rebuilds: int = 0,
        check: Check | None = None,
        in_flight: bool = False,
        turns: Turns | None = None,
    ):
        self.in_flight = in_flight
        self.turns = turns
        self.served: Weights | None = None  # that another rank has loaded, and this one perhaps not yet
        self.numbers = itertools.count()  # of loads
        self.build = build
        self.rebuilds = rebuilds
        self.check = check
        self.target = build()
        self.unchecked = False  # built again, and not checked since
        self.newest: Weights | None = None  # of the last load, which may still wait its turn
        self.loaded: Weights | None = None  # what the engine has
        self.failed: BaseException | None = None  # why it was given up
        self.seconds = 0.0  # in calls
        self.begun: dict[str, Future[Rollout]] = {}
        self.loading = threading.RLock()
        self.jobs = self._thread("rft_fn engine")
        self.loads = self._thread("rft_fn loads") if in_flight else None

    def _thread(self, name: str) -> "queue.SimpleQueue[Callable[[], None] | None]":
        """Start a thread that does the jobs of a queue."""
        jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(jobs,), daemon=True, name=name).start()
        return jobs

    def submit(self, call: Callable[[Engine], T]) -> "Future[T]":
        """Queue a call and return its future."""
        future: Future[T] = Future()

        def run() -> None:
            began = time.perf_counter()
            try:
                value = self._call(call)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)
            self.seconds += time.perf_counter() - began

        self.jobs.put(run)
        return future

    # ---- the functions of an engine

    def engine(self) -> Engine:
        """Return the engine, called from one worker thread."""
        return record(Engine, self)

    def sleep(self) -> None:
        """Do nothing: the engine is always awake."""

    def wake(self) -> None:
        """Do nothing: the engine is always awake."""

    def begin(self, request: Request) -> None:
        """Queue a rollout with the newest weights; `generate` with its keys waits for it."""
        self.begun[name_of(request.keys, request.n, request.sampling)] = self.submit(request.ask)

    def generate(
        self, prompts: Sequence[Any], keys: Sequence[Any], *, n: int = 1, sampling: Sampling, **of_rows: Any
    ) -> Rollout:
        """Return the rollout that was started with these keys, or sample one.

        EngineDead for an engine that was built again and fails its check.
        """
        rollout = self._sample(prompts, keys, n=n, sampling=sampling, **of_rows)
        self._check_rebuilt()
        return rollout

    def _sample(
        self, prompts: Sequence[Any], keys: Sequence[Any], *, n: int = 1, sampling: Sampling, **of_rows: Any
    ) -> Rollout:
        part = None if of_rows else self.begun.pop(name_of(keys, n, sampling), None)
        if part is None:
            part = self.submit(Request(prompts, keys, n, sampling, **of_rows).ask)
        return part.result()

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        """Return the engine's log-probs of a rollout, when earlier calls are done."""
        return self.submit(lambda engine: engine.score(rollout, sampling=sampling)).result()

    def status(self) -> EngineStatus:
        """Return the state of the engine, at once; dead when it was given up."""
        status = self.target.status()
        return {**status, "alive": status["alive"] and self.failed is None}

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Copy the weights and queue their load; returns at once."""
        copy = Weights(weights, version)
        self.newest = copy
        number = next(self.numbers)

        def load(engine: Engine) -> None:
            with self.loading:
                if self.loaded is copy:  # in flight
                    return
                if self.turns is not None:
                    self.turns.wait(number, lambda: self.failed is not None, at_once=self.in_flight)
                    self.served = copy if self.turns.rank else None
                delivered = copy.load(engine)
                if delivered._replace(seconds=0.0) != copy.delivered:
                    self.failed = EngineDead(
                        f"sync: expected the engine to take {copy.delivered}, got {delivered}"
                    )
                self.loaded = copy
            pass_on()

        def pass_on(_: object = None) -> None:
            if self.turns is not None:
                self.turns.pass_on(number)

        def load_in_flight() -> None:
            with suppress(Exception):  # the queued one meets it too
                load(self.target)

        if self.loads is not None:
            self.loads.put(load_in_flight)
        # also where the engine is lost for good: no rank waits for it
        self.submit(load).add_done_callback(pass_on)
        return copy.delivered

    def close(self) -> None:
        """End the thread and the engine, also in the middle of a call."""
        for jobs in (self.jobs, self.loads):
            if jobs is not None:
                jobs.put(None)
        self.failed = self.failed or EngineDead("engine: expected one that is alive, got one that was closed")
        self.target.close()

    def _check_rebuilt(self) -> None:
        """Check an engine that was built again, until one passes and stays alive."""
        while self.unchecked and self.check is not None and self.newest is not None:
            self.unchecked = False
            try:
                self.check(self.engine()._replace(generate=self._sample), self.newest)
            except CanaryError as error:
                self.failed = EngineDead(str(error))
                raise self.failed from error

    def _work(self, jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while job := jobs.get():
            job()

    def _call(self, call: Callable[[Engine], T]) -> T:
        """Call, rebuilding a dead engine up to `rebuilds` times."""
        while True:
            if self.failed is not None:
                raise EngineDead(str(self.failed)) from self.failed
            try:
                return call(self.target)
            except Exception as error:
                if self.target.status()["alive"]:
                    raise
                self._rebuild(error)

    def _rebuild(self, error: Exception) -> None:
        """Build another engine with the weights of the dead one; raise `error` if none is left."""
        if not self.rebuilds or self.failed is not None:
            self.failed = self.failed or error
            raise error
        self.rebuilds -= 1
        line = f"warning: {error}; building it again ({self.rebuilds} left)"
        print(printable(line), file=sys.stderr, flush=True)
        self.target.close()
        try:
            with self.loading:
                self.target = self.build()
                self.unchecked = True
                weights = self.served or self.loaded
                if weights is not None:
                    weights.load(self.target)
        except Exception as again:
            self._rebuild(again)
        if self.failed is not None:  # closed in the meantime
            self.target.close()
