"""Sending weights over a channel, and receiving them at its other end."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rft_fn.engine.transport.bucket import BUCKET_BYTES, Bucket, buckets, tensors
from rft_fn.types.engine import Delivered, Load

__all__ = ["Channel", "Inbox", "Receipt", "TransportError", "receive", "send"]


class TransportError(RuntimeError):
    """Weights did not arrive at the other end."""


class Receipt(NamedTuple):
    """What one receiver took, or why it failed."""

    tensors: int
    bytes: int
    error: str = ""


class Channel(Protocol):
    """The sending end."""

    def begin(self, version: int, /) -> object:
        """Open a shipment."""
        ...

    def put(self, bucket: Bucket) -> None:
        """Carry one bucket. Its memory is not written again."""
        ...

    def end(self, error: str, /) -> list[Receipt]:
        """Close the shipment, broken off where there is an `error`; the receipts of all receivers."""
        ...


class Inbox(Protocol):
    """The receiving end."""

    def begin(self) -> int:
        """Wait for a shipment; its version."""
        ...

    def buckets(self) -> Iterator[Bucket]:
        """The buckets of the shipment, in order. TransportError where the sender breaks off."""
        ...

    def end(self, receipt: Receipt, /) -> object:
        """Answer the sender, after the last bucket."""
        ...


def send(
    weights: Iterable[tuple[str, Tensor]], channel: Channel, *, version: int, bucket_bytes: int = BUCKET_BYTES
) -> Delivered:
    """Send full tensors over a channel, in buckets; the record of what every receiver took.

    Where reading the weights fails, the receivers are told, so that they do not wait. TransportError for a
    receiver that failed or took less than was sent.
    """
    began = time.perf_counter()
    count = 0
    size = 0
    channel.begin(version)
    try:
        for bucket in buckets(weights, bucket_bytes):
            count += len(bucket.entries)
            size += sum(entry.size for entry in bucket.entries)
            channel.put(bucket)
    except BaseException as error:
        with suppress(Exception):  # a channel that is broken itself
            channel.end(f"{type(error).__name__}: {error}")
        raise

    for receipt in channel.end(""):
        if receipt.error:
            raise TransportError(f"weights: expected the receiver to take them, got {receipt.error}")
        if (receipt.tensors, receipt.bytes) != (count, size):
            raise TransportError(
                f"weights: expected the receiver to take {count} tensors ({size} bytes), got "
                f"{receipt.tensors} ({receipt.bytes} bytes)"
            )
    return Delivered(count, size, time.perf_counter() - began, version)


def receive(inbox: Inbox, load: Load) -> Delivered:
    """Receive one shipment into the `load` of an engine.

    Raises what `load` raises, after the sender has been told. Tensors are views of a bucket: while one is
    kept, so is the memory of the bucket.
    """
    version = inbox.begin()
    arriving = inbox.buckets()
    try:
        delivered = load((pair for bucket in arriving for pair in tensors(bucket)), version=version)
    except BaseException as error:
        _drain(arriving)
        inbox.end(Receipt(0, 0, f"{type(error).__name__}: {error}"))
        raise
    _drain(arriving)
    inbox.end(Receipt(delivered.tensors, delivered.bytes))
    return delivered


def _drain(arriving: Iterator[Any]) -> None:
    """Read the rest: the sender goes on until its end."""
    with suppress(TransportError):
        for _ in arriving:
            pass
