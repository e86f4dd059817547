"""A reward server for tests that answers as it is told: byte by byte, too much, wrongly, or not at all."""

import json
import socket
import socketserver
import struct
import threading
import time
import zlib
from contextlib import contextmanager

__all__ = [
    "drip",
    "endless",
    "forever",
    "head",
    "hosting",
    "nothing",
    "rewards",
    "rst",
    "status",
    "text",
    "zipped",
]


class Host:
    """The last reply is given again and again; `seen` holds (path, headers, body) of every request."""

    def __init__(self, *replies):
        self.replies = list(replies) or [rewards()]
        self.seen = []
        self.closing = threading.Event()
        self.connections = 0
        self.lock = threading.Lock()
        self.server = None
        self.port = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/score"

    def next(self, seen):
        with self.lock:
            self.seen.append(seen)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def begin(self):
        self.server = _Server(("127.0.0.1", self.port), type("Handler", (_Handler,), {"host": self}))
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def end(self):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


class _Handler(socketserver.StreamRequestHandler):
    """Reads requests of a kept connection, and lets a reply write what it likes."""

    def handle(self):
        self.host.connections += 1
        try:
            while True:
                line = self.rfile.readline().decode()
                if not line:
                    return
                headers = {}
                while (head := self.rfile.readline().decode().strip()) != "":
                    name, _, value = head.partition(":")
                    headers[name.lower()] = value.strip()
                body = json.loads(self.rfile.read(int(headers["content-length"])))
                reply = self.host.next((line.split()[1], headers, body))
                reply(self.connection, body, self.host.closing)
        except (OSError, ValueError):
            return


def _answer(connection, data, code=200, kind="application/json", **headers):
    lines = [f"HTTP/1.1 {code} X", f"Content-Type: {kind}", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)


def rewards(value=len, **more):
    """`value` of each completion; `more` are further keys of the answer."""

    def reply(connection, body, closing):
        completions = body.get("completions") or body.get("query")
        found = {"rewards": [value(x) for x in completions]}
        found |= {name: make(completions) for name, make in more.items()}
        _answer(connection, json.dumps(found).encode())

    return reply


def text(data, **headers):
    """This text with status 200."""
    return lambda connection, body, closing: _answer(connection, data.encode(), **headers)


def status(code, data="", **headers):
    return lambda connection, body, closing: _answer(connection, data.encode(), code, **headers)


def head(length, data=b""):
    """The head of an answer of this length, and then only this."""
    said = f"HTTP/1.1 200 X\r\nContent-Length: {length}\r\n\r\n".encode()
    return lambda connection, *_: connection.sendall(said + data)


def forever(connection, body, closing):
    """Never answers."""
    closing.wait(30)


def drip(connection, body, closing):
    """A byte of an answer now and then: no single read takes long."""
    connection.sendall(b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n")
    while not closing.wait(0.05):
        connection.sendall(b" ")


def rst(connection, body, closing):
    """Reset the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    raise OSError


def endless(connection, body, closing):
    """Chunks without end."""
    connection.sendall(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not closing.is_set():
        connection.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")


def zipped(size, cut=None, coding="gzip"):
    """Spaces and one reward, `size` bytes of them, zipped to a thousandth; without its end where cut."""
    zip_ = zlib.compressobj(wbits=31)
    data = zip_.compress(b'{"rewards":[1.5],"x":"')
    for _ in range(size >> 20):
        data += zip_.compress(b" " * (1 << 20))
    data += zip_.compress(b'"}') + zip_.flush()
    return lambda connection, body, closing: _answer(connection, data[:cut], Content_Encoding=coding)


def nothing(coding, data):
    """A zipped beginning, and then these bytes without end: blocks of nothing, or after its end."""

    def reply(connection, body, closing):
        connection.sendall(f"HTTP/1.1 200 X\r\nContent-Encoding: {coding}\r\n\r\n".encode() + data[0])
        while not closing.is_set():
            connection.sendall(data[1] * 1000)

    return reply


@contextmanager
def hosting(*scripts):
    """A host for each list of replies."""
    hosts = [Host(*script) for script in scripts]
    for host in hosts:
        host.begin()
    try:
        yield hosts
    finally:
        for host in hosts:
            host.end()


@contextmanager
def within(seconds):
    """The block takes no longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"{took:.2f} s"
