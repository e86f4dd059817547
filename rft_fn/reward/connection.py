"""The client of servers of rewards and of samples: their addresses, and one bounded request."""

import asyncio
import json
import os
import re
import ssl
import sys
import time
import weakref
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

from rft_fn.patience import FIRST, pause
from rft_fn.text import printable

if TYPE_CHECKING:
    import httpx2

__all__ = [
    "Answer", "Broken", "Connections", "Host", "Hosts", "TooLarge", "addresses", "exchange", "masked",
    "token_in",
]  # fmt: skip


# ---------- servers: addresses and keys, which ones answer, and when to try the others again


_PART = 8  # characters of the beginning of a token that are not shown either

_BETWEEN = re.compile(r",(?=https?://)")  # a query may have commas of its own


def addresses(text: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a text with commas between them, or of a list.

    ValueError for one that is no http(s)://HOST[:PORT]/PATH, for one with a name and a password in it, and
    for one that is there twice.
    """
    hosts = _BETWEEN.split(text) if isinstance(text, str) else list(text)
    if not hosts:
        raise ValueError("hosts: expected at least one address, got none")
    for address in hosts:
        _check(address)
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"hosts: expected each address once, got {', '.join(map(shown, hosts))}")
    return tuple(hosts)


def _check(address: str) -> None:
    """Raise ValueError unless it is an address without a secret."""
    try:
        where = urlsplit(address)
        right = where.scheme in ("http", "https") and where.hostname and where.port != 0
    except ValueError:  # a port that is no number
        right = False
        where = urlsplit("")
    if where.username is not None or where.password is not None:
        raise ValueError(
            f"hosts: expected an address without a name and a password, got one at {where.hostname}; a token "
            "belongs into an environment variable"
        )
    if not right or where.fragment or re.search(r"\s", address):
        raise ValueError(f"hosts: expected addresses like https://HOST:PORT/score, got {shown(address)!r}")


def shown(address: str) -> str:
    """Return an address as errors show it: without a query, which may hold a secret."""
    return address.split("?")[0].rpartition("@")[2]


def token_in(variable: str) -> str:
    """Return the token in an environment variable, "" for none. ValueError for one that no header holds."""
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and (token.isprintable() or not token)):
        raise ValueError(f"{variable}: expected a token of printable ASCII characters")
    return token


def masked(text: str, token: str) -> str:
    """Return a text with *** for the token or its beginning, also as JSON or an address would hold it."""
    for form in {token, json.dumps(token)[1:-1], quote(token, safe="")} - {""}:
        for size in range(len(form), min(len(form), _PART) - 1, -1):
            text = text.replace(form[:size], "***")
    return text


class Host:
    """A server of rewards or of samples: its failures, and until when it is left alone."""

    def __init__(self, address: str):
        self.address = address
        self.shown = shown(address)
        self.failures = 0  # in a row
        self.awake_at = 0.0  # of the monotonic clock; until then it is not asked
        self.busy = 0  # requests under way
        self.asked = 0  # requests so far
        self.problem = ""  # the last one
        self.put_off = False  # it asked itself to be left alone until then

    def failed(self, problem: str, asked: float | None, draw: float, *, first: float = FIRST) -> None:
        """Count a failure, and leave the server out for the pause of `patience`: one policy for all servers.

        `asked` is the wait that it asks for itself, and `draw` in [0, 1) is of the random part of the others.
        """
        self.problem = problem
        self.failures += 1
        self.put_off = asked is not None
        self.awake_at = time.monotonic() + pause(self.failures, draw, asked, first=first)

    def rest(self, began: float, problem: str, asked: float | None, draw: float, limit: str = "") -> None:
        """Count the failure of a request that `began` then, as `failed`; tell the first one.

        Requests that failed together count once. `limit` tells how long it is tried again.
        """
        if began < self.awake_at:
            self.problem = problem
            return
        if not self.failures:
            line = printable(f"warning: {self.shown}: {problem}; trying again{limit}")
            print(line, file=sys.stderr, flush=True)
        self.failed(problem, asked, draw)

    def well(self) -> None:
        """Note that it has answered."""
        if self.failures:
            print(f"{self.shown}: answers again", file=sys.stderr, flush=True)
        self.failures = 0
        self.awake_at = 0.0

    def turn(self) -> tuple[int, int, int]:
        """Return the order in which hosts are asked: without failures, least busy, least asked."""
        return self.failures, self.busy, self.asked


class Hosts:
    """All servers of a reward; they answer alike."""

    def __init__(self, addresses: Sequence[str]):
        self.all = [Host(address) for address in addresses]

    async def next(self, end: float) -> Host:
        """Return a server that is not resting, as soon as there is one.

        TimeoutError, at once, if there is none before `end` of the monotonic clock.
        """
        while True:
            now = time.monotonic()
            awake = [host for host in self.all if host.awake_at <= now]
            if awake:
                return min(awake, key=Host.turn)
            first = min(host.awake_at for host in self.all)
            if first >= end:
                raise TimeoutError
            await asyncio.sleep(first - now)

    def problems(self) -> str:
        """Return the last problem of each server that has one."""
        return "; ".join(f"{host.shown}: {host.problem}" for host in self.all if host.problem)


# ---------- one request, and an answer of bounded size


_KEPT = (
    2.0  # s that an unused connection is kept: below what servers keep theirs, which would break a request
)
ERROR_BYTES = 1 << 12  # of the text of an error
_SHOWN = 300  # characters of a server's text
_ZIPPED = {"gzip", "x-gzip", "deflate"}
_EITHER = zlib.MAX_WBITS | 32  # gzip or zlib, as its head says


class Broken(OSError):
    """A request did not get through, or its answer broke off: another may."""


class TooLarge(ValueError):
    """An answer beyond the limit."""


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    headers: "httpx2.Headers"
    data: bytes  # unzipped; b"" of an error
    words: str  # the beginning of an error's text in one line, without the token


class Connections:
    """A client that keeps its connections from request to request, for the event loop that asks."""

    def __init__(self, most: int, trusted: Callable[[], ssl.SSLContext] | None = None):
        """`most` is the connections at a time. With `trusted` certificates requests go past any proxy."""
        self.most = most
        self.trusted = trusted
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx2.AsyncClient | None = None

    async def client(self) -> "httpx2.AsyncClient":
        """Return the client of the event loop that runs; it closes with the loop, or with this object."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            held = _open(self.most, True if self.trusted is None else self.trusted(), self.trusted is None)
            self._loop = loop
            self._client = await anext(held)
            weakref.finalize(self, _close, held, loop).atexit = False
        return self._client


async def _open(
    most: int, verify: ssl.SSLContext | bool, proxies: bool
) -> AsyncGenerator["httpx2.AsyncClient", None]:
    """Yield a client with its connections."""
    import httpx2

    limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=_KEPT)
    # no limit for each read: a server that drips would meet it, so a caller has a deadline of the whole
    async with httpx2.AsyncClient(
        verify=verify, trust_env=proxies, limits=limits, timeout=None, follow_redirects=False
    ) as client:
        yield client


def _close(held: AsyncGenerator[Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Close a client in the loop that it was opened in, unless that has ended, and closed it."""
    if loop.is_running():
        loop.call_soon_threadsafe(lambda: loop.create_task(held.aclose()))


async def exchange(
    client: "httpx2.AsyncClient", address: str, body: bytes | None, token: str, max_bytes: int
) -> Answer:
    """Return the answer to a POST of `body`, or to a GET without one, with the token as a bearer.

    Broken for a connection that fails, TooLarge for an answer of more than `max_bytes`, zipped or unzipped,
    ValueError for one that is packed in another way, and for an address that is none.
    """
    import httpx2

    sent = {"Accept-Encoding": "gzip"}
    if body is not None:
        sent["Content-Type"] = "application/json"
    if token:
        sent["Authorization"] = f"Bearer {token}"
    method = "GET" if body is None else "POST"
    events: set[str] = set()

    async def note(event: str, _: Any) -> None:
        events.add(event)

    try:
        while True:
            try:
                return await _exchanged(client, method, address, body, sent, token, max_bytes, note)
            except httpx2.TransportError as error:
                if _was_kept(events):
                    events.clear()  # the client has dropped that connection, and takes another
                    continue
                line = f"{type(error).__name__}: {error}".rstrip(": ")  # it may quote the server
                raise Broken(masked(line, token)[:_SHOWN]) from error
    except (httpx2.InvalidURL, UnicodeError):
        raise ValueError("expected an address like https://HOST:PORT, got another text") from None


async def _exchanged(
    client: "httpx2.AsyncClient",
    method: str,
    address: str,
    body: bytes | None,
    headers: Mapping[str, str],
    token: str,
    max_bytes: int,
    note: Callable[[str, Any], Awaitable[None]],
) -> Answer:
    """Return the answer to a request; `note` is told what happens on its connection."""
    told = {"trace": note}
    async with client.stream(method, address, content=body, headers=headers, extensions=told) as response:
        data, words = b"", ""
        if response.is_success:
            data = await _read(response, max_bytes, token)
        elif not response.is_redirect:
            text = masked((await _beginning(response)).decode(errors="replace"), token)
            words = " ".join(text.split())[:_SHOWN]
        return Answer(response.status_code, response.headers, data, words)


def _was_kept(events: Collection[str]) -> bool:
    """Return whether a request failed unanswered on a connection that was kept from an earlier one.

    A server may close it at any time, also while the request is on its way, which says nothing of the server.
    """
    sent = "http11.send_request_headers.started" in events
    connected = "connection.connect_tcp.started" in events
    return sent and not connected and "http11.receive_response_headers.complete" not in events


async def _read(response: "httpx2.Response", max_bytes: int, token: str) -> bytes:
    """Return the whole answer, unzipped."""
    declared = response.headers.get("Content-Length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLarge(f"expected an answer of at most {max_bytes} bytes, got one of {declared}")
    coding = response.headers.get("Content-Encoding", "identity").lower()
    if coding not in _ZIPPED | {"identity"}:
        raise ValueError(f"expected an answer that is plain or gzip, got {masked(coding, token)[:40]!r}")
    unzip = zlib.decompressobj(_EITHER) if coding in _ZIPPED else None

    # no size for the pieces: they would be collected, and the limit seen too late; what arrives counts too,
    # since there are zipped blocks of nothing
    parts: list[bytes] = []
    size = arrived = 0
    async for part in response.aiter_raw():
        arrived += len(part)
        if unzip is not None:
            try:
                # what follows the end would be collected, again for each part
                part = b"" if unzip.eof else unzip.decompress(part, max_bytes - size + 1)
            except zlib.error as error:
                raise ValueError(f"expected a gzip answer, got {error}") from None
        size += len(part)
        if max(size, arrived) > max_bytes:
            raise TooLarge(f"expected an answer of at most {max_bytes} bytes, got more")
        parts.append(part)
    if unzip is not None and not unzip.eof:
        raise Broken("the zipped answer breaks off")
    return b"".join(parts)


async def _beginning(response: "httpx2.Response") -> bytes:
    """Return the beginning of an error's text."""
    data = b""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        return data
    async for part in response.aiter_raw():
        data += part
        if len(data) >= ERROR_BYTES:
            break
    return data[:ERROR_BYTES]
