"""Rewards of servers, JSON over HTTP: attempts, waits, and one deadline over all of them.

`served_at` makes the reward function, `wire` has the forms of requests and answers, `connection` knows which
servers answer, and makes one request.
"""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from rft_fn.patience import DEADLINE, TRIES, may_pass, retry_after
from rft_fn.reward import connection, wire, wire_openrlhf
from rft_fn.reward.connection import Answer, Connections, Host, Hosts, addresses, masked, token_in
from rft_fn.reward.reward_record import Reward, as_reward
from rft_fn.reward.wire import ReadAnswer, batch_of

__all__ = ["TOKEN_ENV", "Client", "Limits", "Question", "cuts", "served_at"]


OK = 200
REDIRECTS = range(300, 400)
UNAUTHORIZED = (401, 403)


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
    """An attempt failed, and another may not; `wait` is the time that the server asks for."""

    def __init__(self, problem: str, wait: float | None = None):
        super().__init__(problem)
        self.wait = wait


class Client:
    """Asks the servers of one reward."""

    def __init__(self, hosts: Sequence[str], limits: Limits, token_env: str, read: ReadAnswer):
        self.hosts = Hosts(hosts)
        self.limits = limits
        self.token_env = token_env
        self.read = read
        self.jitter = random.Random()  # not the run's: it moves waits, and no reward
        self.connections = Connections(limits.connections)

    async def ask(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Return the answers, in order.

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
        """Return the last problems, as the end of a line."""
        problems = self.hosts.problems()
        return f" ({problems})" if problems else ""

    async def _answer(self, question: Question, slots: asyncio.Semaphore, end: float) -> dict[str, Any]:
        """Return the answer to one question, whichever server gives it."""
        tries = 0
        while True:
            async with slots:
                host = await self.hosts.next(end)
                began = time.monotonic()
                host.busy += 1
                host.asked += 1
                try:
                    async with asyncio.timeout(self.limits.attempt):
                        answer = await self._attempt(host, question)
                    host.well()
                    return answer
                except TimeoutError:
                    trouble = Again(f"no answer within attempt = {self.limits.attempt:g} s")
                except Again as again:
                    trouble = again
                finally:
                    host.busy -= 1

            # a server that says when to come again is well: only the deadline bounds its waits
            limit = f" for up to {max(end - began, 0):.0f} s"
            host.rest(began, str(trouble), trouble.wait, self.jitter.random(), limit)
            tries += trouble.wait is None
            if tries >= self.limits.tries * len(self.hosts.all):
                raise ConnectionError(f"expected an answer within {tries} tries, got none{self._why()}")

    async def _attempt(self, host: Host, question: Question) -> dict[str, Any]:
        """Return the answer of one server: Again where another attempt may mend it, else ValueError."""
        token = token_in(self.token_env)
        client = await self.connections.client()
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


def _refusal(host: Host, answer: Answer) -> Exception:
    """Return the error of a status: Again for one that may pass, else ValueError."""
    status = answer.status
    line = f"status {status}: {answer.words}".rstrip(": ")
    if may_pass(status):
        return Again(line, retry_after(answer.headers.get("Retry-After", "")))
    line = f"{host.shown}: expected an answer, got {line}"
    if status in REDIRECTS:
        line += "; redirects are not followed: name the address that they lead to"
    if status in UNAUTHORIZED:
        line += "; its token belongs into the environment variable that token_env names"
    return ValueError(line)


# ---------- the reward function of one or more servers


TOKEN_ENV = "RFT_REWARD_TOKEN"
"""The environment variable with the token of reward servers."""


def served_at(
    hosts: str | Sequence[str],
    *,
    form: Literal["rft", "openrlhf"] = "rft",
    columns: Sequence[str] | None = None,
    label: str | None = None,
    name: str | None = None,
    batch: int = 64,
    connections: int = 8,
    deadline: float = DEADLINE,
    attempt: float = 60.0,
    tries: int = TRIES,
    max_bytes: int = 1 << 24,
    token_env: str = TOKEN_ENV,
) -> Reward:
    """Return the reward that servers compute: JSON over HTTP, as docs/rewards.md shows it.

    `hosts` are addresses of servers that answer alike, as a list or with commas between them; the least busy
    one that answers is asked. `form` names the requests: ours, or the ones of servers for OpenRLHF. `columns`
    names the columns of the data to send, and the data must have them; None sends all. `label` is the column
    that OpenRLHF's form sends as `labels`: None is "label", if the data has one. `name` is the name of the
    part, by default HOST:PORT.

    A request holds about `batch` completions, and those of one prompt stay together; up to `connections`
    requests are under way. A call may take `deadline` seconds and each attempt `attempt`, from the first byte
    to the last. A broken connection, a status of 5xx, 408, 425 or 429 is tried again, `tries` times per host,
    with waits that double up to 30 s and have a random part; a server's Retry-After uses up no try. An answer
    may have `max_bytes`, unzipped. The token in the environment variable `token_env` is sent as a bearer; no
    file and no error shows it.

    ValueError here for limits that are none. In a call: ValueError for a redirect, for any other status and
    for an answer that is not one finite number or null for each completion; ConnectionError after the last
    try; TimeoutError at the deadline. Requests may arrive twice, so servers should answer as pure functions.
    """
    limits = Limits(deadline, attempt, tries, connections, max_bytes)
    _check(limits, batch, form, label)
    urls = addresses(hosts)
    theirs = form == "openrlhf"
    request = partial(wire_openrlhf.openrlhf_request, label=label or "label") if theirs else wire.request
    read = wire_openrlhf.read_openrlhf_answer if theirs else wire.read_answer
    client = Client(urls, limits, token_env, read)

    # media is named, for what takes every argument does not get it
    async def reward(*, prompts: Any, completions: Any, media: Any = None, **given: Any) -> dict[str, Any]:
        whole = batch_of(prompts, completions, given | {"media": media}, columns)
        groups = given.get("groups") or prompts
        parts = [whole.rows(part) for part in cuts(groups, batch)]
        asked = [Question(request(part), len(part.completions)) for part in parts]
        return joined(await client.ask(asked), [question.rows for question in asked])

    needed = dict.fromkeys([*(columns or ()), *([] if label is None else [label])])
    part = name or urlsplit(urls[0]).netloc
    return replace(as_reward(reward), name=part, columns=tuple(needed), deadline=deadline)


def _check(limits: Limits, batch: int, form: str, label: str | None) -> None:
    """Raise ValueError for limits that are none."""
    given = {**limits._asdict(), "batch": batch}
    for name, x in given.items():
        if isinstance(x, bool) or not isinstance(x, (int, float)) or not (0 < x < math.inf):
            raise ValueError(f"{name}: expected a number above 0, got {x!r}")
        if name not in ("deadline", "attempt") and not isinstance(x, int):
            raise ValueError(f"{name}: expected a whole number, got {x!r}")
    if form not in ("rft", "openrlhf"):
        raise ValueError(f"form: expected 'rft' or 'openrlhf', got {form!r}")
    if label is not None and form != "openrlhf":
        raise ValueError(
            f"label: expected it with form='openrlhf' alone, got it with form={form!r}; columns=[...] names "
            "what is sent"
        )


def cuts(groups: Sequence[Any], size: int) -> list[slice]:
    """Return slices of about `size` rows, in which consecutive rows of one group stay together."""
    slices: list[slice] = []
    start = 0
    end = 0
    for i in range(1, len(groups) + 1):
        if i < len(groups) and groups[i] == groups[i - 1]:
            continue
        if end > start and i - start > size:  # the group that ends here goes into the next slice
            slices.append(slice(start, end))
            start = end
        end = i
    if end > start:
        slices.append(slice(start, end))
    return slices


def joined(answers: Sequence[dict[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """Join the answers to all parts; a list that a part does not have is null there."""
    rewards: list[float | None] = []
    names: dict[str, None] = {}
    for answer in answers:
        rewards += answer["rewards"]
        names |= dict.fromkeys(answer["extra_logs"])
    logs: dict[str, list[Any]] = {name: [] for name in names}
    for answer, count in zip(answers, counts, strict=True):
        for name, column in logs.items():
            column += answer["extra_logs"].get(name, [None] * count)
    return {"rewards": rewards, "extra_logs": logs}
