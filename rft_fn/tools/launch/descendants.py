"""What programs leave behind: processes that outlive the one that started them, in whichever session."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

__all__ = ["adopt", "kill", "reap"]

_GOODBYE = 5.0  # s for what was killed to be gone
_LOOK = 0.05  # s between two looks
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def adopt() -> None:
    """Make this process the parent of what outlives the one that started it, where the system has that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def reap(own: Collection[int]) -> None:
    """Forget adopted processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in own:  # whose exit code is asked for elsewhere
                return
            os.waitpid(found.si_pid, 0)


def kill() -> None:
    """Kill everything that this process and its children have started, in whichever session."""
    end = time.monotonic() + _GOODBYE
    while (left := _descendants()) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap(())
        time.sleep(_LOOK)


def _descendants() -> set[int]:
    """Return the processes below this one, without those that have ended; none where there is no /proc."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = file.read_text(errors="replace").rpartition(")")[2].split()
            if state != "Z":
                parents[int(file.parent.name)] = int(parent)
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found
