"""Weights to another process of this machine through memory that both read: CUDA IPC on a GPU.

torch.multiprocessing sends a handle of the memory, of either kind, through a connection. Run with tensors on
the host only; on a GPU `RFT_FN_TRANSPORT=cuda pytest tests/engine/test_transport.py` runs the same tests.
"""

from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch.multiprocessing  # noqa: F401 - teaches connections to send tensors as handles

from rft_fn.engine.transport.bucket import Bucket
from rft_fn.engine.transport.send import Receipt, TransportError

__all__ = ["Shared"]


class Shared:
    """One end of a channel to a process that `torch.multiprocessing` started, over a duplex Pipe.

    A bucket stays in the sender's memory until the receiver has read it: torch requires that of tensors on a
    GPU. So at most one bucket is on its way.
    """

    def __init__(self, connection: Connection):
        self.connection = connection

    # ---------- the sender, then the receiver; `begin` and `end` are of both

    def begin(self, version: int | None = None) -> int:
        """Open a shipment, or wait for one; its version."""
        if version is None:
            return self.connection.recv()
        self.connection.send(version)
        return version

    def put(self, bucket: Bucket) -> None:
        self.connection.send((bucket.entries, bucket.flat))
        self.connection.recv()  # read

    def buckets(self) -> Iterator[Bucket]:
        while True:
            message = self.connection.recv()
            if isinstance(message, str):
                break
            bucket = Bucket(*message)
            del message
            yield bucket
            del bucket
            self.connection.send("read")
        if message:
            raise TransportError(f"weights: the sender broke off: {message}")

    def end(self, found: str | Receipt, /) -> list[Receipt]:
        """Close the shipment with its error and wait for the receipt, or answer with one."""
        self.connection.send(found)
        if isinstance(found, Receipt):
            return [found]
        return [self.connection.recv()]
