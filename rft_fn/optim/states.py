"""What stands inside an optimizer state, however its transforms are combined."""

from collections.abc import Iterator
from typing import Any

from rft_fn.optim.combined import PartitionState
from rft_fn.optim.copies import EmaState, MasterState

__all__ = ["count", "ema_params", "parts"]


def parts(opt: Any) -> tuple:
    """The states inside an optimizer state.

    They are those of a chain, that below master weights, or none.
    """
    if isinstance(opt, tuple):
        return opt
    if isinstance(opt, PartitionState):
        return tuple(opt.inner.values())
    if isinstance(opt, MasterState):
        return (opt.inner,)
    return ()


def _states(opt: Any) -> Iterator[Any]:
    """An optimizer state and all states inside it, from the outermost."""
    yield opt
    for part in parts(opt):
        yield from _states(part)


def ema_params(opt: Any) -> Any:
    """The average of `ema` in an optimizer state.

    ValueError if there is none.
    """
    for state in _states(opt):
        if isinstance(state, EmaState):
            return state.average
    raise ValueError("opt: expected a state with optim.ema in its chain, found none")


def count(opt: Any) -> int:
    """The updates that `adamw` has made, from an optimizer state.

    Its next learning rate is schedule(count). Unlike `TrainState.step` it leaves out updates that were
    skipped. ValueError if there is no adamw.
    """
    for state in _states(opt):
        # tuples have a method of that name; the optimizer of a backend has the number
        if hasattr(state, "count") and not isinstance(state, tuple):
            return int(state.count)
    raise ValueError("opt: expected a state with optim.adamw in its chain, found none")
