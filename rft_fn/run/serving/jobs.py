"""The requests that wait for their rewards, and which of them are scored together."""

import math
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future

from rft_fn.reward import Scored
from rft_fn.reward.remote.protocol import Batch

__all__ = ["Job", "Jobs", "join"]

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
        """Equal for requests that may be scored in one call: the same arguments in the same form.

        Those of different steps of runs have the same key unless `by_state`.
        """
        forms = isinstance(self.batch.prompts[0], str), isinstance(self.batch.completions[0], str)
        state = None
        if by_state:
            state = self.batch.state
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
        """The completions that wait."""
        with self._changed:
            return self._rows()

    def _rows(self) -> int:
        return sum(job.rows for job in self._waiting)

    def put(self, job: Job) -> bool:
        """Whether there was room for the request; an empty queue takes one of any size."""
        with self._changed:
            if self.closed or (self._waiting and self._rows() + job.rows > self.limit):
                return False
            self._waiting.append(job)
            self._changed.notify()
            return True

    def drop(self, job: Job) -> None:
        """Forget a request whose client has left."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def take(self, most: int, seconds: float) -> list[Job]:
        """The oldest request, and those that go with it, up to `most` completions.

        Waits `seconds` for more after the first one. Empty after a short while without any.
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
        """The seconds after which a client that was refused should come again."""
        if not self.speed:
            return 1
        return min(max(math.ceil(self.rows() / self.speed), 1), _LONGEST)


def join(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches, which have the same key, in order; the state is that of the first."""
    first = batches[0]
    columns = {name: [x for b in batches for x in b.columns[name]] for name in first.columns}
    given = {name: [x for b in batches for x in b.given[name]] for name in first.given}
    prompts = [x for b in batches for x in b.prompts]
    completions = [x for b in batches for x in b.completions]
    if "groups" in given:  # those of two requests are two, whatever their numbers
        both = [(i, group) for i, b in enumerate(batches) for group in b.given["groups"]]
        number = {group: i for i, group in enumerate(dict.fromkeys(both))}
        given["groups"] = [number[group] for group in both]
    return Batch(prompts, completions, columns, given, first.state)
