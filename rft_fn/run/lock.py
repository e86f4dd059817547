"""One run per folder: a lock that the kernel releases when its process dies, however it dies."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path

__all__ = ["acquire", "check", "held", "release"]

_held: dict[Path, int] = {}  # folder -> the open file that holds its lock; a process shares its own lock


def acquire(folder: Path) -> None:
    """Lock `folder` for this process.

    ValueError that names the holder of the lock: its host, its process and when it began.
    """
    folder = folder.resolve()
    if folder in _held:
        if _holds(folder):
            return
        release(folder)  # it was deleted, and made again
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 4096).decode(errors="replace")
        os.close(file)
        raise ValueError(
            f"run folder {folder} is in use by {_described(holder)}; wait for it, end it, or choose another "
            "folder with --out"
        ) from None
    except OSError as error:  # a file system without locks: the run is still worth starting
        os.close(file)
        print(f"warning: {folder}: not locked ({error.strerror}); start no second run here", flush=True)
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    about = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    os.ftruncate(file, 0)
    os.write(file, json.dumps(about).encode())
    _held[folder] = file


def check(folder: Path, *, whole: bool = True) -> None:
    """Refuse to go on in a folder that was deleted or moved away under this process, or is not `whole`.

    ValueError, also where there is another folder of that name by now.
    """
    if not (_holds(folder) and whole):
        raise ValueError(
            f"run folder {folder}: it was deleted or moved away during the run, and its rows and checkpoints "
            "with it; start the command again"
        )


def _holds(folder: Path) -> bool:
    """Whether the lock in a folder is the one that this process has taken, where it could take one."""
    file = _held.get(folder.resolve())
    try:
        there = os.stat(folder / ".lock")
        return file is None or os.path.samestat(os.fstat(file), there)
    except OSError:
        return False


def held(folder: Path) -> bool:
    """Whether a process of this machine holds the lock of `folder`; it is not taken."""
    try:
        file = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def release(folder: Path) -> None:
    """Unlock `folder`, if this process holds its lock."""
    file = _held.pop(folder.resolve(), None)
    if file is not None:
        os.close(file)


def _described(text: str) -> str:
    try:
        about = json.loads(text)
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError):  # it has the lock and has not written who it is yet
        return "another process"
