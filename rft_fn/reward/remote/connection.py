"""The client of servers of rewards and of samples: one request, and an answer of bounded size."""

import ssl
import zlib
from collections.abc import AsyncGenerator
from typing import NamedTuple

import httpx2

from rft_fn.reward.remote.hosts import masked

__all__ = ["Answer", "Broken", "TooLarge", "exchange", "once", "pool"]

ERROR_BYTES = 1 << 12  # of the text of an error
_SHOWN = 300  # characters of a server's own words
_ZIPPED = {"gzip", "x-gzip", "deflate"}
_EITHER = zlib.MAX_WBITS | 32  # gzip or zlib, as its head says


class Broken(OSError):
    """A request that did not get through, or whose answer broke off: another may."""


class TooLarge(ValueError):
    """An answer beyond the limit."""


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    headers: httpx2.Headers
    data: bytes  # unzipped; b"" of an error
    words: str  # the beginning of an error's text in one line, without the token


async def pool(connections: int) -> AsyncGenerator[httpx2.AsyncClient, None]:
    """Yield one client with its connections.

    They are closed with the event loop that it runs in, which closes its generators.
    """
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    # no limit for each read: a server that drips would meet it, so the caller has a deadline for the whole
    async with httpx2.AsyncClient(limits=limits, timeout=None, follow_redirects=False) as client:
        yield client


async def once(
    address: str, body: bytes | None, token: str, max_bytes: int, trusted: ssl.SSLContext
) -> Answer:
    """Return the answer on a connection of its own, which no proxy of the environment stands between.

    As `exchange`; a connection that is never used twice is never found closed.
    """
    async with httpx2.AsyncClient(
        verify=trusted, trust_env=False, timeout=None, follow_redirects=False, headers={"Connection": "close"}
    ) as client:
        return await exchange(client, address, body, token, max_bytes)


async def exchange(
    client: httpx2.AsyncClient, address: str, body: bytes | None, token: str, max_bytes: int
) -> Answer:
    """Return the answer to a POST of `body`, or to a GET without one, with the token as a bearer.

    Broken for a connection that fails, TooLarge for an answer of more than `max_bytes`, zipped or unzipped,
    ValueError for one that is packed in another way, and for an address that is none.
    """
    sent = {"Accept-Encoding": "gzip"}
    if body is not None:
        sent["Content-Type"] = "application/json"
    if token:
        sent["Authorization"] = f"Bearer {token}"
    method = "GET" if body is None else "POST"
    try:
        async with client.stream(method, address, content=body, headers=sent) as response:
            data, words = b"", ""
            if response.is_success:
                data = await _read(response, max_bytes, token)
            elif not response.is_redirect:
                text = masked((await _beginning(response)).decode(errors="replace"), token)
                words = " ".join(text.split())[:_SHOWN]
            return Answer(response.status_code, response.headers, data, words)
    except httpx2.TransportError as error:
        line = f"{type(error).__name__}: {error}".rstrip(": ")  # it may quote the server
        raise Broken(masked(line, token)[:_SHOWN]) from error
    except (httpx2.InvalidURL, UnicodeError):
        raise ValueError("expected an address like https://HOST:PORT, got another text") from None


async def _read(response: httpx2.Response, max_bytes: int, token: str) -> bytes:
    """The whole answer, unzipped."""
    declared = response.headers.get("Content-Length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLarge(f"expected an answer of at most {max_bytes} bytes, got one of {declared}")
    coding = response.headers.get("Content-Encoding", "identity").lower()
    if coding not in _ZIPPED | {"identity"}:
        raise ValueError(f"expected an answer that is plain or gzip, got {masked(coding, token)[:40]!r}")
    unzip = None
    if coding in _ZIPPED:
        unzip = zlib.decompressobj(_EITHER)

    # no size for the pieces: they would be collected, and the limit seen too late; what arrives counts too,
    # since there are zipped blocks of nothing
    parts: list[bytes] = []
    size = arrived = 0
    async for part in response.aiter_raw():
        arrived += len(part)
        if unzip is not None:
            part = _unzipped(unzip, part, max_bytes - size + 1)
        size += len(part)
        if max(size, arrived) > max_bytes:
            raise TooLarge(f"expected an answer of at most {max_bytes} bytes, got more")
        parts.append(part)
    if unzip is not None and not unzip.eof:
        raise Broken("the zipped answer breaks off")
    return b"".join(parts)


def _unzipped(unzip: "zlib._Decompress", part: bytes, most: int) -> bytes:
    """What a part unzips to, cut after `most` bytes."""
    try:
        return unzip.decompress(part, most)
    except zlib.error as error:
        raise ValueError(f"expected a gzip answer, got {error}") from None


async def _beginning(response: httpx2.Response) -> bytes:
    """The beginning of an error's text."""
    found = b""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        return found
    async for part in response.aiter_raw():
        found += part
        if len(found) >= ERROR_BYTES:
            break
    return found[:ERROR_BYTES]
