"""The roles of a file as processes of this machine: started in order, shown, and ended together.

Each replica has a session of its own, a log, and lines in the terminal that begin with its name. All end when
the main role has ended, when the first of them fails, and on Ctrl-C or SIGTERM. Ports stay in a file, so that
the same commands are started again and a run resumes.
"""

import collections
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from rft_fn.text import printable
from rft_fn.tools import printer
from rft_fn.tools.launch import descendants, ports, roles
from rft_fn.tools.launch.roles import Replica, Roles

__all__ = ["launch"]

_LAST = 20  # lines of a program that failed
_LOOK = 0.05  # s between two looks at all programs
_ASK = 0.2  # s between two questions whether a program is ready
_ANSWER = 5.0  # s that an answer may take
_GOODBYE = 5.0  # s for the last lines of what has ended
_LONGEST = 1 << 16  # bytes of a line, which a longer one is cut into


def launch(path: Path, *, dry_run: bool = False) -> int:
    """Run the roles of a file and return the exit code: 0 once the main role has ended with 0.

    It is the code of the first program that failed, 128 + N where signal N ended it, and 130 or 143 after
    Ctrl-C or SIGTERM. With `dry_run` commands are printed, and nothing runs.
    """
    found = roles.read(path)
    for name, role in found.roles.items():
        if role.nodes > 1:
            raise ValueError(
                f"{path}: roles.{name}.nodes: expected 1 on this machine, got {role.nodes}; --to slurm "
                "and --to k8s are for several"
            )
    folder = path.parent / "logs" / path.stem
    with contextlib.ExitStack() as stack:
        if not dry_run:
            stack.enter_context(_alone(folder))
        file = folder / "ports.json"
        found_ports = ports.find(file, roles.needed_ports(found))
        replicas = _with_devices(path, found, roles.resolve(found, found_ports))
        _check_programs(path, replicas)
        if dry_run:
            _print_commands(found, replicas, folder)
            return 0
        ports.write(file, found_ports)
        with _signals() as asked:
            return _Launch(found, replicas, folder, asked).run()


def _print_commands(found: Roles, replicas: Sequence[Replica], folder: Path) -> None:
    print(f"# logs in {printer.line(folder)}")
    for x in replicas:
        needs = ", ".join(found.roles[x.role].needs)
        print(printer.comment(f"{x.name}" + (f", after {needs}" if needs else "")))
        env = [f"{key}={value}" for key, value in x.env.items()]
        print(printer.line(shlex.join([*(["env", *env] if env else []), *x.words])))
        if x.ready:
            print(printer.comment(f"ready: {x.ready} within {found.roles[x.role].ready_within:g} s"))


def _with_devices(path: Path, found: Roles, replicas: Sequence[Replica]) -> list[Replica]:
    """Give each replica the next of the GPUs that this process sees, as many as its role asks for."""
    seen = os.environ.get(roles.DEVICES)
    numbers = None if seen is None else [x for x in seen.split(",") if x.strip()]
    wanted = sum(role.gpus * role.replicas for role in found.roles.values())
    if numbers is not None and wanted > len(numbers):
        raise ValueError(f"{path}: gpus: expected {wanted} in {roles.DEVICES}, got {seen!r}")
    begin, made = 0, []
    for x in replicas:
        end = begin + found.roles[x.role].gpus
        if end > begin:
            own = ",".join(numbers[begin:end] if numbers else map(str, range(begin, end)))
            x = x._replace(env={roles.DEVICES: own, **x.env})
        made.append(x)
        begin = end
    return made


def _environment(x: Replica) -> dict[str, str]:
    """Return the environment of a program, which finds the `rft` and `python` of this process."""
    here = os.path.dirname(sys.executable)
    env = dict(os.environ)
    env |= {"PYTHONUNBUFFERED": "1", "PATH": f"{here}{os.pathsep}{env.get('PATH', os.defpath)}"}
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1"]))
    return {**env, **x.env}


def _check_programs(path: Path, replicas: Sequence[Replica]) -> None:
    for x in replicas:
        if not x.words or shutil.which(x.words[0], path=_environment(x)["PATH"]) is None:
            got = printer.line(x.words[0]) if x.words else "none"
            raise ValueError(f"{path}: roles.{x.role}.command: expected a program that is there, got {got}")


# ---------- one launch at a time, and its signals


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder, so that one launch at a time uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{folder}: expected no other launch of this file, got one that runs") from None
        yield


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask for the end within the block."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    usual = {n: signal.signal(n, lambda n, _: asked.append(n)) for n in heard}
    try:
        yield asked
    finally:
        for n, handler in usual.items():
            signal.signal(n, handler)


# ---------- programs


class _Running:
    """A program that was started, and its threads: one for its lines, one until it is ready."""

    def __init__(self, replica: Replica, log: Path, show: Callable[[str, bytes], None]):
        self.replica = replica
        self.log = log
        self.begun = time.monotonic()
        self.last: collections.deque[bytes] = collections.deque(maxlen=_LAST)
        self.ready = threading.Event()
        self.process = subprocess.Popen(
            replica.words,
            env=_environment(replica),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.reading = threading.Thread(target=self._read, args=(self.process.stdout, show), daemon=True)
        self.reading.start()
        if replica.ready:
            threading.Thread(target=self._ask, args=(show,), daemon=True).start()
        else:
            self.ready.set()

    def _read(self, pipe: IO[bytes], show: Callable[[str, bytes], None]) -> None:
        with self.log.open("ab", buffering=0) as log:
            for line in iter(lambda: pipe.readline(_LONGEST), b""):
                log.write(line)
                self.last.append(line)
                show(self.replica.name, line)

    def _ask(self, show: Callable[[str, bytes], None]) -> None:
        import httpx2

        while self.process.returncode is None:
            with contextlib.suppress(httpx2.HTTPError, httpx2.InvalidURL):
                answer = httpx2.get(self.replica.ready, trust_env=False, timeout=_ANSWER)
                if answer.status_code == 200:
                    show("launch", f"{self.replica.name} is ready after {self.seconds():.1f} s".encode())
                    return self.ready.set()
            time.sleep(_ASK)

    def seconds(self) -> float:
        """Return the time since its start."""
        return time.monotonic() - self.begun

    def ended(self) -> bool:
        """Return whether it has ended; what it started and left in its group is killed then."""
        if self.process.returncode is None and self.process.poll() is not None:
            self.signal(signal.SIGKILL)
        return self.process.returncode is not None

    def signal(self, number: int) -> None:
        """Send a signal to the program and what it has started in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _Failure(NamedTuple):
    """The first program that failed, how, and the exit code for it."""

    running: _Running
    what: str
    code: int
    seconds: float


class _Launch:
    """All programs of a file, from their start to their end."""

    def __init__(self, found: Roles, replicas: Sequence[Replica], folder: Path, asked: Sequence[int]):
        self.found = found
        self.waiting = list(replicas)
        self.folder = folder
        self.asked = asked  # signals; it grows
        self.width = max(len("launch"), *(len(x.name) for x in replicas))
        self.running: list[_Running] = []
        self.lock = threading.Lock()

    def run(self) -> int:
        """Return the exit code, after everything has ended."""
        descendants.adopt()
        self.say(f"logs in {self.folder}")
        failure = None
        try:
            while not self.asked and not failure and not self.main_has_ended():
                self.start()
                time.sleep(_LOOK)
                failure = self.failure()
                descendants.reap({x.process.pid for x in self.running})
        finally:
            self.stop()
        if failure:
            self.tell(failure)
            return failure.code
        return 128 + self.asked[0] if self.asked else 0

    def say(self, text: str) -> None:
        """Print a line of launch itself."""
        self.show("launch", text.encode(errors="replace"))

    def show(self, name: str, line: bytes) -> None:
        """Print a line of a program, with its name in front."""
        with self.lock, contextlib.suppress(OSError, ValueError):  # a terminal that has gone
            print(f"{name:<{self.width}} | {_shown(line)}", flush=True)

    def start(self) -> None:
        """Start what waits for nothing any more."""
        for replica in [*self.waiting]:
            needs = self.found.roles[replica.role].needs
            if any(x.role in needs for x in self.waiting):
                continue
            if all(x.ready.is_set() for x in self.running if x.replica.role in needs):
                self.waiting.remove(replica)
                self.running.append(_Running(replica, self.folder / f"{replica.name}.log", self.show))
                self.say(f"{replica.name} starts")

    def main_has_ended(self) -> bool:
        """Return whether each replica of the main role has ended with 0."""
        if any(x.role == self.found.main for x in self.waiting):
            return False
        some = [x for x in self.running if x.replica.role == self.found.main]
        return all(x.ended() and x.process.returncode == 0 for x in some)

    def failure(self) -> _Failure | None:
        """Return the first failure, if there is one before the end of the main role."""
        if self.main_has_ended():
            return None
        for x in self.running:
            role = self.found.roles[x.replica.role]
            if not x.ended():
                if not x.ready.is_set() and x.seconds() > role.ready_within:
                    what = f"gave no 200 at {x.replica.ready} within {role.ready_within:g} s"
                    return _Failure(x, what, 1, x.seconds())
                continue
            code = x.process.returncode
            if code < 0:
                return _Failure(x, f"was ended by {_name(-code)}", 128 - code, x.seconds())
            if code:
                return _Failure(x, f"ended with code {code}", code, x.seconds())
            if x.replica.ready and x.replica.role != self.found.main:
                return _Failure(x, "ended with code 0 before the main role", 1, x.seconds())
        return None

    def stop(self) -> None:
        """End all programs, first those that need others: SIGTERM, and SIGKILL after the grace."""
        asked = len(self.asked)
        for level in sorted({x.replica.level for x in self.running}, reverse=True):
            some = [x for x in self.running if x.replica.level == level]
            for x in some:
                if not x.ended():
                    x.signal(signal.SIGTERM)
            end = time.monotonic() + self.found.grace
            while (left := [x for x in some if not x.ended()]) and len(self.asked) == asked:
                if time.monotonic() > end:
                    break
                time.sleep(_LOOK)
            for x in left:
                self.say(f"{x.replica.name} is killed")
                x.signal(signal.SIGKILL)
                x.process.wait()
        descendants.kill()
        for x in self.running:
            x.reading.join(_GOODBYE)

    def tell(self, failure: _Failure) -> None:
        """Print what failed, and its last lines."""
        x = failure.running
        lines = [_shown(line) for line in x.last]
        print(
            f"error: {x.replica.name} {failure.what}, after {failure.seconds:.0f} s; its last lines, of "
            f"{printer.line(x.log)}:",
            *(f"    {line}" for line in lines or ["(none)"]),
            sep="\n",
            file=sys.stderr,
        )


def _shown(line: bytes) -> str:
    """Return a line for a terminal; of one that is written over, what is last there."""
    return printable(line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2])


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of real time
        return f"signal {number}"
