"""Sample the rollouts of later steps while the trainer learns from earlier ones.

At step k, with weights of version k, the rollouts of the steps up to k + ahead are begun. So the rollout of
step k is of version max(0, k - ahead), and a run is a function of its seed and `ahead`: nothing depends on
which side was faster.

One thread calls the engine, in the order in which the calls were made. It never meets another rank: rollouts
are gathered, and weights are put together, by the thread that trains.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rft_fn import rng
from rft_fn.engine import EngineConfig, EngineDead
from rft_fn.engine.global_batch import (
    check_prompts,
    gather_and_generate,
    shard_prompts,
    with_media,
    without_media,
)
from rft_fn.engine.requests import Request
from rft_fn.sync import CanaryError
from rft_fn.text import printable
from rft_fn.types import Engine, Rollout, Sampling, Strategy, record
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = [
    "AsyncSampler", "EngineWorker", "Weights", "due", "name_of", "split_threads", "version_of",
]  # fmt: skip

T = TypeVar("T")


# ---------- an engine that one thread calls, and that is built again where it dies


def name_of(keys: Sequence[Any], n: int, sampling: Sampling) -> str:
    """Return the name of a rollout: keys name what is drawn."""
    return f"{rng.fold_in(0, *(str(key) for key in keys), n, repr(sampling)):016x}"


class Weights(Iterable[tuple[str, Tensor]]):
    """A copy of weights on the host: the trainer changes its own in place."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], version: int):
        self.pairs = [(name, x.detach().to("cpu", copy=True)) for name, x in weights]
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))  # once they were read
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


class EngineWorker:
    """A thread that calls an engine, in the order in which the calls were made; it never sleeps.

    An engine that dies is built again, at most `rebuilds` times, and gets the weights that it had; then the
    call is repeated. Keys name what is drawn, so the rollout is the same. `check` passes a rebuilt engine
    before any of its rollouts is returned.
    """

    def __init__(self, build: Callable[[], Engine], *, rebuilds: int = 0, check: Check | None = None):
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
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="rft_fn engine").start()

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
        """Return the rollout that was begun with these keys, or sample one.

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
        """Check an engine that was built again, until one passes and stays alive."""
        while self.unchecked and self.check is not None and self.newest is not None:
            self.unchecked = False
            try:
                self.check(self.engine()._replace(generate=self._sample), self.newest)
            except CanaryError as error:
                self.failed = EngineDead(str(error))
                raise self.failed from error

    def _work(self) -> None:
        while job := self.jobs.get():
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
            self.target = self.build()
            self.unchecked = True
            if self.loaded is not None:
                self.loaded.load(self.target)
        except Exception as again:
            self._rebuild(again)
        if self.failed is not None:  # closed in the meantime
            self.target.close()


# ---------- the schedule


def due(step: int, ahead: int, total: int) -> range:
    """Return the steps with rollouts that are begun by the start of `step`, of `total` steps."""
    return range(step, min(step + ahead + 1, total))


def version_of(step: int, ahead: int) -> int:
    """Return the version of the weights that sample the rollout of a step."""
    return max(0, step - ahead)


def split_threads(config: EngineConfig, threads: int) -> tuple[EngineConfig, int]:
    """Return (the config of an engine that samples during training, the trainer's share of `threads`).

    The engine has its own process, never sleeps, and takes half of the threads unless it was given a
    number. ValueError for an engine of several processes: its ranks would have to meet while they train.
    """
    if config.tp_size != 1:
        raise ValueError(
            f"ahead, engine_tp_size: expected one process for each engine that samples ahead, got "
            f"{config.tp_size}"
        )
    share = config.threads or max(1, threads // 2)
    return replace(config, process=True, sleep=False, threads=share), max(1, threads - share)


# ---------- the rollouts


class _Begun(NamedTuple):
    """A rollout that is under way."""

    request: Request
    weights: Weights | None  # that sample it


class AsyncSampler:
    """Samples the rollouts of later steps while the trainer learns from earlier ones.

    `engine` is for everything else: evaluation, scores and weight sync, each after the calls before it. With
    `calls` rollouts can be begun early, and a load copies the weights and returns at once; without, the
    rollout of a step is sampled when it is needed.
    """

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        *,
        calls: EngineWorker | None = None,
        saved: Sequence[dict[str, Any]] = (),
    ):
        """Take an `engine` that calls `calls.engine()`, or is that, and `save()` of a checkpoint."""
        self.engine = engine
        self.strategy = strategy
        self._calls = calls
        self._begun: dict[str, _Begun] = {}
        self._done: dict[str, Rollout] = {}
        self._older: dict[str, Weights] = {}  # of lost rollouts
        self._asked: set[str] = set()  # begun or saved, and wanted by this process
        self._used: dict[str, Rollout] = {}  # of them, given to the step under way
        self._dead = False  # the engine is lost for good
        self.resume(saved)

    def resume(self, saved: Sequence[dict[str, Any]]) -> None:
        """Take up the rollouts that a checkpoint has kept, as `save` returned them."""
        self._done |= {x["name"]: x["rollout"] for x in saved if "rollout" in x}
        self._older |= {x["name"]: Weights.restored(x) for x in saved if "weights" in x}

    def begin(self, prompts: Sequence[Any], keys: Sequence[int], *, n: int, sampling: Sampling) -> None:
        """Begin a rollout with the newest weights, unless it was begun or saved before.

        A lost one is drawn with the weights that were saved for it. Every rank samples its part of the
        prompts, in order.
        """
        name = name_of(keys, n, sampling)
        self._asked.add(name)
        self._used.clear()
        calls = self._calls
        if calls is None or name in self._begun or name in self._done:
            return

        request = Request(prompts, keys, n, sampling)
        check_prompts(self.engine, request)

        # the newest weights come back after the older ones
        newest = calls.newest
        older = self._older.pop(name, None)
        self._begun[name] = _Begun(request, older or newest)
        if older is not None:
            older.load(calls.engine())
        mine = shard_prompts(self.strategy, len(prompts))
        if mine.start < mine.stop:
            calls.begin(request.part(mine))
        if older is not None and newest is not None:
            newest.load(calls.engine())

    def generate(self, prompts: Sequence[Any], keys: Sequence[int], *, n: int, sampling: Sampling) -> Rollout:
        """Return the rollout that was begun with these keys, or sample one. All ranks call it."""
        name = name_of(keys, n, sampling)
        if name in self._done:
            rollout = with_media(self.strategy, self._done.pop(name), prompts)
        else:
            rollout = self._sampled(Request(prompts, keys, n, sampling))
        if name in self._asked:
            self._asked.remove(name)
            self._used[name] = rollout
        return rollout

    def _sampled(self, request: Request) -> Rollout:
        """Sample a rollout; one that is lost with its engine counts as begun."""
        prompts, keys, n, sampling = request[:4]
        try:
            rollout = gather_and_generate(self.engine, self.strategy, prompts, keys, n=n, sampling=sampling)
        except EngineDead:
            self._dead = True
            raise
        self._begun.pop(name_of(keys, n, sampling), None)
        return rollout

    def save(self) -> list[dict[str, Any]]:
        """Finish the rollouts under way, and return them for a checkpoint. All ranks call it.

        A resumed run cannot draw them again, without the weights that they are drawn with. For a rollout that
        is lost with its engine these weights are saved, unless the checkpoint has them anyway; and as the
        engine was lost in the middle of a step, what that step has used is saved too. Media are left out, and
        come back with the prompts.
        """
        with suppress(EngineDead):
            for name, begun in list(self._begun.items()):
                self._done[name] = self._sampled(begun.request)
        # a run with other options does not ask for all that was saved
        done = {name: self._done[name] for name in self._asked & set(self._done)}
        if self._dead:
            done |= self._used
        saved = [{"name": name, "rollout": without_media(done[name])} for name in sorted(done)]

        # what is still under way is lost: the older weights that sample it
        newest = self._calls and self._calls.newest
        for name, begun in sorted(self._begun.items()):
            if begun.weights and newest and begun.weights.version != newest.version:
                saved.append({"name": name, **begun.weights.saved()})
        return saved

    def busy(self) -> float:
        """Return the seconds that the engine has worked since the last call; 0 without `calls`."""
        if self._calls is None:
            return 0.0
        seconds = self._calls.seconds
        self._calls.seconds = 0.0
        return seconds

    def close(self) -> None:
        """End the engine, whatever it is doing."""
        self.engine.close()
