"""An event loop in a thread of its own, for all async functions of a kind.

anyio's blocking portal is no substitute (4.16, tried). Closing it waited without end for a coroutine that
blocks or ignores its cancel; one that nobody had closed kept the process from ending, and here nobody knows
when the last reward is asked; a task that called `sys.exit` ended it for good; and a forked process waited in
it for ever.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rft_fn import border

__all__ = ["EventLoop", "in_thread"]


T = TypeVar("T")


_PATIENCE = 2.0  # seconds for coroutines to end once they are cancelled
_ANSWERS = 0.5  # seconds in which a loop that nothing blocks does anything


class EventLoop:
    """Runs coroutines, all of them in one event loop."""

    def __init__(self) -> None:
        self._thread: _Thread | None = None
        self._lock = threading.Lock()  # any thread may start a coroutine

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine, and return the future of its result."""
        with self._lock:
            # a task that exits ends its thread, and a process that was forked has none
            alive = self._thread is not None and self._thread.is_alive()
            future = self._thread.submit(coroutine) if self._thread is not None and alive else None
            if future is None:
                self._thread = _Thread()
                self._thread.start()
                weakref.finalize(self, self._thread.end)
                future = asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop)
            return future

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine, and return its result; on failure or interruption cancel all others."""
        try:
            return self.start(coroutine).result()
        except BaseException:
            self.close()
            raise

    def leave_if_blocked(self) -> threading.Thread | None:
        """Leave a loop that a coroutine blocks, and return its thread; the next start makes another."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return None
        answered = threading.Event()
        thread.loop.call_soon_threadsafe(answered.set)
        if answered.wait(_ANSWERS) or self._thread is not thread:
            return None
        self._thread = None
        thread.loop.call_soon_threadsafe(thread.loop.stop)
        return thread

    def close(self) -> None:
        """Cancel everything that has not ended, and end the loop; the next start makes another."""
        if self._thread is not None:
            self._thread.end()
        self._thread = None


async def in_thread(call: Callable[[], T], interrupt: Callable[[], None]) -> T:
    """Run a plain function that waits for a network in a new thread, and return its result.

    Where this is cancelled, it calls `interrupt`, which must make the function return or raise. Nobody waits
    for the thread, not even the end of the process.
    """
    future: Future[T] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled under this thread
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(border.contained(error))

    threading.Thread(target=work, daemon=True, name="rft_fn waiting reward").start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        interrupt()
        raise


class _Thread(threading.Thread):
    """A thread that runs an event loop until its end."""

    def __init__(self) -> None:
        super().__init__(name="rft_fn event loop", daemon=True)
        self.loop = asyncio.new_event_loop()
        self._taking = True  # what comes later would wait for ever in a loop that has stopped
        self._lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Start the coroutine; None where the loop has stopped."""
        with self._lock:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop) if self._taking else None

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            try:
                with suppress(SystemExit):  # of a task, which ends the others and not the process
                    self.loop.run_forever()
            finally:
                with self._lock:
                    self._taking = False
            self.loop.run_until_complete(asyncio.sleep(0))  # one that never ran could not end what it awaits
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def end(self) -> None:
        """End the loop; a blocked one is left running, for it cannot be interrupted."""
        if self.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.join(_PATIENCE)
