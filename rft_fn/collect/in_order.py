"""An engine that is called by a thread, one call after the other, and built again where it dies."""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from torch import Tensor

from rft_fn import rng
from rft_fn.check import printable
from rft_fn.engine import EngineDead
from rft_fn.sync import CanaryError
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["InOrder", "Weights", "name_of"]

T = TypeVar("T")


def name_of(keys: Sequence[Any], n: int, sampling: Sampling) -> str:
    """The name of a rollout: keys name what is drawn."""
    return f"{rng.fold_in(0, *(str(key) for key in keys), n, repr(sampling)):016x}"


def _nothing() -> None:
    """Sleep or wake an engine that is always awake."""


class Weights(Iterable[tuple[str, Tensor]]):
    """A copy of weights on the host: the trainer changes its own in place."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], version: int):
        self.pairs = [(name, x.detach().to("cpu", copy=True)) for name, x in weights]
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))  # once they were read
        self.version = version

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Weights":
        """The weights that `saved` was made of."""
        found = cls(saved["weights"].items(), saved["version"])
        found.frozen = frozenset(saved["frozen"])
        return found

    def saved(self) -> dict[str, Any]:
        """A tree for a checkpoint."""
        return {"weights": dict(self.pairs), "frozen": sorted(self.frozen), "version": self.version}

    def __iter__(self):
        return iter(self.pairs)

    def load(self, engine: Engine) -> Delivered:
        """Give them to an engine."""
        return engine.load(self, version=self.version)

    @property
    def delivered(self) -> Delivered:
        """The record of a load that takes all of them."""
        size = sum(x.numel() * x.element_size() for _, x in self.pairs)
        return Delivered(len(self.pairs), size, 0.0, self.version)


class Check(Protocol):
    """Checks an engine that was built again."""

    def __call__(self, engine: Engine, weights: Weights) -> object:
        """CanaryError if the engine does not sample from what it is sent; it has `weights` at the end.

        Called by the thread of the trainer, on one rank alone.
        """
        ...


class InOrder:
    """A thread that calls an engine, in the order in which the calls were asked for.

    An engine that dies is built again, at most `rebuilds` times, and gets the weights that it had; then the
    call is made again. Keys name what is drawn, so the rollout is the same. No rollout of an engine that was
    built again is handed on before `check` has passed it.
    """

    def __init__(self, build: Callable[[], Engine], *, rebuilds: int = 0, check: Check | None = None):
        self.build = build
        self.rebuilds = rebuilds
        self.check = check
        self.target = build()
        self.unchecked = False  # it was built again, and not checked since
        self.newest: Weights | None = None  # what was loaded last, by the calls that were asked for
        self.loaded: Weights | None = None  # what the engine has
        self.failed: BaseException | None = None  # the error after which it was given up
        self.seconds = 0.0  # in calls
        self.begun: dict[str, Future[Rollout]] = {}
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="rft_fn engine").start()

    def submit(self, call: Callable[[Engine], T]) -> "Future[T]":
        """What a call gives, later."""
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
        """The engine whose calls wait their turn; it is always awake."""
        return self._unchecked_engine()._replace(generate=self.generate)

    def _unchecked_engine(self) -> Engine:
        """The same without a check of its rollouts."""
        return Engine(
            generate=self._sample,
            score=self.score,
            load=self.load,
            sleep=_nothing,
            wake=_nothing,
            status=self.status,
            close=self.close,
        )

    def begin(self, prompts: Sequence[Any], keys: Sequence[Any], *, n: int, sampling: Sampling) -> None:
        """Ask for a rollout with the weights that were loaded last; `generate` with its keys waits for it."""
        self.begun[name_of(keys, n, sampling)] = self.submit(
            lambda engine: engine.generate(prompts, keys, n=n, sampling=sampling)
        )

    def generate(
        self, prompts: Sequence[Any], keys: Sequence[Any], *, n: int = 1, sampling: Sampling, **rows: Any
    ) -> Rollout:
        """`Generate`: the rollout that was begun with these keys, or else a new one.

        EngineDead for an engine that was built again and fails its check.
        """
        rollout = self._sample(prompts, keys, n=n, sampling=sampling, **rows)
        self._check_rebuilt()
        return rollout

    def _sample(
        self, prompts: Sequence[Any], keys: Sequence[Any], *, n: int = 1, sampling: Sampling, **rows: Any
    ) -> Rollout:
        part = None
        if not rows:
            part = self.begun.pop(name_of(keys, n, sampling), None)
        if part is None:
            part = self.submit(lambda engine: engine.generate(prompts, keys, n=n, sampling=sampling, **rows))
        return part.result()

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        """`Score`."""
        return self.submit(lambda engine: engine.score(rollout, sampling=sampling)).result()

    def status(self) -> EngineStatus:
        """The state of the engine, whatever it is doing; dead once it was given up."""
        status = self.target.status()
        return {**status, "alive": status["alive"] and self.failed is None}

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Copy the weights, and load them when earlier calls are done; nobody waits for that."""
        copy = Weights(weights, version)
        self.newest = copy

        def load(engine: Engine) -> None:
            delivered = copy.load(engine)
            if delivered._replace(seconds=0.0) != copy.delivered:
                self.failed = EngineDead(
                    f"sync: expected the engine to take {copy.delivered}, got {delivered}"
                )
            self.loaded = copy

        self.submit(load)
        return copy.delivered

    def close(self) -> None:
        """End the thread and the engine, also in the middle of a call."""
        self.jobs.put(None)
        self.failed = self.failed or EngineDead("engine: expected one that is alive, got one that was closed")
        self.target.close()

    def _check_rebuilt(self) -> None:
        """Check an engine that was built again, until one passes without dying meanwhile."""
        while self.unchecked and self.check is not None and self.newest is not None:
            self.unchecked = False
            try:
                self.check(self._unchecked_engine(), self.newest)
            except CanaryError as error:
                self.failed = EngineDead(str(error))
                raise self.failed from error

    def _work(self) -> None:
        while job := self.jobs.get():
            job()

    def _call(self, call: Callable[[Engine], T]) -> T:
        """The value of a call, after as many engines as it takes."""
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
        """Build another engine with the weights of the dead one. Raises `error` where it is the last."""
        if not self.rebuilds or self.failed is not None:
            self.failed = self.failed or error
            raise error
        self.rebuilds -= 1
        line = f"warning: {error}; building it again ({self.rebuilds} left)"
        print(printable(line), file=sys.stderr, flush=True)
        self.target.close()
        try:
            self.target = self.build()
            self.unchecked = True
            if self.loaded is not None:
                self.loaded.load(self.target)
        except Exception as again:
            self._rebuild(again)
        if self.failed is not None:  # closed in the meantime
            self.target.close()
