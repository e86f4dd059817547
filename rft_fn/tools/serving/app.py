"""The HTTP side of a reward server: requests in, rewards out, and everything else refused in one line."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rft_fn.border import contained
from rft_fn.data.row_paths import value_at
from rft_fn.reward import Scored, wire, wire_openrlhf
from rft_fn.reward.wire import Batch
from rft_fn.text import error_text, writable
from rft_fn.tools.serving.http import OneLength, Problem, Rules, arrived, authorize, waited
from rft_fn.tools.serving.jobs import Job, Jobs

__all__ = ["Metrics", "application"]


_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
_LEFT = 499  # nobody is there to read this one


class Metrics:
    """The numbers that /metrics has."""

    def __init__(self, jobs: Jobs):
        self.registry = own = CollectorRegistry()
        self.requests = Counter("rft_reward_requests", "Requests", ["path", "status"], registry=own)
        self.rows = Counter("rft_reward_completions", "Completions that were scored", registry=own)
        self.seconds = Histogram(
            "rft_reward_request_seconds", "Time of a request that was scored", registry=own
        )
        self.calls = Histogram(
            "rft_reward_call_completions", "Completions of a call of the reward", buckets=_ROWS, registry=own
        )
        Gauge("rft_reward_waiting", "Completions that wait", registry=own).set_function(jobs.rows)

    def observe(self, rows: int) -> None:
        """Count a call of the reward."""
        self.rows.inc(rows)
        self.calls.observe(rows)


class Read(Protocol):
    """Reads a request."""

    def __call__(self, data: bytes, /) -> Batch:
        """Return the batch; raise ValueError for anything else."""
        ...


class Write(Protocol):
    """Writes an answer."""

    def __call__(self, scored: Scored, /) -> bytes:
        """Return the body."""
        ...


def application(
    names: Sequence[str], jobs: Jobs, rules: Rules, metrics: Metrics, columns: Sequence[str] = ()
) -> Starlette:
    """Return the application: /score, /get_reward (OpenRLHF's), /health and /metrics.

    `names` are the rewards, `columns` those that they cannot do without.
    """

    def scores(read: Read, write: Write) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            began = time.monotonic()
            response = await _answered(request, read, write, jobs, rules, columns)
            if response.status_code == 200:
                metrics.seconds.observe(time.monotonic() - began)
            metrics.requests.labels(request.url.path, response.status_code).inc()
            return response

        return endpoint

    async def health(request: Request) -> Response:
        found = {"status": "ok", "rewards": list(names), "waiting": jobs.rows()}
        if jobs.closed:
            return JSONResponse(found | {"status": "stopping"}, 503)
        return JSONResponse(found)

    async def numbers(request: Request) -> Response:
        return PlainTextResponse(generate_latest(metrics.registry))

    return Starlette(
        middleware=[Middleware(OneLength)],
        routes=[
            Route("/score", scores(wire.read_request, wire.answer), methods=["POST"]),
            Route(
                "/get_reward", scores(wire_openrlhf.read_openrlhf_request, _openrlhf_answer), methods=["POST"]
            ),
            Route("/health", health),
            Route("/metrics", numbers),
        ],
    )


def _openrlhf_answer(scored: Scored) -> bytes:
    return wire_openrlhf.openrlhf_answer(
        scored.total, {**scored.parts, **wire.logs_of(scored, scored.metrics)}
    )


async def _answered(
    request: Request, read: Read, write: Write, jobs: Jobs, rules: Rules, columns: Sequence[str]
) -> Response:
    """Return the rewards of a request, or why it has none."""
    try:
        scored = await _scored(request, read, jobs, rules, columns)
        return Response(_written(scored, write), media_type="application/json")
    except Problem as problem:
        body = {"error": writable(" ".join(str(problem).split()))}
        return JSONResponse(body, problem.status, problem.headers)
    except ClientDisconnect:
        return Response(status_code=_LEFT)


def _written(scored: Scored, write: Write) -> bytes:
    """Return the body of an answer; raise Problem for values of a reward that JSON cannot hold."""
    try:
        return write(scored)
    except BaseException as error:  # of the values' own code
        raise Problem(422, _named(contained(error))) from error


async def _scored(request: Request, read: Read, jobs: Jobs, rules: Rules, columns: Sequence[str]) -> Scored:
    """Return the rewards of a request; raise Problem if it is refused or a reward fails."""
    authorize(request, rules)
    _check_open(jobs)
    data = await arrived(request, rules)
    try:
        batch = read(data)
        _check_columns(batch, columns)
    except (ValueError, RecursionError) as error:
        raise Problem(400, str(error)) from None

    # into the queue, or back to the client
    job = Job(batch)
    if not jobs.put(job):
        _check_open(jobs)
        raise Problem(
            429, f"expected at most {jobs.limit} completions to wait", Retry_After=str(jobs.patience())
        )
    return await _result(request, job, jobs)


def _check_open(jobs: Jobs) -> None:
    """Raise Problem for a server that is about to stop."""
    if jobs.closed:
        raise Problem(503, "the server is stopping", Retry_After="1", Connection="close")


def _check_columns(batch: Batch, columns: Sequence[str]) -> None:
    """Raise ValueError for a missing column that the reward cannot do without."""
    first = {name: column[0] for name, column in batch.columns.items()}
    for path in columns:
        if value_at(first, path, None) is None:
            known = ", ".join(batch.columns) or "none"
            raise ValueError(f"columns: the reward reads {path!r}, which is not among those sent: {known}")


async def _result(request: Request, job: Job, jobs: Jobs) -> Scored:
    """Return the rewards of a request that waits; forget it if its client leaves."""
    found = asyncio.wrap_future(job.future)
    try:
        await waited(request, found)
        return found.result()
    except ClientDisconnect:
        jobs.drop(job)
        raise
    except TimeoutError as error:
        raise Problem(504, error_text(error)) from error
    except OSError as error:  # of a reward that asks others
        raise Problem(502, _named(error)) from error
    except Exception as error:
        raise Problem(422, _named(error)) from error


def _named(error: Exception) -> str:
    """Return what a reward raised, with its name, which is in the notes."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    line = f"{type(error).__name__}: {error_text(error)}"
    if notes:
        line += f" ({notes})"
    return line
