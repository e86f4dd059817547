"""What is inside an optimizer state, however its transforms are combined."""

from collections.abc import Iterator
from typing import Any

from rft_fn.optim.averages_and_masters import EmaState, MasterState
from rft_fn.optim.transforms import PartitionState

__all__ = ["count", "ema_params", "parts"]


def parts(opt: Any) -> tuple:
    """Return the states inside an optimizer state: of a chain, below master weights, or none."""
    if isinstance(opt, tuple):
        return opt
    if isinstance(opt, PartitionState):
        return tuple(opt.inner.values())
    if isinstance(opt, MasterState):
        return (opt.inner,)
    return ()


def _states(opt: Any) -> Iterator[Any]:
    """Yield an optimizer state and all states inside it, from the outermost."""
    yield opt
    for part in parts(opt):
        yield from _states(part)


def ema_params(opt: Any) -> Any:
    """Return the average of `ema` in an optimizer state; ValueError if there is none."""
    for state in _states(opt):
        if isinstance(state, EmaState):
            return state.average
    raise ValueError("opt: expected a state with optim.ema in its chain, found none")


def count(opt: Any) -> int:
    """Return the number of updates that `adamw`, `sgd` or `lion` has made, from an optimizer state.

    Its next learning rate is schedule(count). Unlike `TrainState.step` it leaves out updates that were
    skipped. ValueError if there is none of them.
    """
    for state in _states(opt):
        # tuples have a method of that name; the optimizer of a backend has the number
        if hasattr(state, "count") and not isinstance(state, tuple):
            return int(state.count)
    raise ValueError("opt: expected a state with optim.adamw in its chain, found none")
