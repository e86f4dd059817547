"""Buckets: many tensors as one flat one, so that a transport has few large things to carry."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BUCKET_BYTES", "Bucket", "Entry", "buckets", "tensors"]

BUCKET_BYTES = 512 * 2**20
_ALIGN = 16  # bytes: a view of a flat tensor as another type needs an offset that its size divides


class Entry(NamedTuple):
    """A tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # of its bytes
    size: int  # bytes


class Bucket(NamedTuple):
    """Tensors one after the other."""

    entries: list[Entry]
    flat: Tensor  # [bytes] uint8


def buckets(weights: Iterable[tuple[str, Tensor]], most: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """The weights in buckets of at most `most` bytes; a larger tensor is a bucket by itself.

    Reads one tensor ahead at most, and holds one bucket.
    """
    waiting: list[tuple[str, Tensor]] = []
    held = 0
    for name, x in weights:
        size = _aligned(x.numel() * x.element_size())
        if waiting and held + size > most:
            yield _packed(waiting)
            waiting = []
            held = 0
        waiting.append((name, x.detach()))
        held += size
    if waiting:
        yield _packed(waiting)


def tensors(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket by name: views of its memory."""
    for name, dtype, shape, start, size in bucket.entries:
        yield name, bucket.flat[start : start + size].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _packed(found: list[tuple[str, Tensor]]) -> Bucket:
    entries: list[Entry] = []
    start = 0
    for name, x in found:
        size = x.numel() * x.element_size()
        entries.append(Entry(name, x.dtype, tuple(x.shape), start, size))
        start += _aligned(size)
    flat = torch.zeros(start, dtype=torch.uint8, device=found[0][1].device)
    for (_, x), entry in zip(found, entries, strict=True):
        flat[entry.start : entry.start + entry.size] = x.reshape(-1).view(torch.uint8)
    return Bucket(entries, flat)
