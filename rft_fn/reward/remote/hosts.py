"""Servers: their addresses and keys, which of them answer, and when to try the others again."""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

from rft_fn.check import printable

__all__ = ["FIRST", "MOST", "Host", "Hosts", "addresses", "masked", "pause", "token_in"]

FIRST = 0.5  # s: the longest wait after a first failure
MOST = 30.0  # s: the longest of all
_PART = 8  # characters of the beginning of a token that are not shown either

_BETWEEN = re.compile(r",(?=https?://)")  # a query may have commas of its own


def addresses(text: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of a text with commas between them, or of a list.

    ValueError for one that is no http(s)://HOST[:PORT]/PATH, for one with a name and a password in it, and
    for one that is there twice.
    """
    found = list(text)
    if isinstance(text, str):
        found = _BETWEEN.split(text)
    if not found:
        raise ValueError("hosts: expected at least one address, got none")
    for address in found:
        _check(address)
    if len(set(found)) < len(found):
        raise ValueError(f"hosts: expected each address once, got {', '.join(map(shown, found))}")
    return tuple(found)


def _check(address: str) -> None:
    """ValueError unless it is an address without a secret."""
    try:
        where = urlsplit(address)
        right = where.scheme in ("http", "https") and where.hostname and where.port != 0
    except ValueError:  # a port that is no number
        right = False
        where = urlsplit("")
    if where.username is not None or where.password is not None:
        raise ValueError(
            f"hosts: expected an address without a name and a password, got one at {where.hostname}; a token "
            "belongs into an environment variable"
        )
    if not right or where.fragment or re.search(r"\s", address):
        raise ValueError(f"hosts: expected addresses like https://HOST:PORT/score, got {shown(address)!r}")


def shown(address: str) -> str:
    """An address as errors show it: without a query, which may hold a secret."""
    return address.split("?")[0].rpartition("@")[2]


def token_in(variable: str) -> str:
    """Return the token in an environment variable, "" for none. ValueError for one that no header holds."""
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and (token.isprintable() or not token)):
        raise ValueError(f"{variable}: expected a token of printable ASCII characters")
    return token


def masked(text: str, token: str) -> str:
    """Return a text with *** in place of the token, also as JSON or an address would hold it.

    So is its beginning, where a text was cut in the middle of it.
    """
    for form in {token, json.dumps(token)[1:-1], quote(token, safe="")} - {""}:
        for size in range(len(form), min(len(form), _PART) - 1, -1):
            text = text.replace(form[:size], "***")
    return text


def pause(failures: int, draw: float) -> float:
    """The wait in s after so many failures in a row, for a uniform draw in [0, 1).

        (1 + draw) / 2 * min(MOST, FIRST * 2^(failures - 1))

    Clients that failed together so come back one by one.
    """
    doublings = min(failures - 1, 16)  # far beyond MOST
    return (1 + draw) / 2 * min(MOST, FIRST * 2.0**doublings)


class Host:
    """One server."""

    def __init__(self, address: str):
        self.address = address
        self.shown = shown(address)
        self.failures = 0  # in a row
        self.awake_at = 0.0  # of the monotonic clock; until then it is left alone
        self.busy = 0  # requests under way
        self.asked = 0  # requests so far
        self.problem = ""  # the last one

    def rest(self, began: float, seconds: float, problem: str, limit: str = "") -> None:
        """Leave it alone for a while, after a request that `began` then.

        Requests that failed together count once. `limit` tells how long it is tried again, for the warning.
        """
        self.problem = problem
        now = time.monotonic()
        if began < self.awake_at:
            return
        if not self.failures:
            line = printable(f"warning: {self.shown}: {problem}; trying again{limit}")
            print(line, file=sys.stderr, flush=True)
        self.failures += 1
        self.awake_at = now + seconds

    def well(self) -> None:
        """It has answered."""
        if self.failures:
            print(f"{self.shown}: answers again", file=sys.stderr, flush=True)
        self.failures = 0
        self.awake_at = 0.0

    def turn(self) -> tuple[int, int, int]:
        """The order in which hosts are asked: without failures, least busy, least asked."""
        return self.failures, self.busy, self.asked


class Hosts:
    """All servers of a reward; they answer alike."""

    def __init__(self, found: Sequence[str]):
        self.all = [Host(address) for address in found]

    async def next(self, end: float) -> Host:
        """A server that is not resting, as soon as there is one.

        TimeoutError, at once, if there is none before `end` of the monotonic clock.
        """
        while True:
            now = time.monotonic()
            awake = [host for host in self.all if host.awake_at <= now]
            if awake:
                return min(awake, key=Host.turn)
            first = min(host.awake_at for host in self.all)
            if first >= end:
                raise TimeoutError
            await asyncio.sleep(first - now)

    def problems(self) -> str:
        """The last problem of each server that has one."""
        return "; ".join(f"{host.shown}: {host.problem}" for host in self.all if host.problem)
