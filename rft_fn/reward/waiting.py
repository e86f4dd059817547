"""An event loop for reward functions that are async."""

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["Loop"]


class Loop:
    """Runs coroutines, all in one event loop: a client belongs to the loop that it was made in."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of the coroutine. When it fails, whatever else it has started is cancelled."""
        if self._runner is None:
            # with a factory it does not become the loop of this thread, which plain rewards take and close
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            weakref.finalize(self, _outside, self._runner.close)
        try:
            return _outside(self._runner.run, coroutine)
        except BaseException:
            _outside(self._runner.close)
            self._runner = None
            raise


def _outside(call: Callable[..., Any], *args: Any) -> Any:
    """call(*args), in a thread of its own where a loop runs in this one, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call(*args)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()
