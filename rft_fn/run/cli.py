"""The command line of a script: its options, and its errors in one line."""

import dataclasses
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from rft_fn import dist
from rft_fn.check import printable
from rft_fn.engine import EngineDead
from rft_fn.run import parsing

__all__ = [
    "Stopped", "Unbroken", "asked", "check_early", "cli", "enter_steps", "error_line", "fail", "guard",
    "listen", "stopping", "without",
]  # fmt: skip


# ---------- sIGTERM and SIGINT let a run finish its step and save


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
    """Within it SIGTERM and SIGINT are requests to stop; nothing happens outside of the main thread."""
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
    """From here on a request waits for the end of the step; before, it ends the process.

    Raises `Stopped` for an earlier request that a library caught.
    """
    check_early()
    _state["steps"] = True


def check_early() -> None:
    """Raise `Stopped` if the process was asked to stop before the first step, and a library caught that."""
    if _state["asked"] and not _state["steps"]:
        raise Stopped(_state["asked"], _EARLY)


def asked() -> int:
    """The signal that asked this process to stop, or 0."""
    return _state["asked"]


def stopping() -> int:
    """The signal that asked any process to stop, or 0: the same on every rank. All ranks call it.

    One that arrives while the ranks ask each other is answered by the next call.
    """
    found = max(dist.all_gather_object(_state["asked"]))
    if found:
        _state["asked"] = found
    return found


class Unbroken:
    """A text stream whose reader may leave, as `| head` does: what is written after that goes nowhere."""

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
    """Within it stdout and stderr outlive their readers."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Unbroken(before[0]), Unbroken(before[1])
    try:
        yield
    finally:
        with suppress(ValueError):  # a closed stream
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


# ---------- the command line of a script: its options, and its errors in one line


def error_line(error: BaseException) -> str:
    """Return the message of an error and its notes, in one line that a terminal can print."""
    line = " ".join(str(error).split()) or type(error).__name__
    notes = [" ".join(note.split()) for note in getattr(error, "__notes__", ())]
    if notes:
        line += f" ({'; '.join(notes)})"
    return printable(line)


def cli(main: Callable[[Any], None], config: type) -> None:
    """Run a script with the options of the dataclass `config`, and show the user's mistakes as one line.

    An option of a part, as `--strategy.chunk-size`, may be named without the part (`--chunk_size`) where
    nothing else has the name. Mistakes in options, files or rewards exit with 2, lost processes with 3,
    SIGTERM and SIGINT with 143 and 130. With RFT_FN_TRACEBACK=1 errors keep their traceback; any other error
    is a bug and always keeps it. Warnings to the user are one line each.
    """
    with unbroken(), listen(), _plain_warnings():
        options = guard(partial(parsing.parse, config), parsing.qualify(sys.argv[1:], config))
        guard(main, options)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings to the user are one line within the block, without the line of source that gave them."""
    usual = warnings.formatwarning

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is not UserWarning:  # those to programmers say where they come from
            return usual(message, category, filename, lineno, line)
        return f"warning: {printable(' '.join(str(message).split()))}\n"

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def without(part: Any, *names: str, prefix: str = "strategy", instead: str = "leave it out") -> None:
    """ValueError if options that a script does not read differ from their defaults.

    `part` is a dataclass of options, `prefix` its name in the script's config (empty for the config itself),
    `instead` the remedy.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(part)}
    for name in names:
        x = getattr(part, name)
        if x == defaults[name]:
            continue
        option = f"{prefix}.{name}".lstrip(".")
        raise ValueError(
            f"{option}: expected {defaults[name]!r}, as this script does not read it, got {x!r}; {instead}"
        )


def guard(main: Callable[[Any], Any], config: Any) -> Any:
    """main(config), with errors as `cli` shows them."""
    try:
        return main(config)
    except Stopped as stop:
        _stop(stop)
    except Exception as error:
        try:
            check_early()
        except Stopped as stop:
            _stop(stop)
        _explain(error)


def _explain(error: Exception) -> None:
    """End with one line for a mistake of the user's and for lost processes; anything else is raised again."""
    lost = isinstance(error, dist.LostProcess) or dist.is_lost(error)
    ends = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, EngineDead)
    mistake = isinstance(error, ends)
    if not lost and (not mistake or os.environ.get("RFT_FN_TRACEBACK")):
        sys.excepthook = _print_traceback  # the error may quote a response
        raise error
    if mistake:
        fail(error)
    if os.environ.get("RFT_FN_TRACEBACK"):
        traceback.print_exception(error)
    dist.abort(dist.lost_line(error))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error with its traceback, as Python does."""
    print(printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _stop(stop: Stopped) -> None:
    if dist.is_main():
        print(stop.line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if dist.world() > 1:
        os._exit(int(stop.code or 0))  # tidying up would wait for the others
    sys.exit(stop.code)


def fail(error: Exception) -> None:
    """Print an error in one line and exit with 2.

    Ranks other than 0 wait first: if all have the same error, rank 0 has printed it by then, and torchrun
    has stopped them.
    """
    rank = dist.rank()
    where = ""
    if rank:
        time.sleep(10)
        where = f" on rank {rank}"
    print(f"error{where}: {error_line(error)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if dist.world() > 1:
        os._exit(2)  # tidying up would wait for the others
    sys.exit(2)
