"""Try foreign code and files, which may loop, take all memory or abort, in a child with limits.

What reads a stranger's template, tokenizer, regular expression or script goes through `call`. The child is a
fork: nothing is imported anew, and it costs milliseconds in addition to the work itself. It ends with its
parent's patience, and an abort in a library of another language ends the child alone.
"""

import faulthandler
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["MEMORY", "SECONDS", "Raised", "call"]

T = TypeVar("T")

SECONDS = 10  # of processor time
MEMORY = 1 << 30  # bytes beyond those of this process
_WAIT = 12  # times the seconds, until a child that sleeps is ended too
_ANSWER = 1 << 26  # bytes


class Raised(RuntimeError):
    """An error of the function in the child; the text has its type."""


def call(what: str, function: Callable[..., T], *args: Any, seconds: int = 0, memory: int = 0) -> T:
    """Return function(*args), computed in a child; `what` begins the line of an error.

    ValueError where the child takes more than `seconds` or `memory` (0: the constants here), answers
    with more than 64 MiB, or is ended by a signal, as Rust's abort does; a ValueError of the function has
    its own text. `Raised` for any other exception of it, also one that is no `Exception`. The value must
    be picklable.
    """
    seconds, memory = seconds or SECONDS, memory or MEMORY
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: of threads, which the child never asks
        child = os.fork()
    if not child:
        _answer(writer, function, args, seconds, memory)
    os.close(writer)
    status = None
    try:
        found = _read(reader, seconds * _WAIT)
        if found is not None and len(found) <= _ANSWER:
            _, status = os.waitpid(child, 0)
    finally:
        os.close(reader)
        if status is None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    if found is not None and len(found) > _ANSWER:
        raise ValueError(f"{what}: expected an answer of at most {_ANSWER >> 20} MiB, got more")
    late = found is None or (os.WIFSIGNALED(status or 0) and os.WTERMSIG(status or 0) == signal.SIGXCPU)
    if late:
        raise ValueError(f"{what}: expected to be read within {seconds} s, got no end")
    if not found:
        name = signal.Signals(os.WTERMSIG(status or 0)).name if os.WIFSIGNALED(status or 0) else "an exit"
        raise ValueError(f"{what}: expected a file that can be read, got {name} in the library that reads it")
    kind, value = pickle.loads(found)
    if kind == "memory":
        raise ValueError(f"{what}: expected to be read within {memory >> 20} MiB of memory, got more")
    if kind == "value":
        return value
    raise (ValueError if kind == "refused" else Raised)(value)


def _read(reader: int, patience: float) -> bytes | None:
    """Return what the child writes until it ends, or until it is too much; None for one that is late."""
    end = time.monotonic() + patience
    parts: list[bytes] = []
    size = 0
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(reader, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > _ANSWER:
            return b"".join(parts)
    return None


# ---------- in the child


def _answer(writer: int, function: Callable[..., Any], args: Any, seconds: int, memory: int) -> None:
    """Compute in the child, write the answer, and leave without what a process does at its exit."""
    try:
        _limit(seconds, memory)
        try:
            answer = pickle.dumps(("value", function(*args)))
        except MemoryError:
            answer = pickle.dumps(("memory", ""))
        except ValueError as error:
            answer = pickle.dumps(("refused", str(error)))
        except BaseException as error:  # a panic of Rust is no Exception
            lines = str(error).strip().splitlines()
            answer = pickle.dumps(("raised", f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]))
        while answer:
            answer = answer[os.write(writer, answer) :]
    finally:
        os._exit(0)


def _limit(seconds: int, memory: int) -> None:
    """Set the limits of the child, and let it print nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGXCPU):
        with suppress(ValueError):
            signal.signal(number, signal.SIG_DFL)
    faulthandler.disable()
    signal.alarm(seconds * _WAIT)  # its parent may be gone
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with suppress(OSError, ValueError):  # systems without /proc, which do not honour the limit either
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = size + memory
        resource.setrlimit(resource.RLIMIT_AS, (wanted if most < 0 else min(wanted, most), most))
