"""Spreads requests over several servers of one model, and moves them away from one that fails."""

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.server_protocol import Described, Fault, Refused
from rft_fn.patience import DEADLINE, FIRST, pause
from rft_fn.reward.connection import Host
from rft_fn.text import printable

__all__ = [
    "COMPARED", "Pool", "ServersFailed", "check_servers", "check_url", "compare_servers", "refuse_media",
]  # fmt: skip


T = TypeVar("T")


class Calls(Protocol):
    """What a pool asks of those who make its requests."""

    def line(self, error: Exception | str) -> str:
        """Return what went wrong in one line."""
        ...

    def allow(self) -> None:
        """Let requests be made again after `abort`."""
        ...

    def abort(self) -> None:
        """Break off the requests under way."""
        ...


ATTEMPTS = 5  # of one request
ROUNDS = 6  # of trying all servers again, when none works


class ServersFailed(ConnectionError):
    """No server gave what was asked for. A script ends with its line."""


class Pool:
    """The servers of one engine.

    A server that fails is not used until `revive` raises nothing. That is tried at the start of the next
    `run`, and when no server works: in ROUNDS rounds, with the pauses of `patience`. One that says when to
    come again is left alone until then, and waiting for that is no round, up to the deadline of `patience`.
    """

    def __init__(
        self,
        servers: Sequence[str],
        client: Calls,
        *,
        name: str,
        width: int,
        revive: Callable[[str], None],
        pause: float = FIRST,
    ):
        """`width` is the requests at a time to each server. `revive` raises for a server that is not well."""
        self.members = [Host(url) for url in servers]  # one with a problem is not used
        self.client = client
        self.name = name
        self.width = width
        self.revive = revive
        self.pause = pause
        self.lock = threading.Lock()  # of the members
        self.reviving = threading.Lock()
        self.stopped = threading.Event()  # no request is worth another attempt
        self.rounds = 0  # of trying all servers again, since one worked
        self.none_since = math.inf  # of the monotonic clock: when the last one stopped working
        self.jitter = random.Random()  # only of pauses, so it needs no key

    def run(self, jobs: Sequence[Callable[[str], T]]) -> list[T]:
        """Return the result of each job, which gets the address of a server and may run on several of them.

        A job that raises a Fault is tried again on another server, ATTEMPTS times in all, and once where it
        raises Refused. ServersFailed with the reasons when that is not enough; other exceptions end all jobs
        at once.
        """
        self._begin()
        threads = ThreadPoolExecutor(self.width * len(self.members), thread_name_prefix="servers")
        try:
            with self.lock:
                # while none works requests wait until all were tried again
                works = any(not m.problem for m in self.members)
                due = [m for m in self.members if works and m.problem and m.awake_at <= time.monotonic()]
            for member in due:
                threads.submit(self._try_revive, member)
            futures = [threads.submit(self._answer, job) for job in jobs]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            # whatever has raised, Ctrl-C too: nothing may wait for a server that hangs
            self.stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)
            self.client.abort()

    def each(self, job: Callable[[str], T], servers: Sequence[str] = ()) -> dict[str, T]:
        """Run `job` on `servers`, by default all, used or not; where it succeeds they are used from then on.

        ServersFailed if it does on none.
        """
        asked = [m for m in self.members if not servers or m.address in servers]
        self._begin()
        results: dict[str, T] = {}

        def attempt(member: Host) -> None:
            try:
                results[member.address] = job(member.address)
            except (Fault, Refused) as error:
                self._failed(member, error)
            else:
                self._well(member)

        with ThreadPoolExecutor(len(asked)) as threads:
            futures = [threads.submit(attempt, member) for member in asked]
            wait(futures)
        for future in futures:
            future.result()
        if not results:
            raise ServersFailed(f"engine {self.name}: {self.reasons()}")
        return results

    def working(self) -> list[str]:
        """Return the addresses of the servers that are used."""
        with self.lock:
            return [m.address for m in self.members if not m.problem]

    def leave(self, working: Sequence[str], why: str) -> None:
        """Restrict the pool to `working`."""
        for member in self.members:
            if member.address in working:
                self._well(member)
            elif not member.problem:
                self._failed(member, Fault(why))

    def reasons(self) -> str:
        """Return each server that is not used, with the reason."""
        with self.lock:
            return "; ".join(f"{m.address}: {m.problem}" for m in self.members if m.problem)

    def _begin(self) -> None:
        """Undo what ended the last call."""
        self.stopped.clear()
        self.rounds = 0
        self.none_since = math.inf
        self.client.allow()

    def _answer(self, job: Callable[[str], T]) -> T:
        """Return the result of one job."""
        last = ""
        refused: set[str] = set()
        for attempt in range(ATTEMPTS):
            if attempt:
                self.stopped.wait(self._length(attempt - 1))
            member = self._take()
            try:
                return job(member.address)
            except Fault as error:
                last = f"{member.address}: {self.client.line(error)}"
                self._failed(member, error)
            except Refused as error:  # only by this server, or by any: a second one tells
                refused.add(member.address)
                if len(refused) > 1 or not {*self.working()} - refused:
                    raise
                last = f"{member.address}: {self.client.line(error)}"
                self._failed(member, error)
            finally:
                with self.lock:
                    member.busy -= 1
            if self.stopped.is_set():
                break
        raise ServersFailed(
            f"engine {self.name}: expected an answer within {ATTEMPTS} attempts, got none; the last: {last}"
        )

    def _take(self) -> Host:
        """Return the least busy server that works. ServersFailed when none does, even after new tries."""
        while self.rounds < ROUNDS and not self.stopped.is_set():
            with self.lock:
                working = [m for m in self.members if not m.problem]
                if working:
                    self.jitter.shuffle(working)  # several processes share the servers
                    member = min(working, key=lambda m: m.busy)
                    member.busy += 1
                    return member
            self._revive_any()
        self.stopped.set()
        raise ServersFailed(
            f"engine {self.name}: expected one of {len(self.members)} servers to answer, got none after "
            f"{ROUNDS} rounds: {self.reasons()}"
        )

    def _revive_any(self) -> None:
        """Try all servers again after a pause. One thread does, the others wait for it."""
        round_ = self.rounds
        with self.reviving:
            if self.rounds != round_ or self.stopped.is_set() or self.working():
                return
            wait = self._put_off()
            self.stopped.wait(max(wait, self._length(round_)))
            for member in self.members:
                self._try_revive(member)
            self.rounds += not wait
            if self.working():
                self.rounds = 0
                self.none_since = math.inf

    def _put_off(self) -> float:
        """Return the seconds until the first server wants to be asked again; 0 where one does not say.

        0 too where that is after the deadline, which begins when no server works any more.
        """
        now = time.monotonic()
        self.none_since = min(self.none_since, now)
        with self.lock:
            if not all(m.put_off for m in self.members):
                return 0.0
            first = min(m.awake_at for m in self.members)
        return max(first - now, 1e-3) if first < self.none_since + DEADLINE else 0.0

    def _try_revive(self, member: Host) -> None:
        """Use a server again if it is well."""
        if not member.problem:
            return
        try:
            self.revive(member.address)
        except (Fault, Refused) as error:
            if not self.stopped.is_set():  # else it was broken off
                self._failed(member, error)
        else:
            self._well(member)

    def _failed(self, member: Host, error: Exception) -> None:
        with self.lock:
            asked = error.wait if isinstance(error, Fault) else None
            member.failed(self.client.line(error), asked, self.jitter.random(), first=self.pause)

    def _well(self, member: Host) -> None:
        with self.lock:
            member.problem = ""
            member.failures = 0
            member.put_off = False

    def _length(self, attempt: int) -> float:
        """Return the seconds to back off after failure number `attempt`, from 0."""
        return pause(attempt + 1, self.jitter.random(), first=self.pause)


# ---------- checks of the addresses of servers, and that all of them hold one model

COMPARED = range(3, 19)  # tokens whose log-probs servers of one model agree on
DIFFERENT = 0.1  # nats per token: more than rounding makes of one model, also in 16 bits


def check_url(server: str) -> None:
    """Raise ValueError unless `server` is an address of the form http://HOST:PORT."""
    try:
        where = urlsplit(server)
        right = where.scheme in ("http", "https") and where.hostname and where.port != 0
    except ValueError:  # a port that is no number
        right = False
    if not right:
        raise ValueError(f"engine_servers: expected addresses like http://HOST:8000, got {server!r}")


def check_servers(config: EngineConfig) -> None:
    """Raise ValueError for options that an engine on servers cannot honour."""
    if not config.servers:
        raise ValueError(
            f"engine_servers: expected at least one address like http://HOST:8000 for {config.type}, got none"
        )
    for server in config.servers:
        check_url(server)
    if len(set(config.servers)) < len(config.servers):
        raise ValueError(f"engine_servers: expected each address once, got {', '.join(config.servers)}")
    if config.tp_size != 1 or config.mem_util:
        raise ValueError(
            f"engine_tp_size, engine_mem_util: expected 1 and 0 for {config.type}, whose servers have such "
            f"options, got {config.tp_size} and {config.mem_util}"
        )
    if config.speculative:
        raise ValueError(
            f"engine_speculative: expected none for {config.type}, whose servers are started with it "
            f"(vLLM's --speculative-config), got {config.speculative!r}"
        )


def refuse_media(config: EngineConfig, model: str) -> None:
    """Raise ValueError: servers get only tokens."""
    raise ValueError(
        f"engine_type: expected one that takes prompts with media ({model} reads them, and the data has "
        f"them), got {config.type}, whose servers get tokens alone; sample with hf or vllm"
    )


def compare_servers(known: Mapping[str, Described], logp: Mapping[str, Sequence[float]]) -> None:
    """Raise ValueError for a server of another model than the first, by `logp` of the same tokens.

    Servers with different labels of weights get a warning in its place: they get the trainer's weights first.
    So do servers with the same log-probs and other names or windows.
    """
    asked = [server for server in known if server in logp]
    for i, server in enumerate(asked[1:], 1):
        same = [x for x in asked[:i] if known[x].label == known[server].label]
        first = (same or asked)[0]
        one, other = known[first], known[server]
        gaps = [abs(a - b) for a, b in zip(logp[first], logp[server], strict=True)]
        gap = sum(gaps) / len(gaps)
        models = (
            f"{first} serves {one.model!r} with a window of {one.window} tokens, {server} {other.model!r} "
            f"with {other.window}"
        )
        if not gap <= DIFFERENT and one.label != other.label:
            line = (
                f"warning: engine_servers: {first} has weights {one.label!r} and {server} {other.label!r}; "
                f"log-probs differ by {gap:.3g} nats per token; they are compared again after the first load"
            )
            print(printable(line), file=sys.stderr, flush=True)
            continue
        if not gap <= DIFFERENT:
            raise ValueError(
                f"engine_servers: expected servers of one model, got {server}, whose log-probs of the same "
                f"tokens differ from those of {first} by {gap:.3g} nats per token: {models}"
            )
        if (one.model, one.window) != (other.model, other.window):
            line = f"warning: engine_servers: {models}; their log-probs agree"
            print(printable(line), file=sys.stderr, flush=True)
