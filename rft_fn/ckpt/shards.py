"""Files of a checkpoint: tensors as safetensors, written and hashed in one pass.

The library's own writer gives no OSError for a full disk and no digest; this one streams the tensors' own
memory, without a copy and without the interpreter's lock.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest", "file_name", "flush", "read_part", "write_shard"]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def file_name(rank: int) -> str:
    """The name of the file that the process `rank` writes."""
    return f"rank_{rank:05d}.safetensors"


def flush(path: Path) -> None:
    """fsync a file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest(path: Path) -> str:
    """BLAKE2b of a whole file, as 32 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as f:
        while block := f.read(1 << 24):
            found.update(block)
    return found.hexdigest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries = {}
    at = 0
    for name, x in tensors.items():
        if x.dtype not in _NAMES:
            known = ", ".join(str(t).removeprefix("torch.") for t in _NAMES)
            raise ValueError(f"{name}: expected one of {known}, got {x.dtype}")
        size = x.numel() * x.element_size()
        entries[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous host tensors as one safetensors file, with fsync; returns its digest.

    OSError when the disk is full; ValueError for a type that the format does not have.
    """
    # wide types first, so that every tensor is aligned in the file
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    found = hashlib.blake2b(digest_size=16)
    with path.open("wb") as f:
        head = _header(tensors)
        found.update(head)
        f.write(head)
        for x in tensors.values():
            data: Any = x.reshape(-1).view(torch.uint8).numpy()
            found.update(data)
            f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return found.hexdigest()


def read_part(file: Any, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """The box [start, start + size) of a tensor of an open safetensors file."""
    if not size:
        return file.get_tensor(name)
    return file.get_slice(name)[tuple(slice(a, a + n) for a, n in zip(start, size))]
