"""Run a command within a time limit, and end every process that it leaves: `deadline.py SECONDS COMMAND ...`.

Servers and engines are started in sessions of their own, so that a signal to the command does not reach them,
and a test that is killed does not end them. Orphans become children of this process, which ends them all.
Its status is that of the command, or 124 at the limit, as of `timeout`. Without Linux only the limit holds.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["descendants", "run"]

ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl


def descendants(pid):
    """The processes below one, of whatever session they are."""
    below = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(entry.parent.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in below.get(parent, [])]
        found += new
    return found


def end_all():
    """Kill the processes below this one until there are none; the names of those that there were."""
    names = []
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                names += [line] if line else []
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    return list(dict.fromkeys(names))


def run(seconds, command):
    """The status of the command, which has ended with all of its processes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    # an ordinary signal to this process ends the command too
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(command)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"deadline: {' '.join(command)}: not done after {seconds:.0f} s", file=sys.stderr)
        status = 124
    finally:
        left = end_all()
        if left:
            print(f"deadline: ended {len(left)} that were left: {'; '.join(left):.500}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
