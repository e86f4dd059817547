"""Sends weights to servers of vLLM that have this package's backend, by vLLM's own four phases.

The phases are requests; the weights go over a channel beside them. All of it has one deadline for each
server, and after any failure the channel to that server is given up: the next load makes another one. While
the server reloads its model it holds back what others ask, where it can. One without room for all weights
gets them in parts of whole layers, and holds back until the last of them.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch

from rft_fn import border
from rft_fn.engine.server_protocol import Client, Fault, Refused, expected
from rft_fn.engine.weight_channel import (
    NO_ROOM,
    Channel,
    Connect,
    Parcel,
    Update,
    all_ready,
    listen,
    own_address,
)
from rft_fn.text import printable

__all__ = [
    "HOLD", "Request", "Senders", "answered", "hold_back", "line", "seconds_left", "together",
    "workers",
]  # fmt: skip

T = TypeVar("T")

INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
HOLD = "/pause?mode=wait", "/resume"  # what is under way ends first, and the rest waits
MEET = 60.0  # seconds for a group to come together
POLL = 2e-3  # seconds between looks at whether the workers are ready
WORDS = 2.0  # seconds that a server has to say why its end of a channel has closed
SHARE = 0.9  # of the time that is left, for the server: its own words are better than none in time


class Request:
    """A request under way, in a thread of its own."""

    def __init__(self, post: Callable[[], Any]):
        self.answer: Any = None
        self.problem: Exception | None = None
        self.over = threading.Event()
        threading.Thread(target=self._run, args=(post,), name="phase", daemon=True).start()

    def _run(self, post: Callable[[], Any]) -> None:
        try:
            self.answer = post()
        except Exception as error:
            self.problem = error
        finally:
            self.over.set()


class Senders:
    """The trainer's ends of the channels to its servers; threads may send to several at a time."""

    def __init__(self, client: Client, seconds: float, *, holds: bool = True):
        """`seconds` is the limit of all phases of one load; with `holds` it holds back what others ask."""
        self.client = client
        self.seconds = seconds
        self.holds = holds
        self.run = uuid4().hex[:8]  # another one's weights are refused
        self.open: dict[str, Channel] = {}
        self.parts: dict[str, int] = {}  # into how many the weights are cut for a server without room

    def has(self, server: str) -> bool:
        """Ask whether a server has the backend: no other one takes the question."""
        return self._takes(server, "gloo")

    def send(self, server: str, parcel: Parcel, label: str) -> None:
        """Send all of `parcel`. Fault or Refused where it has not arrived.

        The server's version is none that anyone samples from until the protocol's `settle` has set `label`.
        """
        end = time.monotonic() + self.seconds
        parts = self._begin(server, parcel, end)
        try:
            with hold_back(self.client, server, HOLD, {}, end) if self.holds else nullcontext():
                for i in range(len(parts)):
                    if i > 0:
                        self._stage(server, parts, i, end)
                    said = "arriving" if i + 1 < len(parts) else "arrived"
                    self._post(server, FINISH, {"weight_version": f"{label} {said}"}, end)
        except (Fault, Refused):
            self.open.pop(server, None)
            # it may have begun to load: its old version is true no more
            with suppress(Fault, Refused):
                self._post(server, "/update_weight_version", {"new_version": f"{label} failed"}, end)
            raise

    def close(self) -> None:
        """Leave the channels."""
        self.open.clear()

    def _begin(self, server: str, parcel: Parcel, end: float) -> list[Parcel]:
        """Stage all of the weights, or a first part for which there is room; return all parts."""
        parts = parcel.parts(self.parts.get(server, 1))
        while True:
            try:
                self._stage(server, parts, 0, end)
                return parts
            except (Fault, Refused) as error:
                finer = parcel.parts(2 * len(parts))
                lacks = re.search(rf"expected [\d.]+ GiB {NO_ROOM}, got [\d.]+", str(error))
                if lacks is None or len(finer) <= len(parts):
                    raise
                parts, self.parts[server] = finer, 2 * len(parts)
                told = f"note: {server}: {lacks[0]}; weights come to it in {len(parts)} parts"
                print(printable(told), file=sys.stderr, flush=True)

    def _stage(self, server: str, parts: list[Parcel], number: int, end: float) -> None:
        """Send one of the parts."""
        part = parts[number]
        first, last = number == 0, number + 1 == len(parts)
        most = max(each.total for each in parts)
        try:
            channel = self.open[server] = self._start(server, end)
            for bucket in part.buckets:
                update = Update(self.run, bucket.described(), most, first, last)
                update.seconds = SHARE * seconds_left(end)
                if bucket is part.buckets[-1]:
                    update.manifest, update.tied = part.manifest(), part.tied
                move = partial(channel.broadcast, bucket.data, update.seconds)
                body = {"update_info": asdict(update)}
                together(UPDATE, partial(self._post, server, UPDATE, body, end), move, end, channel.ready)
        except BaseException:
            self.open.pop(server, None)
            raise

    def _connect(self, server: str, end: float) -> Channel:
        """Meet the workers of a server."""
        world = 1 + workers(self.client, server, end)
        kind = "nccl" if torch.cuda.is_available() and self._takes(server, "nccl") else "gloo"
        seconds = min(MEET, SHARE * seconds_left(end))
        try:
            address = own_address(urlsplit(server).hostname or "")
            store = listen(address, seconds)
        except (OSError, RuntimeError) as error:
            raise Fault(f"{INIT}: {line(error)}") from error
        info = Connect(kind=kind, store=f"{address}:{store.port}", run=self.run, world=world, seconds=seconds)
        met = partial(all_ready, store, world, 0)
        meet = partial(Channel, store, kind, address, rank=0, world=world, seconds=seconds)
        post = partial(self._post, server, INIT, {"init_info": asdict(info)}, end)
        return together(INIT, post, meet, end, met)

    def _takes(self, server: str, kind: str) -> bool:
        try:
            self._post(
                server,
                INIT,
                {"init_info": asdict(Connect(kind=kind))},
                time.monotonic() + min(MEET, self.seconds),
            )
        except (Fault, Refused):
            return False
        return True

    def _start(self, server: str, end: float) -> Channel:
        """Begin an update; return the channel to use for it."""
        channel = self.open.get(server) or self._connect(server, end)
        try:
            self._post(server, START, {}, end)
        except (Fault, Refused) as error:
            if not answered(error):
                raise
            # one is open: a new channel is refused while its trainer sends; else it is ended as vLLM ends
            # one, by an error
            channel = self._connect(server, end)
            with suppress(Fault, Refused):
                left = Update(abandon=f"{self.run} begins")
                self._post(server, UPDATE, {"update_info": asdict(left)}, end)
            self._post(server, START, {}, end)
        return channel

    def _post(self, server: str, path: str, body: dict[str, Any], end: float) -> Any:
        return self.client.call(server, path, body, seconds=seconds_left(end))


def together(
    path: str,
    post: Callable[[], Any],
    move: Callable[[], T],
    end: float,
    ready: Callable[[], bool] | None = None,
) -> T:
    """Post, and `move` beside it, once the workers are `ready` where that can be told; return its result.

    So nothing waits for workers that never came or that refused, nor after `end`: NCCL knows no deadline.
    """
    request = Request(post)
    while ready is not None and not ready():
        if request.over.wait(POLL):
            raise request.problem or Fault(f"{path}: expected workers that receive, got an answer")
    moving = Request(move)
    while not (moving.over.wait(POLL) and request.over.is_set()):
        if request.problem is not None:
            break
        if moving.problem is not None:
            request.over.wait(WORDS)  # the server may say more of it
            break
        if time.monotonic() > end + WORDS:
            raise Fault(f"{path}: expected a group that ends in time, got one that waits")
    if request.problem is not None:
        raise request.problem
    if moving.problem is not None:
        raise Fault(f"{path}: {line(moving.problem)}") from moving.problem
    return moving.answer


@contextmanager
def hold_back(
    client: Client, server: str, routes: tuple[str, str], body: dict[str, Any], end: float
) -> Iterator[None]:
    """Let a server run no requests in the block, where it can; `routes` begin and end that."""
    begin, resume = routes
    can = True
    last = Client(client.key_env)  # it goes on also where the requests of `client` are broken off
    try:
        try:
            client.call(server, begin, body, seconds=seconds_left(end))
        except Refused:  # an older one has no such route
            can = False
        yield
    except BaseException:
        with suppress(Fault, Refused):
            if can:
                last.call(server, resume, {}, seconds=WORDS)
        raise
    if can:
        last.call(server, resume, {}, seconds=seconds_left(end))


def workers(client: Client, server: str, end: float) -> int:
    """Return the number of workers of a vLLM server."""
    answer = client.call(server, "/get_world_size", seconds=seconds_left(end))
    with expected("world_size", answer):
        return border.integer("world_size", answer["world_size"], low=1)


def answered(error: Exception) -> bool:
    """Return whether a server has answered, though with an error."""
    return ": status " in str(error)


def seconds_left(end: float) -> float:
    """Return the seconds until `end`. Fault where there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise Fault("weights: the time for all phases is over")
    return left


def line(error: Exception) -> str:
    """Return the beginning of what an exception says, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
