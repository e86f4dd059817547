"""Asks servers for rewards: attempts, waits, and one deadline over all of them."""

import asyncio
import email.utils
import random
import time
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from rft_fn.reward.remote.connection import Host, Hosts, masked, pause, token_in
from rft_fn.reward.remote.protocol import ReadAnswer

if TYPE_CHECKING:
    from httpx2 import AsyncClient

    from rft_fn.reward.remote.connection import Answer

__all__ = ["Client", "Limits", "Question"]

OK = 200
REDIRECTS = range(300, 400)
UNAUTHORIZED = (401, 403)
AGAIN = (408, 425, 429)  # below 500, statuses that a later request may not meet
FAILED = 500


class Limits(NamedTuple):
    """The limits of a client."""

    deadline: float  # s for a call, all attempts and waits included
    attempt: float  # s for one request and its answer
    tries: int  # attempts of a batch per host
    connections: int  # requests under way at once
    max_bytes: int  # of an answer, unzipped


class Question(NamedTuple):
    """A request, and the number of rewards that it asks for."""

    body: bytes
    rows: int


class Again(Exception):
    """An attempt that failed in a way that another may not; `wait` is the time that the server asks for."""

    def __init__(self, problem: str, wait: float | None = None):
        super().__init__(problem)
        self.wait = wait


class Client:
    """Asks the servers of one reward."""

    def __init__(self, found: Sequence[str], limits: Limits, token_env: str, read: ReadAnswer):
        self.hosts = Hosts(found)
        self.limits = limits
        self.token_env = token_env
        self.read = read
        self.jitter = random.Random()  # not that of the run: it moves waits, and no reward
        self._pool: AsyncGenerator[AsyncClient, None] | None = None
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """The answers, in order.

        TimeoutError if they are not there within the deadline, ConnectionError after the last try, and
        ValueError for what no try would mend: a refusal, a redirect, an answer of another form.
        """
        end = time.monotonic() + self.limits.deadline
        slots = asyncio.Semaphore(self.limits.connections)
        asked = [asyncio.ensure_future(self._answer(question, slots, end)) for question in questions]
        try:
            async with asyncio.timeout(self.limits.deadline):
                return await asyncio.gather(*asked)
        except TimeoutError:
            names = ", ".join(host.shown for host in self.hosts.all)
            raise TimeoutError(
                f"{names}: expected answers within deadline = {self.limits.deadline:g} s, got none"
                f"{self._why()}"
            ) from None
        finally:
            for task in asked:
                task.cancel()

    def _why(self) -> str:
        """The last problems, as the end of a line."""
        problems = self.hosts.problems()
        if not problems:
            return ""
        return f" ({problems})"

    async def _answer(self, question: Question, slots: asyncio.Semaphore, end: float) -> dict[str, Any]:
        """The answer to one question, whichever server gives it."""
        tries = 0
        while True:
            async with slots:
                host = await self.hosts.next(end)
                began = time.monotonic()
                host.busy += 1
                host.asked += 1
                try:
                    async with asyncio.timeout(self.limits.attempt):
                        found = await self._attempt(host, question)
                    host.well()
                    return found
                except TimeoutError:
                    trouble = Again(f"no answer within attempt = {self.limits.attempt:g} s")
                except Again as again:
                    trouble = again
                finally:
                    host.busy -= 1

            # a server that says when to come again is well: its waits are bounded by the deadline alone
            wait = pause(host.failures + 1, self.jitter.random())
            if trouble.wait is not None:
                wait = max(wait, trouble.wait)
            host.rest(began, wait, str(trouble), f" for up to {max(end - began, 0):.0f} s")
            tries += trouble.wait is None
            if tries >= self.limits.tries * len(self.hosts.all):
                raise ConnectionError(f"expected an answer within {tries} tries, got none{self._why()}")

    async def _attempt(self, host: Host, question: Question) -> dict[str, Any]:
        """The answer of one server. Again where another attempt may mend it, else ValueError."""
        from rft_fn.reward.remote import connection

        token = token_in(self.token_env)
        client = await self._connected()
        limit = self.limits.max_bytes
        try:
            answer = await connection.exchange(client, host.address, question.body, token, limit)
            if answer.status == OK:
                return self.read(answer.data, question.rows)
        except connection.Broken as error:
            raise Again(str(error)) from error
        except ValueError as error:  # which may quote the answer
            raise ValueError(f"{host.shown}: {masked(str(error), token)}") from None
        raise _refusal(host, answer)

    async def _connected(self) -> "AsyncClient":
        """The client of this event loop, with its connections."""
        from rft_fn.reward.remote import connection

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._pool = connection.pool(self.limits.connections)
            self._client = await anext(self._pool)
        return self._client


def _refusal(host: Host, answer: "Answer") -> Exception:
    """The error of a status: Again for one that may pass, else ValueError."""
    status = answer.status
    line = f"status {status}: {answer.words}".rstrip(": ")
    if status >= FAILED or status in AGAIN:
        return Again(line, retry_after(answer.headers.get("Retry-After", "")))
    line = f"{host.shown}: expected an answer, got {line}"
    if status in REDIRECTS:
        line += "; redirects are not followed: name the address that they lead to"
    if status in UNAUTHORIZED:
        line += "; its token belongs into the environment variable that token_env names"
    return ValueError(line)


def retry_after(text: str) -> float | None:
    """The seconds that a Retry-After header asks for, as a number or as a date; None where it has neither."""
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
