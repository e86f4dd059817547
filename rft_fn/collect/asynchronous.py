"""Asynchronous rollouts: those of coming steps are sampled while the trainer learns from earlier ones.

At step k, with weights of version k, the rollouts of the steps up to k + ahead are begun. So the rollout of
step k is of version max(0, k - ahead), and a run is a function of its seed and `ahead`: nothing depends on
which of the two sides was faster.

One thread calls the engine, one call after the other in the order in which they were asked for. It never
meets another rank: rollouts are gathered, and weights are put together, by the thread that trains.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from rft_fn import rng
from rft_fn.check import printable
from rft_fn.collect.gather import check_prompts, gather_and_generate, part_of_rank, with_media, without_media
from rft_fn.engine import EngineConfig, EngineDead
from rft_fn.sync import CanaryError
from rft_fn.types import Engine, Rollout, Sampling, Strategy
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["Ahead", "InOrder", "Weights", "apart", "due", "name_of", "version_of"]


# ---------- an engine that is called by a thread, one call after the other, and built again where it dies


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


# ---------- asynchronous rollouts


# ---------- the schedule


def due(step: int, ahead: int, total: int) -> range:
    """The steps whose rollouts are begun by the start of `step`, of `total` steps."""
    return range(step, min(step + ahead + 1, total))


def version_of(step: int, ahead: int) -> int:
    """The version of the weights that sample the rollout of a step."""
    return max(0, step - ahead)


def apart(config: EngineConfig, threads: int) -> tuple[EngineConfig, int]:
    """(the config of an engine that samples during training, how many of `threads` the trainer keeps).

    The engine has a process of its own, never sleeps, and takes half of the threads unless it was given a
    number. ValueError for an engine of several processes: its ranks would have to meet while they train.
    """
    if config.tp_size != 1:
        raise ValueError(
            f"ahead, engine_tp_size: expected one process for each engine that samples ahead, got "
            f"{config.tp_size}"
        )
    share = config.threads or max(1, threads // 2)
    alone = replace(config, process=True, sleep=False, threads=share)
    return alone, max(1, threads - share)


# ---------- the rollouts


class _Begun(NamedTuple):
    """The arguments of a rollout that is under way."""

    prompts: Sequence[Any]
    keys: Sequence[int]
    n: int
    sampling: Sampling
    weights: Weights | None  # that sample it


class Ahead:
    """Samples the rollouts of coming steps while earlier ones are learned from.

    `engine` is for everything else: evaluation, scores and weight sync, each after what was asked for before.
    With `calls` rollouts can be begun early, and a load copies the weights and returns at once; without, the
    rollout of a step is sampled when it is asked for.
    """

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        *,
        calls: InOrder | None = None,
        saved: Sequence[dict[str, Any]] = (),
    ):
        """`engine` calls `calls.engine()`, or is that; `saved` is `save()` of a checkpoint."""
        self.engine = engine
        self.strategy = strategy
        self._calls = calls
        self._begun: dict[str, _Begun] = {}
        self._done: dict[str, Rollout] = {x["name"]: x["rollout"] for x in saved if "rollout" in x}
        self._older = {x["name"]: Weights.restored(x) for x in saved if "weights" in x}  # of rollouts lost
        self._asked: set[str] = set()  # of those begun or saved, what this process has asked for
        self._used: dict[str, Rollout] = {}  # of those, what the step under way was given
        self._dead = False  # the engine is lost for good

    def begin(self, prompts: Sequence[Any], keys: Sequence[int], *, n: int, sampling: Sampling) -> None:
        """Begin a rollout with the weights that were loaded last, unless it was begun or saved before.

        One that was lost is drawn with the weights that were saved for it. Every rank samples its part of the
        prompts, in order.
        """
        name = name_of(keys, n, sampling)
        self._asked.add(name)
        self._used.clear()
        calls = self._calls
        if calls is None or name in self._begun or name in self._done:
            return

        check_prompts(self.engine, prompts, keys, n=n, sampling=sampling)

        # the weights that were loaded last come back behind the older ones
        newest = calls.newest
        older = self._older.pop(name, None)
        self._begun[name] = _Begun(prompts, keys, n, sampling, older or newest)
        if older is not None:
            older.load(calls.engine())
        mine = part_of_rank(self.strategy, len(prompts))
        if mine.start < mine.stop:
            calls.begin(prompts[mine], keys[mine], n=n, sampling=sampling)
        if older is not None and newest is not None:
            newest.load(calls.engine())

    def generate(self, prompts: Sequence[Any], keys: Sequence[int], *, n: int, sampling: Sampling) -> Rollout:
        """`gather_and_generate`: the rollout that was begun with these keys, or else a new one.

        All ranks call it.
        """
        name = name_of(keys, n, sampling)
        if name in self._done:
            rollout = with_media(self.strategy, self._done.pop(name), prompts)
        else:
            rollout = self._sampled(prompts, keys, n, sampling)
        if name in self._asked:
            self._asked.remove(name)
            self._used[name] = rollout
        return rollout

    def _sampled(self, prompts: Sequence[Any], keys: Sequence[int], n: int, sampling: Sampling) -> Rollout:
        """A rollout of the engine; one that is lost with it counts as begun."""
        try:
            rollout = gather_and_generate(self.engine, self.strategy, prompts, keys, n=n, sampling=sampling)
        except EngineDead:
            self._dead = True
            raise
        self._begun.pop(name_of(keys, n, sampling), None)
        return rollout

    def save(self) -> list[dict[str, Any]]:
        """The rollouts under way, for a checkpoint: waits until they are done. All ranks call it.

        They cannot be drawn again by a resumed run, which has no longer the weights that they are drawn with.
        For one that is lost with its engine these weights are saved, unless they are those of the checkpoint;
        and as the engine was lost in the middle of a step, what that step has used is saved too. Media are
        left out, and come back with the prompts.
        """
        with suppress(EngineDead):
            for name, begun in list(self._begun.items()):
                self._done[name] = self._sampled(begun.prompts, begun.keys, begun.n, begun.sampling)
        kept = self._asked & set(self._done)  # a run with other options does not ask for all that it found
        done = {name: self._done[name] for name in kept}
        if self._dead:
            done |= self._used
        saved = [{"name": name, "rollout": without_media(done[name])} for name in sorted(done)]
        return saved + self._lost()

    def _lost(self) -> list[dict[str, Any]]:
        """The rollouts that are still under way, each with the older weights that sample it."""
        found: list[dict[str, Any]] = []
        for name, begun in sorted(self._begun.items()):
            newest = self._calls and self._calls.newest
            if begun.weights and newest and begun.weights.version != newest.version:
                found.append({"name": name, **begun.weights.saved()})
        return found

    def busy(self) -> float:
        """Seconds that the engine has worked since the last call of this function; 0 without `calls`."""
        if self._calls is None:
            return 0.0
        seconds = self._calls.seconds
        self._calls.seconds = 0.0
        return seconds

    def close(self) -> None:
        """End the engine, whatever it is doing."""
        self.engine.close()
