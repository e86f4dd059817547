"""Requests for responses that wait, from any thread, and are sampled together."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from rft_fn.engine.requests import BadPrompt
from rft_fn.types import Engine, Sampling

__all__ = ["Answer", "Call", "Calls", "answer"]


class Answer(NamedTuple):
    """A sampled response."""

    tokens: list[int]
    logp: list[float]  # of each token
    version: int  # of the weights
    cut: bool  # by its limit
    routing: Tensor | None = None  # [S, M, k] of all tokens up to its end, as of a rollout
    kept: Tensor | None = None  # [n, W] of its own tokens, as of a rollout


class Call(NamedTuple):
    """A response that is wanted."""

    ids: list[int]  # the prompt
    key: int  # of its draws
    sampling: Sampling
    future: Future[Answer]


class Calls:
    """A queue with a limit: threads put calls, the one that has the engine takes them."""

    def __init__(self, most: int):
        self.most = most  # that may wait
        self.closed = False  # set by a signal, so without a lock
        self._waiting: deque[Call] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, ids: list[int], key: int, sampling: Sampling) -> Future[Answer] | None:
        """Add a call, and return where its answer will be; None where there is no room."""
        call = Call(ids, key, sampling, Future())
        with self._changed:
            if self.closed or len(self._waiting) >= self.most:
                return None
            self._waiting.append(call)
            self._changed.notify()
        return call.future

    def take(self, most: int, *, wait: float, more: float = 0.0) -> list[Call]:
        """Take the oldest call and those that go with it, at most `most`; [] after `wait` s without any.

        Calls that differ in no more than their limits and temperatures go together. After the first one,
        others have `more` s to come.
        """
        with self._changed:
            if not self._waiting:
                self._changed.wait(wait)
            end = time.monotonic() + more
            while self._waiting and len(self._waiting) < most and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            found: list[Call] = []
            for call in list(self._waiting):
                if len(found) < most and (not found or _together(call.sampling, found[0].sampling)):
                    found.append(call)
                    self._waiting.remove(call)
        return [call for call in found if call.future.set_running_or_notify_cancel()]


def _together(a: Sampling, b: Sampling) -> bool:
    return replace(a, max_new=b.max_new, temperature=b.temperature) == b


def answer(engine: Engine, calls: Sequence[Call]) -> list[Call]:
    """Sample the responses of calls together, answer each, and return the calls that are left.

    None is left, unless the engine refuses the prompt of one: that one has its error, and the others wait to
    be sampled. Any other exception is every call's, and is raised. On several ranks all of them call this
    together, also with no calls.
    """
    most = max((call.sampling.max_new for call in calls), default=1)
    first = calls[0].sampling if calls else Sampling()
    warmths = [call.sampling.temperature for call in calls]
    try:
        rollout = engine.generate(
            [call.ids for call in calls],
            [call.key for call in calls],
            n=1,
            sampling=replace(first, max_new=most),
            max_new=[call.sampling.max_new for call in calls],
            temperature=warmths if len(set(warmths)) > 1 else None,
        )
    except BadPrompt as error:
        calls[error.number].future.set_exception(error)
        return [call for i, call in enumerate(calls) if i != error.number]
    except BaseException as error:
        for call in calls:
            call.future.set_exception(error)
        raise
    for b, call in enumerate(calls):
        new = slice(len(call.ids), int(rollout.length[b]))
        call.future.set_result(
            Answer(
                rollout.tokens[b, new].tolist(),
                rollout.logp[b, new].tolist(),
                int(rollout.version[b]),
                bool(rollout.truncated[b]),
                None if rollout.routing is None else rollout.routing[b, : new.stop],
                None if rollout.kept is None else rollout.kept[b, new],
            )
        )
    return []
