"""The command line of a script: its options, and its errors in one line."""

import dataclasses
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from rft_fn import dist, parsing
from rft_fn.engine import EngineDead
from rft_fn.run import config_file, signals, sizes
from rft_fn.text import error_text, printable

__all__ = ["cli", "error_line", "explain", "fail", "guard", "without"]


def error_line(error: BaseException) -> str:
    """Return the message of an error and its notes, in one line that a terminal can print."""
    line = error_text(error)
    notes = [" ".join(note.split()) for note in getattr(error, "__notes__", ())]
    if notes:
        line += f" ({'; '.join(notes)})"
    return printable(line)


def cli(main: Callable[[Any], None], config: type) -> None:
    """Run a script with the options of the dataclass `config`, and show user mistakes as one line.

    An option of a part, as `--strategy.chunk-size`, may be named without the part (`--chunk_size`) where
    nothing else has the name. --config FILE gives options too. Mistakes in options, files or rewards exit
    with 2, lost processes with 3, SIGTERM and SIGINT with 143 and 130. With RFT_FN_TRACEBACK=1 errors keep
    their traceback; any other error is a bug and always keeps it. Warnings to the user are one line each.
    """
    with signals.unbroken(), signals.listen(), _plain_warnings():
        first = sizes.by_device(config)
        options = guard(
            lambda args: config_file.parse(config, parsing.qualify(args, config), first=first), sys.argv[1:]
        )
        guard(main, options)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings to the user as one line within the block, without the source line they come from."""
    usual = warnings.formatwarning

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is not UserWarning:  # warnings to programmers say where they come from
            return usual(message, category, filename, lineno, line)
        return f"warning: {printable(' '.join(str(message).split()))}\n"

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def without(part: Any, *names: str, prefix: str = "strategy", instead: str = "leave it out") -> None:
    """Raise ValueError if options that a script does not read differ from their defaults.

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
    """Call main(config), with errors as `cli` shows them."""
    try:
        return main(config)
    except signals.Stopped as stop:
        _stop(stop)
    except Exception as error:
        try:
            signals.check_early()
        except signals.Stopped as stop:
            _stop(stop)
        explain(error)


def explain(error: Exception) -> None:
    """End the process with one line for a user's mistake or lost processes; raise other errors again."""
    lost = isinstance(error, dist.LostProcess) or dist.is_lost(error)
    ends = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, EngineDead)
    mistake = isinstance(error, ends)
    if not lost and (not mistake or os.environ.get("RFT_FN_TRACEBACK")):
        sys.excepthook = _print_traceback  # the error may quote a response
        if line := _saving(error):
            error.add_note(f"out of memory: {line}")
        raise error
    if mistake:
        fail(error)
    if os.environ.get("RFT_FN_TRACEBACK"):
        traceback.print_exception(error)
    dist.abort(dist.lost_line(error))


def _saving(error: Exception) -> str:
    """Return the one option that would have saved a run from this error; empty for another error."""
    # on a CPU it is a RuntimeError of torch's allocator
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        return ""
    from rft_fn.strategy import forecast  # which loads the models' room

    found = forecast.last()
    try:
        return "" if found is None else forecast.saving(found)
    except Exception as other:  # the error of the run is the one to show
        return f"no forecast: {error_text(other)}"


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error with its traceback, as Python does."""
    print(printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _stop(stop: signals.Stopped) -> None:
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
