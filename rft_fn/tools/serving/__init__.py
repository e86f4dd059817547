"""Serves a reward over HTTP: one process, many clients, and requests that are scored together.

`serve` runs a server until it is told to stop, and then finishes what it has: `app` speaks HTTP in a thread,
`scoring` holds the requests that wait and computes their rewards in the main thread, where models and time
limits belong.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rft_fn.reward import columns
from rft_fn.reward.combine import Weighted
from rft_fn.tools.serving.jobs import Jobs, Partial, work

__all__ = ["serve"]


_ARRIVAL = 30.0  # s that a request may take to arrive
_AGAIN = 1.0  # s after which another signal stops at once
MISSING = "pip install 'starlette>=1.0' 'uvicorn>=0.34' 'prometheus-client>=0.21'"
LOCAL = ("127.0.0.1", "localhost", "::1")


class Closes(Protocol):
    """A queue that a signal closes."""

    closed: bool


def serve(
    score: Weighted,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str = "",
    rows: int = 256,
    wait: float = 0.002,
    queue: int = 4096,
    max_bytes: int = 1 << 26,
    timeout: float = 300.0,
) -> None:
    """Serve the rewards of `score` at http://HOST:PORT/score, until SIGTERM or SIGINT.

    Requests that arrive together are scored in one call of at most `rows` completions, after `wait` s. Their
    trainers may be at different steps, unless a reward may read `trainer_state`. More than `queue` waiting
    completions are refused with status 429 and a Retry-After. A request may have `max_bytes`, a call may take
    `timeout` s. Every request for rewards must have the token in the environment variable `token_env`, if
    there is one. A signal ends the process once all that was accepted is answered; a second one ends it at
    once. Clients that do not read answers or end requests are cut off after 5 s.

    Raises OSError for an address that cannot be had, and ModuleNotFoundError without the packages of the
    extra `serve`.
    """
    try:
        from rft_fn.tools.serving import app, http
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: {MISSING}", name=error.name) from error

    token = os.environ.get(token_env, "").strip()
    if not token and host not in LOCAL:
        print(f"warning: anybody who reaches {host} may ask: {token_env} is not set", file=sys.stderr)
    listening = listen(host, port)
    where = f"http://{host}:{listening.getsockname()[1]}"

    # HTTP in a thread; rewards here, since their time limits need the main thread
    by_state = any(reward.state for reward, _ in score.components.values())
    jobs = Jobs(queue, by_state=by_state)
    metrics = app.Metrics(jobs)
    rules = http.Rules(max_bytes, _ARRIVAL, token)
    made = app.application(list(score.components), jobs, rules, metrics, columns(score))
    server = http.Server(made, rules)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True, name="rft_fn server")
    with stopping(jobs):
        thread.start()
        print(f"serving {', '.join(score.components)} at {where}/score", flush=True)
        partial = Partial(score.components, specs=score.specs, vetoes=score.vetoes)
        try:
            work(
                jobs,
                partial,
                alive=thread.is_alive,
                observe=metrics.observe,
                rows=rows,
                wait=wait,
                timeout=timeout,
            )
        finally:
            server.should_exit = True
            thread.join()
            partial.close()
    if not jobs.closed:
        raise OSError(f"{where}: the server has ended")
    end = "everything answered"
    if server.cut:
        end += f", but {server.cut} connections whose clients did not read or end a request"
    print(f"{where}: stopped, {end}", flush=True)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise OSError, with the address, if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol named, asyncio sends small answers at once; without it each waits 40 ms
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise OSError(f"{host}:{port}: {error.strerror or error}") from error
    return found


@contextmanager
def stopping(queue: Closes) -> Iterator[None]:
    """Close the queue on a signal inside this context, and end the process on another one."""
    asked: list[float] = []

    def handle(number: int, frame: Any) -> None:
        now = time.monotonic()
        if asked and now - asked[0] > _AGAIN:
            os._exit(128 + number)
        if not asked:
            asked.append(now)
            queue.closed = True
            line = f"{signal.Signals(number).name}: answering what has arrived; again to stop at once\n"
            os.write(2, line.encode())

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
