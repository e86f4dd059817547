"""Time limits for the calls of an engine in this process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from rft_fn.engine.time_limit import time_limit
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered

__all__ = ["limited", "saving"]

_ADVICE = "the time of a call, got none; raise engine_timeout, or build another engine"
_savers: list[Callable[[], str]] = []  # of the blocks that are entered


@contextmanager
def saving(save: Callable[[], str]) -> Iterator[None]:
    """Within the block `save` is called if an engine hangs in native code, before that ends the process.

    Another thread calls it while the engine hangs. It returns what the last line says of it.
    """
    _savers.append(save)
    try:
        yield
    finally:
        _savers.pop()


def _save() -> str:
    """What the innermost `saving` saves."""
    if not _savers:
        return ""
    return _savers[-1]()


def limited(engine: Engine, seconds: float, *, several: bool = False) -> Engine:
    """An engine that is dead when a call has taken `seconds`.

    `generate`, `score` and `load` raise TimeoutError then. This interrupts Python. A call that stays in
    native code for some seconds more ends the process, with the stack of all threads and one line, and exit
    code 2; `saving` says what is saved before that. With `several` a load waits for other processes, so it
    has the limit of their group and not this one.
    """
    name = engine.status()["engine"]

    def within(call: str) -> Any:
        return time_limit(seconds, partial(str, f"engine {name}, {call}"), advice=_ADVICE, before_end=_save)

    def generate(
        prompts: Sequence[Any], keys: Sequence[Any], *, n: int = 1, sampling: Sampling, **rows: Any
    ) -> Rollout:
        with within("generate"):
            return engine.generate(prompts, keys, n=n, sampling=sampling, **rows)

    def score(rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        with within("score"):
            return engine.score(rollout, sampling=sampling)

    def load(weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        with within("load"):
            return engine.load(weights, version=version)

    found = engine._replace(generate=generate, score=score)
    if not several:
        found = found._replace(load=load)
    return found
