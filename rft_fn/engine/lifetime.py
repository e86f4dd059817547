"""Supervises an engine: its calls answer in time, it dies once one failed, and it may be built late."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from rft_fn.engine.requests import BadRequest, Request, drawn_with
from rft_fn.engine.time_limit import time_limit
from rft_fn.text import error_text
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus, described, record

__all__ = ["EngineCore", "EngineDead", "dead_after_failure", "deferred", "saving", "supervised"]


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


def supervised(
    engine: EngineCore | Engine, *, timeout: float | None = None, loads_together: bool = False
) -> Engine:
    """Return an engine that is dead after an exception out of `generate` or `load`, and after `close`.

    A BadRequest leaves it alive. What a dead engine holds is freed by `close`, which may be called twice.

    With a `timeout` [s], `generate`, `score` and `load` raise TimeoutError when they have taken so long. This
    interrupts Python. A call that stays in native code for some seconds more ends the process, with the stack
    of all threads and one line, and exit code 2; `saving` says what is saved before that. Where an engine
    `loads_together` with those of other processes, a load has the limit of their group and not this one.
    """
    core = _OfFunctions(engine) if isinstance(engine, Engine) else engine
    return record(Engine, _Supervised(core, timeout, loads_together))


def dead_after_failure(engine: Engine) -> Engine:
    """Return `engine`, dead after an exception out of its `generate` or `load`, and after `close`."""
    return supervised(engine)


class _OfFunctions:
    """An engine that is a record of functions already."""

    def __init__(self, engine: Engine):
        _, self.score, self.load, self.sleep, self.wake, self.status, self.close = engine
        self.engine = engine

    def sample(self, request: Request) -> Rollout:
        return request.ask(self.engine)


class _Supervised:
    """The functions of an engine: in time, and with `generate` and `load` fatal where they raise."""

    def __init__(self, core: EngineCore, timeout: float | None, loads_together: bool):
        self.core: EngineCore | None = core
        self.timeout = timeout
        self.loads_together = loads_together
        self.last: EngineStatus = core.status()
        self.ended = ""  # why it is not alive; empty while it is

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
            raise

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
    ) -> Rollout:
        request = Request(prompts, keys, n, sampling, max_new, start, temperature)
        with self.in_time("generate"), self.mark_dead("generate") as core:
            rollout = core.sample(request)
        return drawn_with(rollout, sampling, temperature)

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        with self.in_time("score"):
            return self.running().score(rollout, sampling=sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        limit = nullcontext() if self.loads_together else self.in_time("load")
        with limit, self.mark_dead("load") as core:
            return core.load(weights, version=version)

    def sleep(self) -> None:
        self.running().sleep()

    def wake(self) -> None:
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
    """Return the engine that `build` makes when it is woken or asked for anything but its status.

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
