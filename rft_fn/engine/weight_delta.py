"""Makes folders of what has changed in weights since the last version, and puts both together.

Most weights of 16 bits keep all of their bits in a step, because the step is smaller than their rounding. Of
the others a folder has the places and the XOR with the last version, byte by byte and zipped.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn.engine import weight_folder
from rft_fn.engine.weight_channel import Parcel
from rft_fn.engine.weight_folder import Writer
from rft_fn.memory import host_free

__all__ = ["Kept", "difference", "renew", "write"]

# {"version", "base": the last version, empty for a whole one, "changed": {name: checksum of the new tensor}}
ABOUT = "rft_version.json"
MOST = 0.25  # changed elements of a tensor, above which its difference is not worth it
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(x: Tensor) -> Tensor:
    """Return the bits of a contiguous tensor as integers, [elements], in the same memory."""
    return x.view(-1).view(_WORDS[x.element_size()])


def _zipped(x: Tensor) -> bytes:
    """Return integers zipped, all first bytes, then all second ones: most of the last are 0."""
    planes = x.contiguous().view(torch.uint8).view(-1, x.element_size()).T.contiguous()
    return zlib.compress(planes.numpy().tobytes(), 6)


def _unzipped(data: bytes, dtype: torch.dtype) -> Tensor:
    plain = bytearray(zlib.decompress(data))
    if not plain:
        return torch.empty(0, dtype=dtype)
    planes = torch.frombuffer(plain, dtype=torch.uint8).view(dtype.itemsize, -1)
    return planes.T.contiguous().view(-1).view(dtype)


def checksum(x: Tensor) -> int:
    """Return the CRC-32 of a contiguous tensor's bytes."""
    data: Any = _words(x).view(torch.uint8).numpy()
    return zlib.crc32(data)


def difference(new: Tensor, old: Tensor) -> Tensor | None:
    """Return what makes `new` of `old`, [bytes] uint8; None where too much has changed."""
    changed = _words(new) ^ _words(old)
    at = changed.nonzero().flatten()
    if len(at) > MOST * len(changed):
        return None
    steps = _zipped(at.diff(prepend=at.new_zeros(1)).int())
    data = len(steps).to_bytes(8, "little") + steps + _zipped(changed[at])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def renew(old: Tensor, data: Tensor) -> None:
    """Make the newer tensor of `old`, in its place."""
    packed = data.numpy().tobytes()
    end = 8 + int.from_bytes(packed[:8], "little")
    words = _words(old)
    at = _unzipped(packed[8:end], torch.int32).long().cumsum(0)
    words[at] ^= _unzipped(packed[end:], words.dtype)


def write(writer: Writer, version: str, new: Parcel, old: Parcel | None, base: str = "") -> bool:
    """Write a version as its difference from `base`, the `old` one, or without one as a whole.

    Return False, with nothing written, where the difference is not much smaller. OSError for a full disk.
    """
    parts: dict[str, Tensor] = {}
    changed: dict[str, int] = {}
    before = {} if old is None else dict(old.tensors())
    for name, x in new.tensors():
        last = before.get(name)
        if last is not None and last.dtype == x.dtype and last.shape == x.shape:
            part = difference(x, last)
            if part is not None:
                changed[name] = checksum(x)
                x = part
        parts[name] = x
    if old is not None and (
        before.keys() != parts.keys() or sum(x.nbytes for x in parts.values()) > new.total / 2
    ):
        return False
    problem: OSError | None = None
    for name, x in parts.items():
        problem = problem or writer.add(name, x)
    if problem is not None:
        raise problem
    about = {"version": version, "base": base, "changed": changed}
    (writer.part / ABOUT).write_text(json.dumps(about))
    writer.finish(new.tied)
    return True


class Kept:
    """The last version of the weights in a worker of a server, which the next difference is from."""

    def __init__(self, workers: int = 1) -> None:
        """`workers` of the server keep theirs in the memory of one host."""
        self.workers = workers
        self.version = ""
        self.tensors: dict[str, Tensor] = {}

    def read(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of a folder, by all of their names, and keep them where it says so.

        ValueError for a difference from another version, and for one that gives other weights.
        """
        about = {"version": "", "base": "", "changed": {}}
        if (folder / ABOUT).exists():
            about = json.loads((folder / ABOUT).read_text())
        if about["base"]:
            self._renew(folder, about["base"], about["changed"])
        else:
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            self.tensors = {}
            if not about["version"] or size * self.workers > host_free():
                self.version = ""
                return weight_folder.read(folder)
            self.tensors = {name: x.clone() for name, x in weight_folder.read(folder, tied=False)}
        self.version = about["version"]
        return weight_folder.with_tied(folder, self.tensors.items())

    def _renew(self, folder: Path, base: str, changed: dict[str, int]) -> None:
        if self.version != base:
            raise ValueError(f"base: expected weights {base}, got {self.version or 'none'}")
        self.version = ""  # half of it is new until the end
        for name, x in weight_folder.read(folder, tied=False):
            if name not in changed:
                self.tensors[name] = x.clone()
                continue
            renew(self.tensors[name], x)
            if checksum(self.tensors[name]) != changed[name]:
                raise ValueError(f"{name}: expected checksum {changed[name]} after the difference")
