"""Run a program with limits, and apart from this machine where it allows that."""

import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn.sandbox.system_calls import filter_of

__all__ = ["Limits", "Outcome", "kill_group", "run"]

_GRACE = 5.0  # s beyond the limit, after which the launcher is not waited for
_LAUNCHER = Path(__file__).with_name("launcher.py")
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives",
    "/etc/localtime",
)  # fmt: skip


class Limits(NamedTuple):
    """What a program may take."""

    seconds: float = 10.0  # from its start to its end, and of processor time of each process
    memory: int = 1 << 30  # bytes of addresses of each process, and of all in memory in a namespace
    file_size: int = 16 << 20  # bytes of a file
    disk: int = 64 << 20  # bytes of all files, in a namespace
    processes: int = 16  # and threads
    output: int = 1 << 20  # bytes of standard output, and of standard error


DEFAULT = Limits()
_refused = ""  # what this machine has refused, so that it is not asked for namespaces again


class Outcome(NamedTuple):
    """How a program ended."""

    ended: str  # "exit", "signal", or by a limit: "late", "memory", "output"
    code: int  # of the exit, or the number of the signal
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether it ended by itself, with 0."""
        return self.ended == "exit" and self.code == 0


def run(
    command: Sequence[str],
    stdin: str | bytes = b"",
    limits: Limits = DEFAULT,
    *,
    files: Mapping[str, str | bytes] | None = None,
) -> Outcome:
    """Run a command in a folder of its own, and return how it ended; safe in any thread.

    The folder holds `files`, is its HOME, and is deleted afterwards with all processes. Of the environment it
    has PATH and LANG. On a Linux that allows namespaces it sees no network, no other process, and of files
    only the system's and Python's, none of which it can change; the kernel refuses it the calls of
    `system_calls`. Elsewhere it has the limits alone, with a warning.
    """
    for name in files or {}:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"sandbox: expected a file name without a folder, got {name!r}")
    if not command:
        raise ValueError("sandbox: expected a command, got none")
    global _refused
    if not _refused:
        outcome, refused = _launched(command, stdin, limits, files or {}, namespaces=True)
        if outcome is not None:
            return outcome
        _refused = refused
        warnings.warn(
            f"sandbox: expected namespaces, got {refused!r} from this machine: programs have limits of time, "
            "memory and processes, but reach the network and the files of this user",
            stacklevel=2,
        )
    outcome, _ = _launched(command, stdin, limits, files or {}, namespaces=False)
    assert outcome is not None
    return outcome


@cache
def _visible() -> list[str]:
    """Return the paths that a program can read: the system's, and this Python's."""
    python = [sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent)]
    paths = [*_SYSTEM]
    for path in python:
        if path != "/" and not any(Path(path).is_relative_to(x) for x in paths):
            paths.append(path)
    return paths


def _reachable(command: str) -> bool:
    """Return whether any user may execute a program."""
    path = Path(shutil.which(command) or command)
    places = {*path.absolute().parents, *path.resolve().parents, path.resolve()}
    return path.exists() and all(x.stat().st_mode & 1 for x in places)


def _launched(
    command: Sequence[str],
    stdin: str | bytes,
    limits: Limits,
    files: Mapping[str, str | bytes],
    *,
    namespaces: bool,
) -> tuple[Outcome | None, str]:
    """Return (the outcome, ""), or (None, what the machine refused)."""
    folder = tempfile.mkdtemp(prefix="rft_box_")
    reader, writer = os.pipe()
    try:
        for name, content in files.items():
            Path(folder, name).write_bytes(_bytes(content))
        if not namespaces and os.getuid():  # it counts all of this user, other programs that run now too
            limits = limits._replace(processes=_others() + 8 * limits.processes)
        seconds = max(1, -int(-limits.seconds // 1))
        plan = {
            "command": list(command),
            "folder": folder,
            "parent": os.getpid(),
            "report": writer,
            "filter": filter_of().hex(),
            "namespaces": namespaces,
            "reachable": _reachable(command[0]),
            "visible": _visible(),
            "seconds": limits.seconds,
            "memory": limits.memory,
            "disk": limits.disk,
            "env": {x: os.environ[x] for x in ("PATH", "LANG") if x in os.environ}
            | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            "limits": {
                "CORE": 0,
                "CPU": seconds,
                "AS": limits.memory,
                "FSIZE": limits.file_size,
                "NOFILE": 256,
                "NPROC": limits.processes,
            },
        }
        with tempfile.TemporaryFile() as given:
            given.write(_bytes(stdin))
            given.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(plan)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writer],
                env={},
                cwd="/",
                start_new_session=True,
            )
        os.close(writer)
        writer = -1
        return _read(process, reader, limits)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
        _remove(folder)


def _bytes(x: str | bytes) -> bytes:
    return x.encode(errors="surrogatepass") if isinstance(x, str) else x


def _others() -> int:
    """Return the number of processes and threads of this user, which its limit counts too."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                count += sum(1 for _ in (path / "task").iterdir())
    return count


def _read(process: "subprocess.Popen[bytes]", reader: int, limits: Limits) -> tuple[Outcome | None, str]:
    """Read what a program writes, within its limits, until its launcher tells how it ended."""
    assert process.stdout is not None and process.stderr is not None
    begun = time.monotonic()
    until = begun + limits.seconds + _GRACE
    got: dict[int, bytearray] = {
        x: bytearray() for x in (process.stdout.fileno(), process.stderr.fileno(), reader)
    }
    forced = ""
    with process, selectors.DefaultSelector() as selector:
        for x in got:
            selector.register(x, selectors.EVENT_READ)
        try:
            while selector.get_map():
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    forced = forced or ("" if got[reader] else "late")
                    break
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    got[key.fd] += part
                    if not part:
                        selector.unregister(key.fd)
                        if key.fd == reader:  # what it wrote is in the pipes
                            until = min(until, time.monotonic() + 0.5)
                    elif len(got[key.fd]) > limits.output and key.fd != reader:
                        forced = "output"
                if forced:
                    break
        finally:
            _stop(process)
    stdout, stderr, report = (bytes(x) for x in got.values())
    told: dict[str, Any] = {}
    with suppress(ValueError):
        told = json.loads(report)
    if "refused" in told:
        return None, told["refused"]
    if not told.get("filtered", True):
        _warn_unfiltered()
    ended = forced or told.get("ended", "signal")
    code = told.get("code", int(signal.SIGKILL))
    taken = told.get("seconds", time.monotonic() - begun)
    return Outcome(ended, code, stdout[: limits.output], stderr[: limits.output], taken), ""


@cache
def _warn_unfiltered() -> None:
    warnings.warn(
        f"sandbox: expected a filter of system calls, got none from this {platform.machine()}: programs may "
        "make all that their user may",
        stacklevel=4,
    )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a launcher, which ends what it has started."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)
    kill_group(process.pid)
    process.wait()


def kill_group(leader: int) -> None:
    """Kill the processes of a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _remove(folder: str) -> None:
    """Delete a folder, also one that was made to be hard to delete."""
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
