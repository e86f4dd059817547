"""Errors about processes that are gone: how torch words them, and how a run reports them."""

import os
import re
import sys
from collections.abc import Sequence

import torch.distributed as torch_dist

from rft_fn.dist.collectives import world
from rft_fn.text import printable

__all__ = ["LOST", "LostProcess", "abort", "describe", "is_lost", "lost_line"]


LOST = 3  # exit code of a process that lost others

_GLOO = re.compile(r"\[[^]\s]*gloo/[^]\s]+\.(cc|h):\d+\] ")  # the source location in every error of gloo
_REMEDY = (
    "run the same command again to resume from the last checkpoint "
    "(torchrun --max-restarts does so automatically)"
)


class LostProcess(RuntimeError):
    """Another process of the run is gone; the message names it, and the phase of every process."""


def is_lost(error: BaseException) -> bool:
    """Return whether torch.distributed raised `error` because of another process.

    Recognized by its type, or by the wording of gloo. Time limits and connections of anything else do not
    count.
    """
    if world() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch_dist.DistError) or _GLOO.search(str(error)) is not None


def describe(who: str, doing: Sequence[str], error: BaseException | None = None) -> str:
    """Return one line: who is gone, what the other ranks were doing, the remedy, the error."""
    parts = [f"lost {who}", *doing, _REMEDY]
    if error:
        parts.append(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    return "; ".join(parts)


def lost_line(error: BaseException) -> str:
    """Return the line about lost processes, for a LostProcess or an error that `is_lost`."""
    return str(error) if isinstance(error, LostProcess) else describe("other processes", [], error)


def abort(text: str) -> None:
    """Print the line and end this process at once: tidying up would wait for the others."""
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(LOST)
