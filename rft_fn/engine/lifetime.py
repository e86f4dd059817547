"""Supervises an engine: it answers in time, is dead once it failed, and another takes its place."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rft_fn.engine.requests import BadRequest, Request, drawn_with, empty
from rft_fn.engine.time_limit import time_limit
from rft_fn.text import error_text
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus, OnRow, described, record

__all__ = [
    "EngineCore", "EngineDead", "Rebuilds", "Supervised", "Unchanged", "dead_after_failure", "deferred",
    "saving", "supervised",
]  # fmt: skip


_ADVICE = "the time of a call, got none; raise engine_timeout, or build another engine"
_savers: list[Callable[[], str]] = []  # of the blocks that are entered


class EngineDead(RuntimeError):
    """A call to an engine that has failed or was closed."""


class EngineCore(Protocol):
    """The functions of an engine before it is supervised, with one argument for those of `generate`."""

    def sample(self, request: Request) -> Rollout:
        """Sample as `types.Generate` says; BadRequest before anything ran."""
        ...

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        """Score as `types.engine.Score` says."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Load as `types.engine.Load` says."""
        ...

    def sleep(self) -> None:
        """Move the weights to the host."""
        ...

    def wake(self) -> None:
        """Move them back to the device."""
        ...

    def status(self) -> EngineStatus:
        """Return the state of the engine."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it is called once."""
        ...


class Unchanged(Exception):
    """An error that another engine would not change: the weights are wrong, or do not arrive."""


def supervised(
    build: Callable[[], EngineCore | Engine], *, timeout: float | None = None, loads_together: bool = False
) -> Engine:
    """Return an engine that is dead after an exception out of `generate` or `load`, and after `close`.

    A BadRequest leaves it alive. What a dead engine holds is freed by `close`, which may be called twice.

    With a `timeout` [s], `generate`, `score` and `load` raise TimeoutError when they have taken so long. This
    interrupts Python. A call that stays in native code for some seconds more ends the process, with the stack
    of all threads and one line, and exit code 2; `saving` says what is saved before that. Where an engine
    `loads_together` with those of other processes, a load has the limit of their group and not this one.

    An engine that `build` gives supervised is not wrapped twice. `Supervised` also builds another engine in
    place of one that died.
    """
    return Supervised(build, timeout=timeout, loads_together=loads_together).engine()


def dead_after_failure(engine: Engine) -> Engine:
    """Return `engine`, dead after an exception out of its `generate` or `load`, and after `close`."""
    return supervised(lambda: engine)


class _OfFunctions:
    """An engine that is a record of functions already."""

    def __init__(self, engine: Engine):
        _, self.score, self.load, self.sleep, self.wake, self.status, self.close = engine
        self.engine = engine

    def sample(self, request: Request) -> Rollout:
        return request.ask(self.engine)


class Rebuilds(NamedTuple):
    """How another engine takes the place of one that died; the functions are called on all ranks alike."""

    most: int  # engines that are built again, in all
    restore: Callable[[], None]  # gives a new engine its weights and checks that it samples from them
    on_any_rank: Callable[[bool], bool]
    announce: Callable[[str], None]


class Supervised:
    """An engine in time, dead where `generate` or `load` raise, and built again where that is due.

    With `rebuilds` a call that an engine died of, on any rank, is repeated by another one, which has the same
    weights: keys name what is drawn, so the rollout is the same. EngineDead from `generate` when no engine
    stays alive. All ranks call `generate` alike then, and `sleep` and `wake` pass over an engine that died.
    """

    def __init__(
        self,
        build: Callable[[], EngineCore | Engine],
        *,
        timeout: float | None = None,
        loads_together: bool = False,
        rebuilds: Rebuilds | None = None,
    ):
        self.build = build if rebuilds else None  # it may hold the weights of the first engine
        self.timeout = timeout
        self.loads_together = loads_together
        self.rebuilds = rebuilds
        self.left = rebuilds.most if rebuilds else 0
        self.attempting = False  # within an attempt: what is called there is repeated as a whole
        self.failure = ""  # of the last attempt, on any rank; empty where it went well
        self.where = ""  # " in NAME" of the call that the last engine died of, where it is of this rank
        self.lost = ""  # why the last engine died, once no new one is built
        self._take(build())

    def _take(self, built: EngineCore | Engine) -> None:
        """Take an engine that was just built in place of the last one."""
        core = self._core_of(built) if isinstance(built, Engine) else built
        self.core: EngineCore | None = core
        self.last: EngineStatus = core.status()
        self.ended = ""  # why it is not alive; empty while it is
        self.fresh = True  # it has not had any weights since it was built

    def _core_of(self, engine: Engine) -> EngineCore:
        """Return what an engine calls, and take over its supervision where it has one: no call has two."""
        inner = engine.generate.__self__ if inspect.ismethod(engine.generate) else None
        if not isinstance(inner, Supervised) or inner.core is None or inner.ended or inner.rebuilds:
            return _OfFunctions(engine)
        if inner.engine() != engine:
            return _OfFunctions(engine)  # a function of it was replaced
        self.timeout = inner.timeout if self.timeout is None else self.timeout
        self.loads_together = self.loads_together or inner.loads_together
        return inner.core

    def engine(self) -> Engine:
        """Return the engine as a record of functions."""
        return record(Engine, self)

    def running(self) -> EngineCore:
        """Return the engine itself. EngineDead, with the reason, for one that is not alive."""
        if self.core is None or self.ended:
            raise EngineDead(
                f"engine {self.last['engine']}: expected one that is alive, got one that {self.ended}; "
                "build another with get_engine"
            )
        return self.core

    def in_time(self, name: str) -> AbstractContextManager[None]:
        """Limit the time of the block, a call of that name, where there is a limit."""
        if self.timeout is None:
            return nullcontext()
        line = f"engine {self.last['engine']}, {name}"
        return time_limit(self.timeout, lambda: line, advice=_ADVICE, before_end=_save)

    @contextmanager
    def mark_dead(self, name: str) -> Iterator[EngineCore]:
        """Mark the engine dead if the block raises anything but BadRequest."""
        core = self.running()
        try:
            yield core
        except BadRequest:
            raise
        except BaseException as error:
            # only the text: the error itself would keep the tensors of its frames in memory
            reason = f"{type(error).__name__}: {error_text(error)}"
            self.ended = f"failed in {name} ({reason})"
            self.where = f" in {name}"
            raise

    def attempts(self, *, restored: bool = True) -> Iterator[AbstractContextManager[None]]:
        """Yield the block of a call, and again after each engine that was built in place of one that died.

        `lost` says afterwards why there is no engine that stays alive. A new engine is `restored` before the
        block runs again. Within a block, and without `rebuilds`, it is yielded once, and raises.
        """
        if self.rebuilds is None or self.attempting:
            yield nullcontext()
            return
        yield self._attempt(self.rebuilds)
        while self.failure and self._rebuild(self.rebuilds):
            if restored:
                with self._attempt(self.rebuilds):
                    self.rebuilds.restore()
            if not restored or not self.failure:
                yield self._attempt(self.rebuilds)

    @contextmanager
    def _attempt(self, rebuilds: Rebuilds) -> Iterator[None]:
        """Note the failure of an engine on any rank, and raise other errors.

        All ranks agree, because the next thing that any of them does needs the others.
        """
        self.failure = ""
        refused: BadRequest | None = None
        self.attempting = True
        try:
            yield
        except Unchanged:
            raise
        except BadRequest as error:  # perhaps of this rank only
            refused = error
        except Exception as error:
            if self.status()["alive"]:
                raise
            self.failure = _line(error)
        finally:
            self.attempting = False
        if rebuilds.on_any_rank(bool(self.failure)):
            self.failure = self.failure or "the engine of another rank failed"
        if refused is not None:
            raise refused

    def _rebuild(self, rebuilds: Rebuilds) -> bool:
        """Build an engine in place of one that died; False where that was done too often."""
        assert self.build is not None
        if not self.left:
            self.lost = self.failure
            return False
        self.left -= 1
        rebuilds.announce(
            f"engine: it died{self.where} ({self.failure}); building another, {self.left} more after that"
        )
        failed = ""
        if not self.status()["alive"]:
            with suppress(Exception):  # what is left of an engine that failed
                self.close()
            try:
                self._take(self.build())
            except Exception as error:  # its servers may all be gone
                failed = _line(error)
        if rebuilds.on_any_rank(bool(failed)):
            self.lost = failed or "another rank could not build one"
            return False
        return True

    def check_lost(self) -> None:
        """Raise EngineDead where no engine stays alive."""
        if self.lost:
            raise EngineDead(
                f"engine {self.last['engine']}: expected one that stays alive, got one that died again"
                f"{self.where} ({self.lost}); --rebuilds says how often another is built"
            )

    def generate(
        self,
        prompts: Sequence[Any],
        keys: Sequence[Any],
        *,
        n: int = 1,
        sampling: Sampling,
        max_new: Sequence[int] | None = None,
        start: Sequence[int] | None = None,
        temperature: Sequence[float] | None = None,
        on_row: OnRow | None = None,
    ) -> Rollout:
        request = Request(prompts, keys, n, sampling, max_new, start, temperature, on_row)
        rollout = empty()
        self.check_lost()
        for attempt in self.attempts():
            with attempt, self.in_time("generate"), self.mark_dead("generate") as core:
                rollout = core.sample(request)
        self.check_lost()
        return drawn_with(rollout, sampling, temperature)

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        with self.in_time("score"):
            return self.running().score(rollout, sampling=sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        limit = nullcontext() if self.loads_together else self.in_time("load")
        with limit, self.mark_dead("load") as core:
            return core.load(weights, version=version)

    def sleep(self) -> None:
        with suppress(EngineDead) if self.rebuilds else nullcontext():
            self.running().sleep()

    def wake(self) -> None:
        with suppress(EngineDead) if self.rebuilds else nullcontext():
            self.running().wake()

    def status(self) -> EngineStatus:
        if self.core is not None:
            self.last = self.core.status()
        if self.ended:
            self.last["alive"] = False
        return self.last

    def close(self) -> None:
        if self.core is None:
            return
        self.status()
        core = self.core
        self.core = None
        self.ended = self.ended or "was closed"
        self.last["alive"] = False
        core.close()


def _line(error: Exception) -> str:
    """Return an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()) or "unknown"


@contextmanager
def saving(save: Callable[[], str]) -> Iterator[None]:
    """Call `save` if an engine hangs in native code within the block, before that ends the process.

    Another thread calls it while the engine hangs. It returns what the last line says of it.
    """
    _savers.append(save)
    try:
        yield
    finally:
        _savers.pop()


def _save() -> str:
    """Save what the innermost block of `saving` saves, if there is one."""
    return _savers[-1]() if _savers else ""


def deferred(build: Callable[[], Engine]) -> Engine:
    """Return an engine that is built when it is woken or first used for anything but its status.

    Until then it is alive and asleep, and its status says nothing about the model. `sleep` and `close` build
    nothing.
    """
    built: list[Engine] = []

    def engine() -> Engine:
        if not built:
            built.append(build())
        return built[0]

    def status() -> EngineStatus:
        if built:
            return built[0].status()
        return {"engine": "deferred", "alive": True, "version": 0, "asleep": True, "supported": frozenset()}

    functions = Engine(
        generate=lambda *args, **options: engine().generate(*args, **options),
        score=lambda *args, **options: engine().score(*args, **options),
        load=lambda *args, **options: engine().load(*args, **options),
        sleep=lambda: built[0].sleep() if built else None,
        wake=lambda: engine().wake(),
        status=status,
        close=lambda: built[0].close() if built else None,
    )
    return described(functions)
