"""JSON over HTTP with deadlines, by the standard library alone."""

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

__all__ = ["Client", "Fault", "Refused", "check_url", "expected"]

UNAUTHORIZED = 401
AGAIN = (408, 425, 429)  # statuses below 500 that a later request may not meet
KEY = "RFT_SERVER_KEY"  # the environment variable with the servers' API key, unless another one is named
CHUNK = 1 << 16  # bytes


class Fault(RuntimeError):
    """A server that did not answer as it should. Another one may."""


class Refused(RuntimeError):
    """A request that a server refuses, as any other would."""


@contextmanager
def expected(what: str, answer: Any) -> Iterator[None]:
    """Fault for an answer that the block cannot read `what` from."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Fault(f"expected {what}, got {str(answer)[:80]}") from error


def check_url(server: str) -> None:
    """ValueError unless `server` is an address of the form http://HOST:PORT."""
    try:
        where = urlsplit(server)
        right = where.scheme in ("http", "https") and where.hostname and where.port != 0
    except ValueError:  # a port that is no number
        right = False
    if not right:
        raise ValueError(f"engine_servers: expected addresses like http://HOST:8000, got {server!r}")


class Client:
    """Sends requests to servers, with the key in an environment variable; any thread may call it."""

    def __init__(self, key_env: str = KEY) -> None:
        self.key_env = key_env
        self.lock = threading.Lock()
        self.sockets: set[socket.socket] = set()  # of the requests under way
        self.broken_off = False

    def call(self, server: str, path: str, body: Any = None, *, seconds: float) -> Any:
        """The JSON answer to a POST of `body`, or to a GET without one; None for an empty answer.

        Fault for a server that cannot be reached, breaks off, takes longer than `seconds` in all, fails
        (status 5xx) or answers with anything but JSON. Refused for every other status.
        """
        end = time.monotonic() + seconds
        try:
            status, text = self._exchange(urlsplit(server), path, body, end)
        except TimeoutError as error:
            raise Fault(f"{path}: no answer within {seconds:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Fault(f"{path}: {type(error).__name__}: {error}") from error

        # an error's text is the server's own: one line of it is enough
        if not 200 <= status < 300:
            line = f"{path}: status {status}: {' '.join(text.decode(errors='replace').split())[:300]}"
            if status >= 500 or status in AGAIN:
                raise Fault(line)
            if status == UNAUTHORIZED:
                line += f"; its key belongs into the environment variable {self.key_env}"
            raise Refused(line)
        if not text:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise Fault(f"{path}: expected JSON, got {text[:40]!r}") from error

    def _exchange(self, where: SplitResult, path: str, body: Any, end: float) -> tuple[int, bytes]:
        """(status, text) of one request on a connection of its own."""
        # a connection costs a millisecond, and one that is never used twice is never found closed
        connection = _connection(where, _left(end))
        method = "GET"
        payload = None
        headers = {"Connection": "close"}
        if body is not None:
            method = "POST"
            payload = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        if self.key_env in os.environ:
            headers["Authorization"] = f"Bearer {os.environ[self.key_env]}"

        connection.connect()
        sock = connection.sock
        with self.lock:
            self.sockets.add(sock)
            broken_off = self.broken_off
        try:
            if broken_off:
                raise ConnectionAbortedError("broken off")
            sock.settimeout(_left(end))
            connection.request(method, where.path.rstrip("/") + path, payload, headers)
            sock.settimeout(_left(end))
            answer = connection.getresponse()
            return answer.status, _read(answer, sock, end)
        finally:
            with self.lock:
                self.sockets.discard(sock)
            connection.close()

    def allow(self) -> None:
        """Let requests be made again after `abort`."""
        with self.lock:
            self.broken_off = False

    def abort(self) -> None:
        """Break off the requests under way, and those that begin before `allow`: each raises a Fault."""
        with self.lock:
            self.broken_off = True
            sockets = list(self.sockets)
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _connection(where: SplitResult, seconds: float) -> http.client.HTTPConnection:
    assert where.hostname is not None  # by `check_url`
    if where.scheme == "https":
        return http.client.HTTPSConnection(where.hostname, where.port, timeout=seconds)
    return http.client.HTTPConnection(where.hostname, where.port, timeout=seconds)


def _left(end: float) -> float:
    """The seconds until `end`. TimeoutError when there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _read(answer: http.client.HTTPResponse, sock: socket.socket, end: float) -> bytes:
    """The whole body; a timeout of a socket is of each read, so what is left is set before every one."""
    parts = []
    while True:
        sock.settimeout(_left(end))
        part = answer.read1(CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
