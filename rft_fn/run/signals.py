"""SIGTERM and SIGINT let a run finish its step and save; closing the reader of stdout does not end it.

A process that was asked to stop exits with 128 + the number of the signal: 143 for SIGTERM, 130 for SIGINT.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rft_fn import dist

__all__ = ["Stopped", "Unbroken", "asked", "check_early", "enter_steps", "listen", "stopping"]

_AGAIN = 1.0  # s: torchrun repeats a Ctrl-C that the terminal has already sent to its workers
_EARLY = " before the first step"
_QUIET = {"asked": 0, "when": 0.0, "steps": False}
_state: dict[str, Any] = dict(_QUIET)


class Stopped(SystemExit):
    """A process that ends because it was asked to; `code` is 128 + the number of the signal."""

    def __init__(self, number: int, where: str = ""):
        super().__init__(128 + number)
        self.line = f"stopped by {signal.Signals(number).name}{where}"


def _handle(number: int, frame: Any) -> None:
    now, asked = time.monotonic(), _state["asked"]
    if not _state["steps"]:
        _state["asked"] = number
        raise Stopped(number, _EARLY)
    if asked and now - _state["when"] > _AGAIN:
        os.write(2, f"stopped at once by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)
    if not asked:
        _state.update(asked=number, when=now)
        if dist.is_main():
            name = signal.Signals(number).name
            os.write(2, f"{name}: finishing the step and saving it; again to stop at once\n".encode())


@contextmanager
def listen() -> Iterator[None]:
    """Take SIGTERM and SIGINT as requests to stop within the block.

    Nothing happens outside of the main thread.
    """
    _state.update(_QUIET)
    before = {}
    with suppress(ValueError):
        before = {n: signal.signal(n, _handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _state.update(_QUIET)  # what was asked of this main is not asked of the next one


def enter_steps() -> None:
    """Let a request wait for the end of the step from here on; before, it ends the process.

    Raises `Stopped` for an earlier request that a library caught.
    """
    check_early()
    _state["steps"] = True


def check_early() -> None:
    """Raise `Stopped` if a library caught a request to stop that came before the first step."""
    if _state["asked"] and not _state["steps"]:
        raise Stopped(_state["asked"], _EARLY)


def asked() -> int:
    """Return the signal that asked this process to stop, or 0."""
    return _state["asked"]


def stopping() -> int:
    """Return the signal that asked any process to stop, or 0: the same on every rank.

    All ranks call it. One that arrives while the ranks ask each other is answered by the next call.
    """
    found = max(dist.all_gather_object(_state["asked"]))
    if found:
        _state["asked"] = found
    return found


class Unbroken:
    """A text stream that its reader may leave, as `| head` does: what is written after that goes nowhere."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write to the stream while somebody reads it."""
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        """Flush the stream while somebody reads it."""
        self._try(self._stream.flush)

    def _try(self, act: Any, *args: Any) -> Any:
        try:
            return act(*args)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if args:
                return len(args[0])
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unbroken() -> Iterator[None]:
    """Let stdout and stderr outlive their readers within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Unbroken(before[0]), Unbroken(before[1])
    try:
        yield
    finally:
        with suppress(ValueError):  # a closed stream
            sys.stdout.flush()
        sys.stdout, sys.stderr = before
