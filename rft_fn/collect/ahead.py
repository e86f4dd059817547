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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rft_fn import rng
from rft_fn.collect.generate import gather_and_generate
from rft_fn.collect.media import with_media, without_media
from rft_fn.collect.part import part_of_rank
from rft_fn.engine import EngineConfig, EngineDead
from rft_fn.types import Engine, Rollout, Sampling, Strategy
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["Ahead", "InOrder", "apart", "due", "version_of"]

T = TypeVar("T")


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


# ---------- the engine, called in order


def _name(keys: Sequence[Any], n: int, sampling: Sampling) -> str:
    """The name of a rollout: keys name what is drawn."""
    return f"{rng.fold_in(0, *(str(key) for key in keys), n, repr(sampling)):016x}"


def _nothing() -> None:
    """Sleep or wake an engine that is always awake."""


class _Weights(Iterable[tuple[str, Tensor]]):
    """A copy of weights on the host: the trainer changes its own in place."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], version: int):
        self.pairs = [(name, x.detach().to("cpu", copy=True)) for name, x in weights]
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))  # once they were read
        self.version = version

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


class InOrder:
    """A thread that calls an engine, in the order in which the calls were asked for.

    An engine that dies is built again, at most `rebuilds` times, and gets the weights that it had; then the
    call is made again. Keys name what is drawn, so the rollout is the same.
    """

    def __init__(self, build: Callable[[], Engine], *, rebuilds: int = 0):
        self.build = build
        self.rebuilds = rebuilds
        self.target = build()
        self.loaded: _Weights | None = None  # what the engine has
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
        return Engine(
            generate=self.generate,
            score=self.score,
            load=self.load,
            sleep=_nothing,
            wake=_nothing,
            status=self.status,
            close=self.close,
        )

    def begin(self, prompts: Sequence[Any], keys: Sequence[Any], *, n: int, sampling: Sampling) -> None:
        """Ask for a rollout with the weights that were loaded last; `generate` with its keys waits for it."""
        self.begun[_name(keys, n, sampling)] = self.submit(
            lambda engine: engine.generate(prompts, keys, n=n, sampling=sampling)
        )

    def generate(
        self, prompts: Sequence[Any], keys: Sequence[Any], *, n: int = 1, sampling: Sampling, **rows: Any
    ) -> Rollout:
        """`Generate`: the rollout that was begun with these keys, or else a new one."""
        part = None
        if not rows:
            part = self.begun.pop(_name(keys, n, sampling), None)
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
        copy = _Weights(weights, version)

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
        print(f"{error}; building it again ({self.rebuilds} left)", file=sys.stderr, flush=True)
        self.target.close()
        try:
            self.target = self.build()
            if self.loaded is not None:
                self.loaded.load(self.target)
        except Exception as again:
            self._rebuild(again)
        if self.failed is not None:  # closed in the meantime
            self.target.close()


# ---------- the rollouts


class _Begun(NamedTuple):
    """The arguments of a rollout that is under way."""

    prompts: Sequence[Any]
    keys: Sequence[int]
    n: int
    sampling: Sampling


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
        self._done: dict[str, Rollout] = {x["name"]: x["rollout"] for x in saved}  # of all ranks
        self._asked: set[str] = set()  # of those begun or saved, what this process has asked for

    def begin(self, prompts: Sequence[Any], keys: Sequence[int], *, n: int, sampling: Sampling) -> None:
        """Begin a rollout with the weights that were loaded last, unless it was begun or saved before.

        Every rank samples its part of the prompts, in order.
        """
        name = _name(keys, n, sampling)
        self._asked.add(name)
        if self._calls is None or name in self._begun or name in self._done:
            return
        self._begun[name] = _Begun(prompts, keys, n, sampling)
        mine = part_of_rank(self.strategy, len(prompts))
        if mine.start < mine.stop:
            self._calls.begin(prompts[mine], keys[mine], n=n, sampling=sampling)

    def generate(self, prompts: Sequence[Any], keys: Sequence[int], *, n: int, sampling: Sampling) -> Rollout:
        """`gather_and_generate`: the rollout that was begun with these keys, or else a new one.

        All ranks call it.
        """
        name = _name(keys, n, sampling)
        self._asked.discard(name)
        if name in self._done:
            return with_media(self.strategy, self._done.pop(name), prompts)
        self._begun.pop(name, None)
        how: dict[str, Any] = {"n": n, "sampling": sampling}
        return gather_and_generate(self.engine, self.strategy, prompts, keys, **how)

    def save(self) -> list[dict[str, Any]]:
        """The rollouts under way, for a checkpoint: waits until they are done. All ranks call it.

        They cannot be drawn again by a resumed run, which has no longer the weights that they are drawn with.
        One that is lost with its engine is left out: a resumed run draws it with newer weights. Media are
        left out too, and come back with the prompts.
        """
        with suppress(EngineDead):
            for name, begun in list(self._begun.items()):
                how: dict[str, Any] = {"n": begun.n, "sampling": begun.sampling}
                self._done[name] = without_media(self.generate(begun.prompts, begun.keys, **how))
                self._asked.add(name)
        kept = self._asked & set(self._done)  # a run with other options does not ask for all that it found
        return [{"name": name, "rollout": self._done[name]} for name in sorted(kept)]

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
