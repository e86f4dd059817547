"""The client's deadlines and errors, and the pool's way with servers that fail."""

import gc
import json
import os
import socket
import threading
import time
import zlib
from contextlib import contextmanager, suppress

import pytest
from each_case import each

from rft_fn import patience
from rft_fn.engine import pool
from rft_fn.engine.server_protocol import Client, Fault, Refused


@contextmanager
def raw(serve):
    """The address of a socket on which serve(connection) answers each connection, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def is_whole(request):
    """Whether the head of a request has come, and as much of its body as that says."""
    head, end, body = request.partition(b"\r\n\r\n")
    lines = [x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")]
    return bool(end) and all(len(body) >= int(x.split(b":")[1]) for x in lines)


def request_of(connection):
    """The request, whole: bytes that nobody read would reset the connection at its close."""
    got = b""
    while not is_whole(got):
        part = connection.recv(65536)
        if not part:
            break
        got += part
    return got


def answering(text, status="200 OK", asked=None):
    """Reads one request, and answers it; nothing where the client leaves before."""

    def serve(connection):
        got = request_of(connection)
        if not is_whole(got):
            return
        head, _, body = got.partition(b"\r\n\r\n")
        if asked is not None:
            asked.append((head.decode(), body))
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        connection.close()

    return serve


def test_a_connection_that_the_server_has_closed_is_no_fault():
    """Each one answers once, and closes when it is asked again: the second request takes a new one."""
    opened = []

    def once(connection):
        opened.append(connection)
        request_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7")
        request_of(connection)
        connection.close()

    client = Client()
    with raw(once) as url:
        assert [client.call(url, "/y", seconds=5) for _ in range(3)] == [7, 7, 7]
    assert len(opened) == 3


def test_a_call_is_a_post_of_json_with_the_key(monkeypatch):
    monkeypatch.setenv("RFT_SERVER_KEY", "secret")
    asked = []
    with raw(answering(b'{"a": [1]}', asked=asked)) as url:
        assert Client().call(url + "/base/", "/x", {"b": 2}, seconds=5) == {"a": [1]}
        assert Client().call(url, "/y", seconds=5) == {"a": [1]}
    head, body = asked[0]
    assert head.startswith("POST /base/x HTTP/1.1") and json.loads(body) == {"b": 2}
    assert "Authorization: Bearer secret" in head
    assert asked[1][0].startswith("GET /y HTTP/1.1")


@pytest.mark.parametrize(
    ("text", "status", "kind", "line"),
    [
        (b"<html>", "200 OK", Fault, r"^/x: expected JSON, got '<html>'$"),
        (b"out\nof memory", "500 Oh", Fault, r"^/x: status 500: out of memory$"),
        (b"busy", "429 Busy", Fault, r"^/x: status 429: busy$"),
        (b'{"detail": "no"}', "404 No", Refused, r'^/x: status 404: {"detail": "no"}$'),
        (b"too long", "400 No", Refused, r"^/x: status 400: too long$"),
    ],
)
def test_what_is_no_answer_is_said_in_one_line(text, status, kind, line):
    with raw(answering(text, status)) as url, pytest.raises(kind, match=line):
        Client().call(url, "/x", {}, seconds=5)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Fault, match=r"^/x: ConnectError: "):
        Client().call(f"http://127.0.0.1:{port}", "/x", seconds=5)


def hangs(connection):
    connection.recv(65536)
    time.sleep(20)


def trickles(connection):
    """Each byte comes well within any timeout of a socket."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
    for _ in range(400):
        try:
            connection.sendall(b" ")
        except OSError:
            return
        time.sleep(0.05)


@pytest.mark.parametrize("serve", [hangs, trickles])
def test_a_deadline_is_of_the_whole_answer(serve):
    with raw(serve) as url:
        began = time.monotonic()
        with pytest.raises(Fault, match=r"^/x: no answer within 0.5 s$"):
            Client().call(url, "/x", {}, seconds=0.5)
        assert time.monotonic() - began < 3


def test_requests_under_way_can_be_broken_off():
    client = Client()
    with raw(hangs) as url:
        threading.Timer(0.2, client.abort).start()
        began = time.monotonic()
        with pytest.raises(Fault, match="/x: "):
            client.call(url, "/x", {}, seconds=15)
        assert time.monotonic() - began < 5
    assert not client.tasks
    with raw(answering(b"1")) as url:
        with pytest.raises(Fault, match="broken off"):
            client.call(url, "/x", seconds=5)
        client.allow()
        assert client.call(url, "/x", seconds=5) == 1


def keeps(connections):
    """Answers every request on a connection with the number of connections so far."""

    def serve(connection):
        connections.append(connection)
        with connection, suppress(OSError):
            while is_whole(request_of(connection)):
                text = b"%d" % len(connections)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)

    return serve


def wait_for(holds, seconds=5):
    """Whether something holds within some time."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def test_requests_of_a_client_share_its_connections():
    """One after the other on one connection, those at a time on as many."""
    connections, client = [], Client()
    with raw(keeps(connections)) as url:
        assert [client.call(url, "/x", {"i": i}, seconds=5) for i in range(5)] == [1] * 5
        servers = pool.Pool([url], client, name="test", width=3, revive=lambda url: None)
        servers.run([lambda url: client.call(url, "/x", {}, seconds=5)] * 30)
    assert len(connections) <= 3
    client = servers = None
    gc.collect()  # a client that nobody has any more closes them
    assert wait_for(lambda: all(connection.fileno() < 0 for connection in connections))


@each("url", ["localhost:8000", "ftp://a:1", "http://", "http://a:b", "http://a:0", "http:/a:8000"])
def test_an_address_that_is_none(url):
    with pytest.raises(ValueError, match=f"^engine_servers: expected addresses like .*got {url!r}$"):
        pool.check_url(url)


SECRET = "sk-4711/of-many-characters"


@pytest.mark.parametrize("given", [f"{SECRET}\n", f" {SECRET}\r\n", f"\t{SECRET}"])
def test_a_key_has_no_blanks_around_it(given, monkeypatch):
    monkeypatch.setenv("MINE", given)
    asked = []
    with raw(answering(b"1", asked=asked)) as url:
        assert Client("MINE").call(url, "/x", seconds=5) == 1
    assert f"Authorization: Bearer {SECRET}" in asked[0][0].split("\r\n")


@pytest.mark.parametrize("given", [f"{SECRET}\nX-Other: 1", f"{SECRET}\0", f"{SECRET}\u00fc", f"a\r{SECRET}"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(given, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"MINE": given})  # some can be in no process's own
    asked = []
    line = r"^MINE: expected a token of printable ASCII characters$"
    with raw(answering(b"1", asked=asked)) as url, pytest.raises(ValueError, match=line):
        Client("MINE").call(url, "/x", seconds=5)
    assert not asked


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"no such key: {SECRET}", "401 No"),
        (f"{'x' * 285} {SECRET}", "401 No"),  # cut in the middle of it
        (f"{' ' * 4080}{SECRET}", "401 No"),
        (json.dumps({"key": SECRET}).replace("/", "%2F"), "403 No"),
        (f"oh {SECRET}", "500 Oh"),
        (f"oh {SECRET}", "302 Other"),
        (f"<html> {SECRET}", "200 OK"),
        (f"<html> {'x' * 40}{SECRET}", "200 OK"),
        (json.dumps([SECRET]) + "]", "200 OK"),
        ("", f"401 {SECRET}"),
        ("", f"{SECRET}"),
    ],
)
def test_a_server_that_repeats_the_key_is_quoted_without_it(text, status, monkeypatch):
    monkeypatch.setenv("MINE", SECRET)
    client = Client("MINE")
    with raw(answering(text.encode(), status)) as url, pytest.raises((Fault, Refused)) as found:
        client.call(url, "/x", {}, seconds=5)
    line = client.line(found.value)
    assert line.startswith("/x: ") and "\n" not in line and len(line) <= 400
    assert SECRET[:8] not in line and SECRET[-8:] not in line


def saying(*parts, pause=0.0):
    """Reads a request, sends these bytes, the last of them again and again, until nobody reads them."""

    def serve(connection):
        request_of(connection)
        end = time.monotonic() + 10
        with connection, suppress(OSError):
            for part in parts[:-1]:
                connection.sendall(part)
            while parts[-1] and time.monotonic() < end:
                connection.sendall(parts[-1])
                time.sleep(pause)

    return serve


def zipped(size, after=b""):
    """The beginning of an answer of so many MB of zeros, zipped; then these bytes."""
    zip_ = zlib.compressobj(wbits=31)
    data = b"".join(zip_.compress(bytes(1 << 20)) for _ in range(size)) + zip_.flush()
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
    return saying(head + data, after)


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LATE = "no answer within 0.7 s"
LARGE = "expected an answer of at most 1048576 bytes, got"
HOSTILE = {
    "a head that drips": (saying(OK, b"X-A: b\r\n", pause=0.05), LATE),
    "a line that drips": (saying(OK + b"X-A: ", b"b", pause=0.05), LATE),
    "Continue, slowly": (saying(b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.05), LATE),
    "Continue, at full speed": (saying(b"HTTP/1.1 100 Continue\r\n\r\n" * 100), LATE),
    "a head without end": (saying(OK, b"X-A: " + b"b" * 1000 + b"\r\n"), "RemoteProtocolError"),
    "a line without end": (saying(OK + b"X-A: ", b"b" * 10_000), "RemoteProtocolError"),
    "chunks without end": (saying(CHUNKED, b"10000\r\n" + bytes(1 << 16) + b"\r\n"), f"{LARGE} more"),
    "a body without end": (saying(OK + b"\r\n", bytes(1 << 16)), f"{LARGE} more"),
    "chunks that drip": (saying(CHUNKED, b"1\r\n1\r\n", pause=0.05), LATE),
    "100 GB": (saying(OK + b"Content-Length: 100000000000\r\n\r\n", b""), f"{LARGE} one of 100000000000"),
    "a short body": (saying(OK + b"Content-Length: 99\r\n\r\n[1]", b""), "RemoteProtocolError"),
    "a chunk that breaks off": (saying(CHUNKED + b"99\r\n[1]", b""), "RemoteProtocolError"),
    "a bomb": (zipped(100), f"{LARGE} more"),
    "a zipped answer that goes on": (zipped(1, bytes(1 << 16)), f"{LARGE} more"),
    "an error without end": (saying(b"HTTP/1.1 500 Oh\r\n\r\n", b"oh " * 1000), "status 500: oh oh"),
    "no http": (saying(b"hello\r\n\r\n" * 9, b""), "RemoteProtocolError"),
    "nothing": (saying(b"", b""), "RemoteProtocolError"),
    "two lengths": (saying(OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n1", b""), "RemoteProtocol"),
    "a length below 0": (saying(OK + b"Content-Length: -1\r\n\r\n1", b""), "RemoteProtocolError"),
    "another protocol": (saying(b"HTTP/1.1 101 Go\r\nUpgrade: x\r\n\r\n", b""), "RemoteProtocolError"),
    "elsewhere": (saying(b"HTTP/1.1 302 Go\r\nLocation: http://10.0.0.1/\r\n\r\n", b""), "status 302"),
    "brackets": (answering(b"[" * 100_000), "brackets nest deeper than 100"),
    "closed brackets": (answering(b"[" * 900 + b"]" * 900), "brackets nest deeper than 100"),
    "infinity": (answering(b'{"a": [Infinity]}'), "expected finite numbers, got Infinity"),
    "nan": (answering(b"NaN"), "expected finite numbers, got NaN"),
    "digits": (answering(b"1" * 5000), "4300 digits"),
    "not utf-8": (answering(b'"\xff\xfe"'), "expected JSON, got"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_server_is_a_fault_within_the_deadline(what, recwarn):
    serve, line = HOSTILE[what]
    client = Client()
    client.trusted  # noqa: B018, which takes a while to read
    with raw(serve) as url:
        began = time.monotonic()
        with pytest.raises(Fault, match=rf"^/x: .*{line}") as found:
            client.call(url, "/x", {}, seconds=0.7)
        assert time.monotonic() - began < 3
    assert "\n" not in str(found.value) and len(str(found.value)) < 500 and not recwarn.list


def test_the_limit_of_an_answer_grows_with_the_tokens_that_it_is_about():
    text = json.dumps("x" * (1 << 21)).encode()
    with raw(answering(text)) as url:
        with pytest.raises(Fault, match=r"at most 1049600 bytes, got one of 2097154$"):
            Client().call(url, "/x", {}, seconds=5, tokens=1)
        assert len(Client().call(url, "/x", {}, seconds=5, tokens=1025)) == 1 << 21


def test_cookies_and_times_of_no_calendar_are_no_news(recwarn):
    year = b"9" * 23
    head = b"Set-Cookie: a=b; expires=Wed, 21 Oct %s 07:28:00 GMT; Max-Age=%s\r\nRetry-After: %s\r\n"
    with raw(saying(OK + head % (year, year, year) + b"Content-Length: 1\r\n\r\n1", b"")) as url:
        assert Client().call(url, "/x", {}, seconds=5) == 1
    assert not recwarn.list


def pool_of(*names, revive=lambda url: None, width=2, pause=0.001):
    return pool.Pool(names, Client(), name="test", width=width, revive=revive, pause=pause)


def test_results_are_in_the_order_of_the_jobs_and_servers_share_them():
    seen = {}

    def job(i):
        def run(url):
            time.sleep(0.01 * (i % 3))
            seen.setdefault(url, []).append(i)
            return i

        return run

    assert pool_of("a", "b").run([job(i) for i in range(40)]) == list(range(40))
    assert set(seen) == {"a", "b"} and min(map(len, seen.values())) >= 10


def test_no_more_than_width_at_a_time_on_one_server():
    lock, busy, most = threading.Lock(), {}, {}

    def run(url):
        with lock:
            busy[url] = busy.get(url, 0) + 1
            most[url] = max(most.get(url, 0), busy[url])
        time.sleep(0.01)
        with lock:
            busy[url] -= 1

    pool_of("a", "b", width=3).run([run] * 30)
    assert most == {"a": 3, "b": 3}


def test_jobs_move_away_from_a_server_that_fails():
    asked = []

    def run(url):
        asked.append(url)
        if url == "a":
            raise Fault("broken")
        return url

    servers = pool_of("a", "b", revive=lambda url: (_ for _ in ()).throw(Fault("still broken")))
    assert servers.run([run] * 30) == ["b"] * 30
    assert asked.count("a") <= 2  # those that were under way when it failed first
    assert servers.working() == ["b"] and servers.reasons() == "a: broken"


def test_a_server_that_is_well_again_is_used_again():
    broken = {"a"}

    def run(url):
        if url in broken:
            raise Fault("broken")
        time.sleep(0.002)
        return url

    def revive(url):
        if url in broken:
            raise Fault("still broken")

    servers = pool_of("a", "b", revive=revive)
    servers.run([run] * 8)
    assert servers.working() == ["b"]
    broken.clear()
    time.sleep(0.01)
    assert "a" in servers.run([run] * 30) and servers.working() == ["a", "b"]


def test_when_none_works_all_are_tried_again_for_some_rounds():
    """One thread does, whatever the number of jobs: they do not add up."""
    tried = []

    def revive(url):
        tried.append(url)
        raise Fault("still down")

    def run(url):
        raise Fault("down")

    servers = pool_of("a", "b", revive=revive, width=8)
    with pytest.raises(pool.ServersFailed, match=r"^engine test: expected one of 2 servers .*, got none"):
        servers.run([run] * 50)
    while any(t.name.startswith("servers") for t in threading.enumerate()):
        time.sleep(0.01)
    assert tried.count("a") == tried.count("b") == pool.ROUNDS


def test_a_request_that_no_server_answers_is_given_up():
    """Servers that are well, but for it: each attempt finds them revived."""
    attempts = []

    def run(url):
        attempts.append(url)
        raise Fault("this one never")

    with pytest.raises(
        pool.ServersFailed, match=r"^engine test: expected .* 5 attempts, got none; the last: "
    ):
        pool_of("a", "b").run([run])
    assert len(attempts) == pool.ATTEMPTS


def test_what_one_server_refuses_is_asked_of_one_other():
    asked = []

    def run(url):
        asked.append(url)
        if url in deaf:
            raise Refused("status 404: no such path")
        return url

    deaf = {"a"}
    servers = pool_of("a", "b", "c", width=1, revive=lambda url: (_ for _ in ()).throw(Fault("deaf")))
    assert set(servers.run([run] * 12)) <= {"b", "c"} and servers.reasons() in (
        "a: status 404: no such path",
        "",
    )
    deaf |= {"b", "c"}
    asked.clear()
    with pytest.raises(Refused, match=r"^status 404"):
        pool_of("a", "b", "c").run([run])
    assert len(set(asked)) == len(asked) == 2
    with pytest.raises(Refused, match=r"^status 404"):
        pool_of("a").run([run])


def test_pauses_double_have_jitter_and_an_end():
    servers = pool_of("a", pause=1.0)
    for attempt in range(12):
        found = {servers._length(attempt) for _ in range(50)}
        most = min(2**attempt, patience.MOST)
        assert most / 2 <= min(found) < max(found) <= most


def test_an_error_of_the_caller_ends_all_jobs_at_once():
    def run(i):
        def job(url):
            if i == 3:
                raise KeyError("mistake")
            threading.Event().wait(0.05)
            done.append(i)

        return job

    done = []
    with pytest.raises(KeyError, match="mistake"):
        pool_of("a").run([run(i) for i in range(400)])
    assert len(done) < 20


def test_each_asks_all_servers_and_needs_one():
    def job(url):
        if url in down:
            raise Fault(f"{url} is down")
        return url.upper()

    servers = pool_of("a", "b")
    down = {"a"}
    assert servers.each(job) == {"b": "B"} and servers.working() == ["b"]
    down = set()
    assert servers.each(job) == {"a": "A", "b": "B"} and servers.working() == ["a", "b"]
    down = {"a", "b"}
    with pytest.raises(pool.ServersFailed, match=r"^engine test: a: a is down; b: b is down$"):
        servers.each(job)
