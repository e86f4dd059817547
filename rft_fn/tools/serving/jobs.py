"""Requests that wait for their rewards: which are scored together, and by what."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rft_fn.border import contained
from rft_fn.engine.time_limit import time_limit
from rft_fn.reward import Scored
from rft_fn.reward.combine import Weighted
from rft_fn.reward.reward_record import taken
from rft_fn.reward.wire import Batch
from rft_fn.tools.serving.http_texts import joint_values

__all__ = ["Job", "Jobs", "Partial", "join", "rows_of", "score_jobs", "work"]


POLL = 0.1  # s between looks at what a signal may have changed
_LONGEST = 30  # s that a client is asked to wait
_MEMORY = 0.8  # share of the old speed in the new one


class Job:
    """One request: its completions, and the rewards that it will have."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.rows = len(batch.completions)
        self.future: Future[Scored] = Future()

    def key(self, *, by_state: bool) -> Hashable:
        """Return a key, equal for requests that one call may score: same arguments in the same form.

        Requests from different steps of runs have the same key unless `by_state`.
        """
        forms = isinstance(self.batch.prompts[0], str), isinstance(self.batch.completions[0], str)
        state = self.batch.state if by_state else None
        return forms, frozenset(self.batch.columns), frozenset(self.batch.given), state


class Jobs:
    """A queue with a limit: one thread puts requests, another one takes them."""

    def __init__(self, limit: int, *, by_state: bool = True):
        self.limit = limit  # completions that may wait
        self.by_state = by_state  # requests are taken together only where their trainers are at one step
        self.closed = False  # set by a signal, so without a lock
        self.speed = 0.0  # completions per s
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()

    def rows(self) -> int:
        """Return the number of completions that wait."""
        with self._changed:
            return self._rows()

    def _rows(self) -> int:
        return sum(job.rows for job in self._waiting)

    def put(self, job: Job) -> bool:
        """Add a request, and return whether there was room; an empty queue takes one of any size."""
        with self._changed:
            if self.closed or (self._waiting and self._rows() + job.rows > self.limit):
                return False
            self._waiting.append(job)
            self._changed.notify()
            return True

    def drop(self, job: Job) -> None:
        """Forget a request after its client has left."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def take(self, most: int, seconds: float) -> list[Job]:
        """Take the oldest request, and all that go with it, up to `most` completions.

        Waits `seconds` for more after the first one. Returns an empty list after a short while without any.
        """
        with self._changed:
            if not self._waiting:
                self._changed.wait(POLL)
            end = time.monotonic() + seconds
            while self._waiting and self._rows() < most and time.monotonic() < end and not self.closed:
                self._changed.wait(end - time.monotonic())
            return self._first(most)

    def _first(self, most: int) -> list[Job]:
        found: list[Job] = []
        rows = 0
        for job in list(self._waiting):
            if found and (rows + job.rows > most or self._key(job) != self._key(found[0])):
                continue
            found.append(job)
            rows += job.rows
            self._waiting.remove(job)
            if rows >= most:
                break
        return found

    def _key(self, job: Job) -> Hashable:
        return job.key(by_state=self.by_state)

    def done(self, rows: int, seconds: float) -> None:
        """Remember how long a call took."""
        now = rows / max(seconds, 1e-6)
        if not self.speed:
            self.speed = now
        self.speed = _MEMORY * self.speed + (1 - _MEMORY) * now

    def patience(self) -> int:
        """Return the seconds after which a refused client should retry."""
        if not self.speed:
            return 1
        return min(max(math.ceil(self.rows() / self.speed), 1), _LONGEST)


def join(batches: Sequence[Batch]) -> Batch:
    """Join the rows of batches with the same key, in order; take the state from the first."""
    first = batches[0]
    columns = {name: [x for b in batches for x in b.columns[name]] for name in first.columns}
    given = {name: [x for b in batches for x in b.given[name]] for name in first.given}
    prompts = [x for b in batches for x in b.prompts]
    completions = [x for b in batches for x in b.completions]
    if "groups" in given:  # groups of two requests differ, even with the same number
        both = [(i, group) for i, b in enumerate(batches) for group in b.given["groups"]]
        number = {group: i for i, group in enumerate(dict.fromkeys(both))}
        given["groups"] = [number[group] for group in both]
    return Batch(prompts, completions, columns, given, first.state)


class Partial(Weighted):
    """A weighted sum that is NaN, and no error, for rows to which no part applies.

    The trainer that asks may have other rewards for them.
    """

    def _total(
        self, parts: Mapping[str, Tensor], weights: Mapping[str, Tensor], prompts: Sequence[Any]
    ) -> Tensor:
        nothing = torch.stack(list(parts.values())).isnan().all(0)
        filled = {name: torch.where(nothing, 0.0, x) for name, x in parts.items()}
        return torch.where(nothing, math.nan, super()._total(filled, weights, prompts))


def work(
    jobs: Jobs,
    score: Any,
    *,
    rows: int,
    wait: float,
    timeout: float,
    alive: Callable[[], bool],
    observe: Callable[[int], None],
) -> None:
    """Score what waits, until the queue is closed and empty, or nobody is alive who fills it.

    `rows` is the most completions of a call that several requests share, `wait` the time in s to wait for
    more of them, and `timeout` the limit of a call in s. `observe` is told the completions of each call.
    """
    while alive():
        found = jobs.take(rows, wait)
        if not found and jobs.closed:
            return
        found = [job for job in found if job.future.set_running_or_notify_cancel()]
        if found:
            began = time.monotonic()
            score_jobs(score, found, timeout)
            count = sum(job.rows for job in found)
            jobs.done(count, time.monotonic() - began)
            observe(count)


def score_jobs(score: Any, found: Sequence[Job], timeout: float) -> None:
    """Give each request its rewards, or its error.

    A call for several requests that fails is made again for each request.
    """
    try:
        scored = _score(score, join([job.batch for job in found]), timeout)
    except BaseException as error:  # no reward ends the server; a signal only closes the queue
        if len(found) == 1:
            found[0].future.set_exception(contained(error))
            return
        for job in found:
            score_jobs(score, [job], timeout)
        return

    start = 0
    for job in found:
        job.future.set_result(rows_of(scored, slice(start, start + job.rows)))
        start += job.rows


def _score(score: Any, batch: Batch, timeout: float) -> Scored:
    """Return the rewards of a batch; raise TimeoutError beyond the limit."""

    def name() -> str:
        return f"reward {getattr(score, 'running', '')!r}"

    given: dict[str, Any] = {**batch.given, "trainer_state": batch.state}
    given["known"] = partial(joint_values, score, batch)
    with time_limit(timeout, name):
        return score(batch.prompts, batch.completions, batch.columns, **taken(score, given))


def rows_of(scored: Scored, part: slice) -> Scored:
    """Return the rewards of some of the completions."""
    return Scored(
        scored.total[part],
        {name: x[part] for name, x in scored.parts.items()},
        {name: x[part] for name, x in scored.metrics.items()},
        {name: x[part] for name, x in scored.extra.items()},
    )
