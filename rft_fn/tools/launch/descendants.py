"""What programs leave behind: processes that outlive the one that started them, in whichever session."""

import contextlib
import os
import signal
import time
from collections.abc import Collection

from rft_fn.sandbox.launcher import adopt, descendants

__all__ = ["adopt", "kill", "reap"]

_GOODBYE = 5.0  # s for what was killed to be gone
_LOOK = 0.05  # s between two looks


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
    while (left := descendants()) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap(())
        time.sleep(_LOOK)
