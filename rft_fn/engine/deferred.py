"""An engine that is built when it is first used, after the options of a run are checked."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus

__all__ = ["deferred"]


def deferred(build: Callable[[], Engine]) -> Engine:
    """The engine that `build` makes, when it is woken or asked for anything but its status.

    Until then it is alive and asleep, and its status says nothing about the model. `sleep` and `close` build
    nothing.
    """
    made = _Deferred(build)
    return Engine(
        generate=made.generate,
        score=made.score,
        load=made.load,
        sleep=made.sleep,
        wake=made.wake,
        status=made.status,
        close=made.close,
    )


class _Deferred:
    """An engine and the function that builds it."""

    def __init__(self, build: Callable[[], Engine]):
        self.build = build
        self.inner: Engine | None = None

    def engine(self) -> Engine:
        """The engine, built at the first call."""
        if self.inner is None:
            self.inner = self.build()
        return self.inner

    def generate(
        self, prompts: Sequence[Any], keys: Sequence[Any], *, n: int = 1, sampling: Sampling, **more: Any
    ) -> Rollout:
        return self.engine().generate(prompts, keys, n=n, sampling=sampling, **more)

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        return self.engine().score(rollout, sampling=sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        return self.engine().load(weights, version=version)

    def wake(self) -> None:
        self.engine().wake()

    def sleep(self) -> None:
        if self.inner is not None:
            self.inner.sleep()

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

    def status(self) -> EngineStatus:
        if self.inner is not None:
            return self.inner.status()
        return {"engine": "deferred", "alive": True, "version": 0, "asleep": True, "supported": frozenset()}
