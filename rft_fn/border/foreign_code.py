"""What foreign code gives: the text of its values, and its exceptions."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rft_fn.text import error_text

__all__ = ["contained", "is_ours", "printed", "quoted"]


SHOWN = 40  # characters of what came instead


def quoted(x: Any, most: int = SHOWN) -> str:
    """Return at most so many characters of a value's repr, which is foreign code: its type where it fails."""
    return printed(x, repr)[:most]


def printed(x: Any, how: Callable[[Any], str] = str) -> str:
    """Return the text of a value, which is foreign code; its type where that fails."""
    try:
        return how(x)
    except BaseException as error:  # also of an integer with too many digits
        if is_ours(error):
            raise
        return f"a value of type {type(x).__name__}"


def is_ours(error: BaseException) -> bool:
    """Return whether an exception is ours or the interpreter's, not one of the foreign code.

    It is a person's Ctrl-C, which only the main thread gets, the end of a generator, or the end of a task
    that this package has cancelled.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if isinstance(error, asyncio.CancelledError):
        with suppress(RuntimeError):  # no event loop runs here
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
        return False
    return isinstance(error, GeneratorExit)


def contained(error: BaseException) -> Exception:
    """Return what foreign code raised, as an exception that ends no server, thread or rank.

    SystemExit, CancelledError, a KeyboardInterrupt of the code's own, a panic of Rust and the like derive
    from BaseException, and StopIteration passes through no future: each becomes RuntimeError with its name.
    """
    stopping = StopIteration, StopAsyncIteration, concurrent.futures.CancelledError
    if isinstance(error, Exception) and not isinstance(error, stopping):
        return error
    made = RuntimeError(f"{type(error).__name__}: {error_text(error)}")
    for note in getattr(error, "__notes__", ()):
        made.add_note(str(note))
    made.__cause__ = error
    return made
