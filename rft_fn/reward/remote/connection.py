"""One request over HTTP: its status, and an answer of bounded size, also once it is unzipped."""

import zlib
from collections.abc import AsyncGenerator
from typing import NamedTuple

import httpx2

__all__ = ["Answer", "Broken", "TooLarge", "exchange", "pool"]

ERROR_BYTES = 1 << 12  # of the text of an error
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
    data: bytes


async def pool(connections: int) -> AsyncGenerator[httpx2.AsyncClient, None]:
    """Yield one client with its connections.

    They are closed with the event loop that it runs in, which closes its generators.
    """
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    # no limit for each read: a server that drips would meet it, so the caller has a deadline for the whole
    async with httpx2.AsyncClient(limits=limits, timeout=None, follow_redirects=False) as client:
        yield client


async def exchange(
    client: httpx2.AsyncClient, address: str, body: bytes, headers: dict[str, str], max_bytes: int
) -> Answer:
    """The answer to a POST.

    Broken for a connection that fails, TooLarge for an answer of more than `max_bytes`, zipped or unzipped.
    """
    sent = {"Content-Type": "application/json", "Accept-Encoding": "gzip", **headers}
    try:
        async with client.stream("POST", address, content=body, headers=sent) as response:
            data = b""
            if response.is_success:
                data = await _read(response, max_bytes)
            elif not response.is_redirect:
                data = await _beginning(response)
            return Answer(response.status_code, response.headers, data)
    except httpx2.TransportError as error:
        raise Broken(f"{type(error).__name__}: {error}".rstrip(": ")) from error


async def _read(response: httpx2.Response, max_bytes: int) -> bytes:
    """The whole answer, unzipped."""
    declared = response.headers.get("Content-Length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLarge(f"expected an answer of at most {max_bytes} bytes, got one of {declared}")
    coding = response.headers.get("Content-Encoding", "identity").lower()
    if coding not in _ZIPPED | {"identity"}:
        raise ValueError(f"expected an answer that is plain or gzip, got {coding[:40]!r}")
    unzip = None
    if coding in _ZIPPED:
        unzip = zlib.decompressobj(_EITHER)

    # no size for the pieces: they would be collected, and the limit seen too late
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_raw():
        if unzip is not None:
            part = _unzipped(unzip, part, max_bytes - size + 1)
        size += len(part)
        if size > max_bytes:
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
