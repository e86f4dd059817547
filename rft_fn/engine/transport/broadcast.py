"""Weights by broadcast to all ranks of a process group: NCCL between GPUs, gloo on hosts.

Run over gloo only. On a machine with two GPUs `RFT_FN_TRANSPORT=cuda pytest tests/engine/test_transport.py`
runs the same tests over NCCL.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from rft_fn.engine.transport.bucket import Bucket
from rft_fn.engine.transport.send import Receipt, TransportError

__all__ = ["Broadcast"]


class Broadcast:
    """Both ends of a channel over `group`, a process group of the trainer's rank and those of the engines.

    The rank `source` of all processes sends; the others receive. `device` is where buckets land: NCCL needs
    this rank's GPU. Every rank of the group has to take part.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, source: int = 0, device: str | torch.device = "cpu"
    ):
        self.group = group
        self.source = source
        self.device = torch.device(device)

    def _say(self, message: Any = None) -> Any:
        """The message of the source, on every rank."""
        box = [message]
        device = None
        if self.device.type == "cuda":
            device = self.device
        dist.broadcast_object_list(box, self.source, group=self.group, device=device)
        return box[0]

    # ---------- the sender, then the receivers; `end` is of both

    def begin(self, version: int | None = None) -> int:
        """Open a shipment, or wait for one; its version."""
        return self._say(version)

    def put(self, bucket: Bucket) -> None:
        self._say((bucket.entries, bucket.flat.numel()))
        dist.broadcast(bucket.flat.to(self.device), self.source, group=self.group)

    def buckets(self) -> Iterator[Bucket]:
        while True:
            message = self._say()
            if isinstance(message, str):
                break
            entries, size = message
            flat = torch.empty(size, dtype=torch.uint8, device=self.device)
            dist.broadcast(flat, self.source, group=self.group)
            yield Bucket(entries, flat)
        if message:
            raise TransportError(f"weights: the sender broke off: {message}")

    def end(self, found: str | Receipt, /) -> list[Receipt]:
        """Close the shipment with its error, or answer with a receipt; the receipts of all receivers."""
        mine: Receipt | None = None
        if isinstance(found, Receipt):
            mine = found
        else:
            self._say(found)
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, mine, group=self.group)
        return [receipt for receipt in every if receipt is not None]
