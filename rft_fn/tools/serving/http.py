"""The HTTP of all servers: limits of requests and of connections, and the token of clients."""

import asyncio
import hmac
import os
import socket
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["OneLength", "Problem", "Rules", "Server", "arrived", "authorize", "waited"]


_KEPT = 75  # s that an unused connection is kept
_WAITING = 2048  # connections that the system holds until they are taken
_TAKEN = 8  # of them at once, so that those that are too many are closed before the next come
_MOST = 4096  # connections
_SPARE = 64  # files of the process that are left to rewards, and to connections that come and go
_READ = 1 << 16  # bytes of an answer that a client takes at least while `Rules.seconds` pass
_LEAVE = 5.0  # s that clients have at the end to send what they began, and to read their answers


class Rules(NamedTuple):
    """The limits of a server, and its secret."""

    max_bytes: int  # of a request
    seconds: float  # that the head of a request may take to arrive, then its body; and a part of an answer
    token: str  # "" for none


class Problem(Exception):
    """A request that is refused: a status, a line, and headers."""

    def __init__(self, status: int, line: str, **headers: str):
        super().__init__(line)
        self.status = status
        self.headers = {name.replace("_", "-"): x for name, x in headers.items()}


class OneLength:
    """Refuses a request with two lengths: what stands before the server may have read the other one."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever its path."""
        names = {name.lower() for name, _ in scope.get("headers", ())}
        if not {b"content-length", b"transfer-encoding"} <= names:
            return await self.app(scope, receive, send)
        line = "expected Content-Length or Transfer-Encoding, got both"
        await JSONResponse({"error": line}, 400, {"Connection": "close"})(scope, receive, send)


def authorize(request: Request, rules: Rules) -> None:
    """Raise Problem for a request without the server's token."""
    given = request.headers.get("Authorization", "")
    if rules.token and not hmac.compare_digest(given.encode(), f"Bearer {rules.token}".encode()):
        raise Problem(401, "expected the server's token as a bearer", WWW_Authenticate="Bearer")


async def arrived(request: Request, rules: Rules) -> bytes:
    """Return the body of a request; raise Problem for one that is too large, late, or zipped."""
    try:
        async with asyncio.timeout(rules.seconds):
            return await _body(request, rules)
    except TimeoutError:
        raise Problem(
            408, f"expected a whole request within {rules.seconds:g} s", Connection="close"
        ) from None


async def _body(request: Request, rules: Rules) -> bytes:
    """Return the body of a request; raise Problem for one that is too large, or zipped."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise Problem(415, "expected a body that is not zipped")
    declared = request.headers.get("Content-Length", "")
    parts: list[bytes] = []
    size = int(declared) if declared.isdigit() else 0
    if size <= rules.max_bytes:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > rules.max_bytes:
                break
            parts.append(part)
    if size > rules.max_bytes:
        raise Problem(413, f"expected at most {rules.max_bytes} bytes, got more", Connection="close")
    return b"".join(parts)


async def waited(request: Request, found: asyncio.Future[Any], seconds: float | None = None) -> bool:
    """Return whether `found` is done within `seconds`; raise ClientDisconnect if the client leaves before.

    What nobody waits for any more is cancelled.
    """
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((found, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if found.done():
            return True
        found.cancel()
        if left.done():
            raise ClientDisconnect
        return False
    finally:
        left.cancel()


async def _left(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Server(uvicorn.Server):
    """A server of limited connections, which nobody can keep from ending."""

    def __init__(self, made: Starlette, rules: Rules):
        self.rules = rules
        self.cut = 0  # connections with clients that neither sent nor read at the end
        self._told = -rules.seconds  # when the last line about too many files was printed
        connection: Any = partial(Connection, most=_most_connections())
        super().__init__(
            uvicorn.Config(
                made,
                http=connection,
                ws="none",
                lifespan="off",
                log_level="error",  # anybody can send what is no HTTP
                access_log=False,
                server_header=False,
                backlog=_TAKEN,
                timeout_keep_alive=_KEPT,
                timeout_graceful_shutdown=int(_LEAVE) + 2,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        asyncio.get_running_loop().set_exception_handler(self._tell)
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(_WAITING)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that take too long, once a second."""
        if counter % 10 == 0:
            now = time.monotonic()
            for connection in self._connections():
                connection.look(now, self.rules.seconds)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, once all clients have their answers or _LEAVE seconds are over."""
        asyncio.get_running_loop().call_later(_LEAVE, self._cut)
        await super().shutdown(sockets)

    def _cut(self) -> None:
        for connection in self._connections():
            self.cut += 1
            connection.drop()

    def _connections(self) -> list["Connection"]:
        return [x for x in self.server_state.connections if isinstance(x, Connection)]

    def _tell(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Print a line now and then, in place of a traceback for each connection."""
        now = time.monotonic()
        if now - self._told >= self.rules.seconds:
            self._told = now
            line = f"warning: {context['message']}: {context.get('exception')}"
            print(" ".join(line.split()), file=sys.stderr, flush=True)


class Connection(H11Protocol):
    """A connection; beyond `most` the one that has waited longest for a request is closed."""

    def __init__(self, *args: Any, most: int, **given: Any):
        super().__init__(*args, **given)
        self.most = most
        self.dropped = False
        self.since = time.monotonic()  # of the last answer; before it, of the beginning
        self.began: float | None = self.since  # of a request that has not arrived
        self.unread: tuple[float, int] | None = None  # since when there are so many bytes, about

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it."""
        super().connection_made(transport)
        if len(self.connections) <= self.most:
            return
        others = [
            x for x in self.connections if isinstance(x, Connection) and not x.dropped and x is not self
        ]
        others = [x for x in others if x.idle() or x.cycle.more_body]
        if others:
            min(others, key=lambda x: (not x.idle(), x.since)).drop()
        else:
            transport.write(b"HTTP/1.1 503 Full\r\nRetry-After: 1\r\nConnection: close\r\n\r\n")
            transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.since = time.monotonic()
        super().on_response_complete()

    def idle(self) -> bool:
        """Return whether it waits for a request."""
        return self.cycle is None or self.cycle.response_complete

    def look(self, now: float, seconds: float) -> None:
        """Close it if a head takes over `seconds`, or its client reads under _READ bytes in that time."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self.unread = None
        elif self.unread is None or unsent <= self.unread[1] - _READ:
            self.unread = (now, unsent)
        arriving = self.cycle is None or self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY
        if not (self.idle() and arriving):
            self.began = None
        elif self.began is None:
            self.began = now
        waits = [self.began, self.unread and self.unread[0]]
        if any(start is not None and now - start > seconds for start in waits):
            self.drop()

    def shutdown(self) -> None:
        """Close it after the answer that is under way."""
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # what has come is no HTTP
            self.drop()

    def drop(self) -> None:
        """Close it at once."""
        self.dropped = True
        self.transport.abort()


def _most_connections() -> int:
    """Return how many connections the limit of open files allows."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST
    return max(min(limit - len(os.listdir("/dev/fd")) - _SPARE, _MOST), _TAKEN)
