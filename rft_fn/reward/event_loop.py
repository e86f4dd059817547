"""One event loop for all async functions of a kind, such as rewards or tools, in a thread of its own.

A client belongs to the loop that it was made in. What waits for a network there does so while the calling
thread computes.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["EventLoop", "in_thread"]

T = TypeVar("T")

_PATIENCE = 2.0  # seconds for coroutines to end once they are cancelled
_ANSWERS = 0.5  # seconds in which a loop that nothing blocks does anything


class EventLoop:
    """Runs coroutines, all of them in one event loop."""

    def __init__(self) -> None:
        self._thread: _Thread | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run the coroutine; the result is that of the future."""
        found = self._thread.submit(coroutine) if self._thread is not None else None
        if found is None:  # a task that exits ends its thread
            self._thread = _Thread()
            self._thread.start()
            weakref.finalize(self, self._thread.end)
            found = asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop)
        return found

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine.

        If it fails, or the calling thread is interrupted, everything else that it has started is cancelled.
        """
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
    """The result of a plain function that waits for a network, from a thread of its own.

    Where this is cancelled, `interrupt` is called, which has to make the function return or raise. Nobody
    waits for the thread, not even the end of the process.
    """
    found: Future[T] = Future()

    def work() -> None:
        found.set_running_or_notify_cancel()  # from here on it cannot be cancelled under this thread
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True, name="rft_fn waiting reward").start()
    try:
        return await asyncio.wrap_future(found)
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
        """Begin to run the coroutine; None where the loop has stopped."""
        with self._lock:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop) if self._taking else None

    def _until_stopped(self) -> None:
        try:
            with suppress(SystemExit):  # of a task, which ends what runs beside it and not the process
                self.loop.run_forever()
        finally:
            with self._lock:
                self._taking = False

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self._until_stopped()
            self.loop.run_until_complete(asyncio.sleep(0))  # one that never ran could not end what it awaits
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def end(self) -> None:
        """End the loop; one that is blocked is left behind, for it cannot be interrupted."""
        if self.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.join(_PATIENCE)
