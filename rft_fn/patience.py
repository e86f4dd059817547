"""How long a server is asked again: which failures may pass, waits between attempts, and their end.

Rewards, engines and teachers on servers share it. A wait doubles from one failure to the next and has a
random part, so that clients that failed together come back one by one. A server that says when to come again
is taken at its word (Retry-After), up to the deadline.
"""

import email.utils
import math
import random
import time
from datetime import UTC, datetime

__all__ = ["DEADLINE", "FIRST", "MOST", "TRIES", "Patience", "may_pass", "pause", "retry_after"]


FIRST = 0.5  # s: the longest wait after a first failure
MOST = 30.0  # s: the longest of all, unless a server asks for a longer one
TRIES = 8  # of a question, without those that the server itself put off
DEADLINE = 240.0  # s: from a first failure to the last attempt

_AGAIN = (408, 425, 429)  # below 500, statuses that a later request may not meet
_FAILED = 500


def may_pass(status: int) -> bool:
    """Return whether a later request may not meet this status of an answer."""
    return status >= _FAILED or status in _AGAIN


def pause(failures: int, draw: float, asked: float | None = None, *, first: float = FIRST) -> float:
    """Return the wait in s after so many failures in a row, for a uniform draw in [0, 1).

        (1 + draw) / 2 * min(MOST, first * 2^(failures - 1))

    Where the server asked for a wait it is that one, and no shorter than after a first failure.
    """
    doublings = min(failures - 1, 32) if asked is None else 0  # 32 is far beyond MOST
    return max((1 + draw) / 2 * min(MOST, first * 2.0**doublings), asked or 0.0)


def retry_after(text: str) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or a date; else None."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # no date, or one of a year that there is not
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


class Patience:
    """The patience with one question: it begins with the first failure."""

    def __init__(self, *, tries: int = TRIES, deadline: float = DEADLINE, first: float = FIRST):
        self.tries = tries
        self.deadline = deadline
        self.first = first
        self.failures = 0  # so far
        self._counted = 0  # of them, those that the server did not put off
        self._end = math.inf  # of the monotonic clock
        self._jitter = random.Random()  # not the run's: it moves waits, and no result

    def wait(self, asked: float | None = None) -> float | None:
        """Return the wait in s before the next attempt, after a failure; None where there is no next one.

        `asked` is the wait that the server asks for, by `retry_after`; such a failure uses up no try.
        """
        now = time.monotonic()
        if not self.failures:
            self._end = now + self.deadline
        self.failures += 1
        self._counted += asked is None
        seconds = pause(self._counted, self._jitter.random(), asked, first=self.first)
        if self._counted >= self.tries or now + seconds >= self._end:
            return None
        return seconds
