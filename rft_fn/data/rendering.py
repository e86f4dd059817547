"""Renders a chat template, which is a stranger's program, within a limit of processor time."""

import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["TooSlow", "render"]

SECONDS = 30.0  # of processor time of one rendering, which takes a ten-thousandth of one
_NEVER = float("inf")
_state = {"end": _NEVER}  # of the main thread's rendering, by its own clock


class TooSlow(TimeoutError):
    """A rendering without an end. No ValueError: each of the rows behind it would take as long."""


def render(tokenizer: Any, turns: Sequence[Any], **options: Any) -> Any:
    """Return what `apply_chat_template` makes of turns. TooSlow after `SECONDS` of this thread.

    A signal interrupts the template between two steps of Python: it comes late to a single operation on
    something huge, and never outside of the main thread. Memory has no limit here.
    """
    if threading.current_thread() is not threading.main_thread():
        return tokenizer.apply_chat_template(turns, **options)
    if signal.getsignal(signal.SIGVTALRM) is not _look:  # it stays, for rows come by thousands
        signal.signal(signal.SIGVTALRM, _look)
    _state["end"] = time.thread_time() + SECONDS
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        return tokenizer.apply_chat_template(turns, **options)
    finally:
        _state["end"] = _NEVER
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _look(*_: Any) -> None:
    """End a rendering that is late; wait on where other threads have used the time of the process."""
    left = _state["end"] - time.thread_time()
    if left <= 0:
        raise TooSlow(f"chat template: expected a rendering within {SECONDS:g} s, got no end")
    if left < _NEVER:
        signal.setitimer(signal.ITIMER_VIRTUAL, left)
