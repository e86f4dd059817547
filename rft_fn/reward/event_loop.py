"""One event loop for all async reward functions.

A client belongs to the loop that it was made in.
"""

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

__all__ = ["EventLoop"]

T = TypeVar("T")


class EventLoop:
    """Runs coroutines, all of them in one event loop."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine.

        If it fails, everything else that it has started is cancelled.
        """
        if self._runner is None:
            # with a factory it does not become the loop of this thread, which plain rewards take and close
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            weakref.finalize(self, _outside_loops, self._runner.close)
        try:
            return _outside_loops(partial(self._runner.run, coroutine))
        except BaseException:
            _outside_loops(self._runner.close)
            self._runner = None
            raise


def _outside_loops(call: Callable[[], T]) -> T:
    """call(), in another thread if this one runs an event loop.

    Notebooks do.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
