"""Start a program in namespaces of its own and with limits, and end all that it has started.

A script between `program.run` and the program, with a plan in JSON: it imports nothing of the library. In a
namespace of processes it is their first one, with which the kernel ends the others; without one it adopts
what they leave behind, and ends it by its parents.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER = 0x20000, 0x4000000, 0x8000000, 0x10000000
_NEW_PID, _NEW_NET = 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_KEPT = 2 | 4 | 8 | 1024  # flags of a mount that a remount must not drop: nosuid nodev noexec noatime
_PARENT_DEATH, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_BY_FILTER = 2  # of prctl's _SECCOMP
_NOBODY = 65534
_USERS = 60_000_000  # ids from here on belong to nobody; one for each program, so that its processes count
_BOX = "/box"  # the folder of a program that has a root of its own
_ALSO = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def main() -> None:
    """Run the program of the plan, and write how it ended."""
    plan = json.loads(sys.argv[1])
    os.set_inheritable(plan["report"], False)
    _prctl(_PARENT_DEATH, signal.SIGKILL)
    if os.getppid() != plan["parent"]:
        os._exit(1)
    box = plan["folder"]
    user = _user(plan)
    if plan["namespaces"]:
        try:
            box = _isolate(plan, user)
        except OSError as error:
            _tell(plan, refused=error.strerror or str(error))
            os._exit(1)
        first = os.fork()
        if first:
            os.waitpid(first, 0)
            os._exit(0)
        _prctl(_PARENT_DEATH, signal.SIGKILL)
        with suppress(OSError):  # of a container that hides a part of its own: then there is none
            _mount("proc", "/proc", "proc", _NOSUID | _NODEV, "")
    else:
        adopt()
        signal.signal(signal.SIGTERM, lambda *_: _stopped.append(True))
        if user is not None:
            for path in (box, *(os.path.join(box, x) for x in os.listdir(box))):
                os.chown(path, user, user)
    _prctl(_DUMPABLE, 0)  # the program may have the same user, and this one holds its input
    _prctl(_NO_NEW_PRIVILEGES, 1)
    plan["filtered"] = _filter(bytes.fromhex(plan["filter"]))
    _supervise(plan, box, user)
    os._exit(0)


_stopped: list[bool] = []


def _tell(plan: dict[str, Any], **what: Any) -> None:
    os.write(plan["report"], json.dumps(what).encode())


def _supervise(plan: dict[str, Any], box: str, user: int | None) -> None:
    """Start the program, wait for its end or its limits, end what is left of it, and tell."""
    begun = time.monotonic()
    child = os.fork()
    if not child:
        try:
            _become(plan, box, user)
        except BaseException as error:
            os.write(2, f"{plan['command'][0]}: {error}\n".encode())
        os._exit(127)
    how, status, wait = "exit", 0, 0.001
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if ended == child:
            how = "signal" if os.WIFSIGNALED(status) else "exit"
            break
        if ended:
            continue
        if _stopped or time.monotonic() - begun > plan["seconds"]:
            how = "late"
            break
        if plan["namespaces"] and _resident() > plan["memory"]:
            how = "memory"
            break
        time.sleep(wait)
        wait = min(2 * wait, 0.02)
    if not plan["namespaces"]:
        _end_descendants()
    code = os.WTERMSIG(status) if how == "signal" else os.waitstatus_to_exitcode(status) if status else 0
    if how == "signal" and code == signal.SIGXCPU:
        how = "late"
    _tell(plan, ended=how, code=code, seconds=time.monotonic() - begun, filtered=plan["filtered"])


def _resident() -> int:
    """Return the bytes of memory that all processes but this one take; 0 without /proc."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as file:
                    fields = file.read().split()
                pages += int(fields[1]) - int(fields[2])
            except (OSError, IndexError):  # it has ended
                pass
    return pages * resource.getpagesize()


def adopt() -> None:
    """Make this process the parent of what outlives the one that started it, where the system has that."""
    _prctl(_SUBREAPER, 1)


def _end_descendants() -> None:
    """Kill all descendants, also those whose parents have ended: this process has adopted them."""
    until = time.monotonic() + 1.0
    seen: set[int] = set()
    while time.monotonic() < until:
        new = descendants() - seen
        for process in new:  # one that stands still starts no other
            _signal(process, signal.SIGSTOP)
        seen |= new
        if new:
            continue
        for process in seen:
            _signal(process, signal.SIGKILL)
        seen.clear()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _signal(process: int, number: int) -> None:
    with suppress(OSError):
        os.kill(process, number)


def descendants() -> set[int]:
    """Return the processes below this one, without those that have ended; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return set()
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    left = [os.getpid()]
    while left:
        more = children.get(left.pop(), [])
        found.update(more)
        left += more
    return found


# ---------- a root of its own


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc().prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def _filter(code: bytes) -> bool:
    """Have the kernel refuse calls of this process, and of all that it starts; return whether it does."""
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(kept))
    return bool(code) and not _libc().prctl(_SECCOMP, ctypes.c_ulong(_BY_FILTER), program)


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    arguments = [x.encode() or None for x in (source, target, kind)]
    result = _libc().mount(*arguments, ctypes.c_ulong(flags), data.encode() or None)
    _checked(result, f"mount {target}")


def _user(plan: dict[str, Any]) -> int | None:
    """Return the id that the program has in place of root's; None where it keeps the one it would have."""
    if os.getuid() or not (plan["namespaces"] or plan["reachable"]):
        return None
    user = _USERS + os.getpid()
    child = os.fork()  # a container may map few ids
    if not child:
        try:
            os.setresuid(user, user, user)
            os._exit(0)
        except OSError:
            os._exit(1)
    return _NOBODY if os.waitpid(child, 0)[1] else user


def _isolate(plan: dict[str, Any], user: int | None) -> str:
    """Enter new namespaces and a root with little in it; return the folder of the program there."""
    if sys.platform != "linux":
        raise OSError(0, "namespaces are Linux's")
    folder = plan["folder"]
    files = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            files[name] = file.read()
    flags = _NEW_NS | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET
    if user is None:
        outside, group = os.getuid(), os.getgid()
        _checked(_libc().unshare(flags | _NEW_USER), "unshare")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{_NOBODY} {outside} 1"),
            ("gid_map", f"{_NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    else:
        _checked(_libc().unshare(flags), "unshare")
    _mount("", "/", "", _REC | _PRIVATE, "")
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, f"size={plan['disk']},nr_inodes=10000,mode=755")
    for path in (*plan["visible"], *_ALSO):
        _show(path, folder)
    box = folder + _BOX
    for path, mode in ((box, 0o700), (folder + "/tmp", 0o777), (folder + "/proc", 0o755)):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
    for name, content in files.items():
        with open(os.path.join(box, name), "wb") as file:
            file.write(content)
        if user is not None:
            os.chown(os.path.join(box, name), user, user)
    if user is not None:
        os.chown(box, user, user)
    os.chroot(folder)  # in which no process makes a namespace of users any more
    os.chdir("/")
    return _BOX


def _show(path: str, root: str) -> None:
    """Let a file or a folder be read in the new root, at the same place."""
    target = root + path
    if not os.path.exists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and not path.startswith("/dev"):
        os.symlink(os.readlink(path), target)
        _show(os.path.realpath(path), root)
        return
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        os.close(os.open(target, os.O_CREAT))
    _mount(path, target, "", _BIND | _REC, "")
    if not path.startswith("/dev"):
        kept = os.statvfs(path).f_flag & _KEPT
        _mount("", target, "", _REMOUNT | _BIND | _RDONLY | _NOSUID | kept, "")


# ---------- the program


def _become(plan: dict[str, Any], box: str, user: int | None) -> None:
    """Turn this process into the program."""
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, 65536)
    os.chdir(box)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
    for name, value in plan["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            most = value if hard < 0 else min(value, hard)
            with suppress(OSError, ValueError):  # of a system that has not this one
                resource.setrlimit(kind, (most, most + 1 if name == "CPU" and hard < 0 else most))
    if user is not None:
        os.setresuid(user, user, user)
    env = {**plan["env"], "HOME": box, "TMPDIR": box}
    os.execvpe(plan["command"][0], plan["command"], env)


if __name__ == "__main__":
    main()
