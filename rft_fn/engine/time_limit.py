"""Limits the time of a block of Python code, also where it waits for a lock, a server or C code."""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rft_fn.text import printable

__all__ = ["time_limit"]


OF_A_BATCH = "the limit for a batch, got none; make it faster, or raise the limit"
SAVING = 300.0  # seconds that saving may take before the process ends
GRACE = 10.0  # seconds for a block to give way once it has been interrupted
FAILED = 2  # exit code of an error of the user's
# nothing else uses it on Linux, unlike SIGALRM, which math-verify sets; 0 where a system has neither
SIGNAL: int = getattr(signal, "SIGRTMIN", getattr(signal, "SIGUSR2", 0))


class _Expired(BaseException):
    """Raised inside a block at its time limit. No `Exception`: rewards catch those and try the next one."""


@contextmanager
def time_limit(
    seconds: float,
    name: Callable[[], str],
    *,
    advice: str = OF_A_BATCH,
    before_end: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Interrupt the block after `seconds`.

    It then raises TimeoutError with name(), the limit and `advice`. A thread watches the clock and sends this
    one a signal, and its handler raises: that ends a sleep, a wait for a lock or a blocked read. A block that
    runs for `GRACE` seconds more ends the process, with the stack of all threads and the line. Where C code
    keeps the interpreter from running any thread at all, faulthandler's own thread ends the process after
    another `GRACE` seconds, with only the stack.

    `before_end` is called by the watching thread before it ends the process, to save what can be saved within
    `SAVING` seconds; what it returns ends the line. Outside of the main thread nothing can be interrupted.
    Without `before_end` the line is printed there, and the block is waited for; with it the process ends.
    """
    clock = _Clock(seconds, name, advice, before_end)
    clock.start()
    try:
        try:
            yield
        except BaseException as error:
            if clock.interrupted:  # whatever the block has made of the interruption
                raise TimeoutError(clock.line) from error
            raise
        finally:
            clock.over.set()
    finally:
        clock.stop()
    if clock.interrupted:  # the block has caught even this, and made up a result
        raise TimeoutError(clock.line)


class _Clock:
    """Watches the time of one block of the thread that makes it."""

    def __init__(
        self, seconds: float, name: Callable[[], str], advice: str, before_end: Callable[[], str] | None
    ):
        self.seconds = seconds
        self.name = name
        self.advice = advice
        self.before_end = before_end
        self.line = ""  # written at the limit: later the score may be at its next reward
        self.over = threading.Event()
        self.owner = threading.current_thread()
        self.can_interrupt = bool(SIGNAL) and self.owner is threading.main_thread()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="rft_fn time limit")
        self.handler: Any = None  # of the signal before; None: one that is not Python's

    @property
    def interrupted(self) -> bool:
        """Return whether the block has run into its limit, and was interrupted."""
        return bool(self.line) and self.can_interrupt

    def start(self) -> None:
        """Begin to count."""
        if self.can_interrupt:
            self.handler = signal.signal(SIGNAL, self._interrupt)
            faulthandler.dump_traceback_later(min(self.seconds, 1e6) + 2 * GRACE, exit=True, file=2)
        self.thread.start()

    def stop(self) -> None:
        """Stop to count, and put the signal's handler back."""
        # the handler stays until the thread is done: a late signal must not meet the default one, which kills
        self.over.set()
        self.thread.join()
        if self.can_interrupt:
            faulthandler.cancel_dump_traceback_later()
        if self.handler is not None:
            signal.signal(SIGNAL, self.handler)

    def _watch(self) -> None:
        if self.over.wait(min(self.seconds, threading.TIMEOUT_MAX)):
            return
        self.line = f"{self.name()}: expected a result within {self.seconds:g} s, {self.advice}"
        owner = self.owner.ident
        if self.can_interrupt and owner is not None:
            signal.pthread_kill(owner, SIGNAL)
        elif self.before_end is None:
            print(f"warning: {printable(self.line)}", file=sys.stderr, flush=True)
            return

        # the last resort is the end of the process: the other ranks wait for this one
        if not self.over.wait(GRACE):
            self._end()

    def _end(self) -> None:
        """End the process, after what can be saved was saved."""
        faulthandler.dump_traceback_later(SAVING, exit=True, file=2)  # saving may hang too
        faulthandler.dump_traceback(file=2)
        saved = ""
        if self.before_end is not None:
            try:
                saved = self.before_end()
            except BaseException:
                traceback.print_exc()
        line = printable(f"error: {self.line} (it cannot be interrupted){saved}")
        print(line, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(FAILED)

    def _interrupt(self, *_: Any) -> None:
        if not self.over.is_set():
            raise _Expired(self.line)
