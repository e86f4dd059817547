"""Write one checkpoint: a thread of each rank writes its file, rank 0's completes the folder.

The threads talk only through files (a mark for each part that is whole, with its digest), never through the
process group, which training uses meanwhile. So all ranks must see one file system.
"""

import atexit
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import dist
from rft_fn.ckpt import folder as folder_lib
from rft_fn.text import printable

__all__ = [
    "Writer", "Writing", "agree", "complete", "digest", "file_name", "flush", "read_part", "write_shard",
]  # fmt: skip


# ---------- files of a checkpoint: tensors as safetensors, written and hashed in one pass


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def file_name(rank: int) -> str:
    """Return the name of the file that the process `rank` writes."""
    return f"rank_{rank:05d}.safetensors"


def flush(path: Path) -> None:
    """Call fsync on a file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest(path: Path) -> str:
    """Return the BLAKE2b digest of a whole file, as 32 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as f:
        while block := f.read(1 << 24):
            hashed.update(block)
    return hashed.hexdigest()


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
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("wb") as f:
        head = _header(tensors)
        hashed.update(head)
        f.write(head)
        for x in tensors.values():
            data: Any = x.reshape(-1).view(torch.uint8).numpy()
            hashed.update(data)
            f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return hashed.hexdigest()


def read_part(file: Any, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """Read the box [start, start + size) of a tensor of an open safetensors file."""
    if not size:
        return file.get_tensor(name)
    return file.get_slice(name)[tuple(slice(a, a + n) for a, n in zip(start, size))]


# ---------- write one checkpoint: a thread of each rank writes its file, rank 0's completes the folder


_EXIT = 30.0  # s that a process which exits waits for the parts of others


class Writing(threading.Thread):
    """Writes `path` by way of the folder `tmp`: this rank's `tensors`, and on rank 0 `meta`."""

    def __init__(self, path: Path, tmp: Path, tensors: Mapping[str, Tensor], meta: dict[str, Any]):
        super().__init__(name=f"write {path.name}", daemon=True)
        self.path = path
        self.tmp = tmp
        self.tensors = tensors
        self.meta = meta
        self.rank = folder_lib.number()
        self.world = dist.world()
        self.error: Exception | None = None
        self.late: Exception | None = None  # from the work that waited for the whole checkpoint
        self.written = threading.Event()  # this rank's part is on the disk, or cannot be
        self.stop = threading.Event()  # no other rank's part will come
        self._then: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self) -> None:
        """Write this rank's part, and on rank 0 the folder; store an error in `error`."""
        try:
            self._write()
            self.written.set()
            if self.rank == 0 and self._complete():
                self._commit()
                self._close()
        except Exception as error:
            self.error = error
        self.written.set()
        self.tensors = {}

    def _write(self) -> None:
        name = file_name(self.rank)
        digest = write_shard(self.tmp / name, self.tensors)
        mark = self.tmp / f"{name}.part"
        mark.write_text(digest)
        os.rename(mark, self._mark(self.rank))

    def _mark(self, rank: int) -> Path:
        return self.tmp / f"{file_name(rank)}.done"

    def _complete(self) -> bool:
        """Wait for the marks of all ranks; False when told that they will not come."""
        missing = list(range(self.world))
        while missing := [r for r in missing if not self._mark(r).exists()]:
            if self.stop.wait(0.02):
                return all(self._mark(r).exists() for r in missing)
        return True

    def _commit(self) -> None:
        # the parts become a checkpoint by their list, with its digest, in a meta.json
        meta = dict(self.meta)
        files = {}
        for r in range(self.world):
            files[file_name(r)] = self._mark(r).read_text()
            self._mark(r).unlink()
        meta["files"] = files
        meta["digest"] = folder_lib.sum_of(meta)

        # everything is on the disk before the rename that makes it visible
        file = self.tmp / "meta.json"
        file.write_text(json.dumps(meta))
        flush(file)
        flush(self.tmp)

        # a kill between the two renames leaves the old one aside, and `latest` moves it back
        aside = self.path.with_name(f".{self.path.name}.old")
        if self.path.exists():
            os.rename(self.path, aside)
        os.rename(self.tmp, self.path)
        flush(self.path.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            for f in self._then:
                self._after(f)

    def then(self, f: Callable[[], object]) -> None:
        """Call `f` once the checkpoint is whole, here or in the thread; its error does not undo the write."""
        with self._lock:
            if not self._closed:
                self._then.append(f)
                return
        self._after(f)

    def _after(self, f: Callable[[], object]) -> None:
        try:
            f()
        except Exception as error:
            self.late = self.late or error


def agree(error: Exception | None, what: str = "") -> None:
    """Raise on every rank the error of the first rank that has one; all ranks call it.

    An OSError keeps its kind, anything else becomes a ValueError, with `what` at the end of the text.
    """
    for rank, failure in enumerate(dist.all_gather_object(_failure(error))):
        if failure is None:
            continue
        number, text = failure
        if dist.world() > 1:
            text += f" (rank {rank} of {dist.world()})"
        text += what
        if number:
            raise OSError(number, text)
        raise ValueError(text)


def _failure(error: Exception | None) -> tuple[int, str] | None:
    """Return (errno or 0, what went wrong) as other ranks are told, or None."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return error.errno or 5, error.strerror or str(error)
    if isinstance(error, ValueError):
        return 0, str(error)
    return 0, f"{type(error).__name__}: {error}"


class Writer:
    """Writes checkpoints while training continues, one at a time."""

    def __init__(self) -> None:
        # the write that nobody has waited for yet: there is one on every rank, or on none
        self.pending: Writing | None = None
        self.warned: set[Path] = set()  # damaged checkpoints that a line was printed about

    def begin(self, write: Writing) -> None:
        """Start a write; `finish` raises its errors. The exit of the process waits for it too."""
        self.pending = write
        atexit.register(self._at_exit)
        write.start()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if there is one, is whole. All ranks call it.

        OSError (a full disk) or ValueError on every rank if it failed on any: then nothing is left of it, and
        the checkpoints before it are as they were.
        """
        write = self._take()
        if write is not None:
            complete(write)

    def poll(self) -> None:
        """Raise the errors of `finish` now, without a wait, if the write failed on any rank.

        All ranks call it: `Strategy.grad` does, so that no run trains for long after a checkpoint that does
        not exist.
        """
        write = self.pending
        if write is None:
            return
        failed = write.error is not None or write.late is not None
        if any(dist.all_gather_object(failed)):
            self.finish()

    def _take(self) -> Writing | None:
        write = self.pending
        self.pending = None
        atexit.unregister(self._at_exit)
        return write

    def _at_exit(self) -> None:
        """Finish without the other ranks, which may be anywhere by now."""
        write = self._take()
        if write is None:
            return
        write.written.wait()
        write.join(_EXIT)
        write.stop.set()
        write.join()

        if write.error is not None or (write.rank == 0 and write.tmp.exists()):
            _, why = _failure(write.error) or (0, "not all ranks wrote their part")
            print(printable(f"error: checkpoint {write.path} was not saved: {why}"), file=sys.stderr)
            shutil.rmtree(write.tmp, ignore_errors=True)
        elif write.late is not None:
            print(f"error: older checkpoints could not be deleted: {write.late}", file=sys.stderr)


def complete(write: Writing) -> None:
    """Wait for a write that has started, and raise what went wrong on every rank."""
    what = f": checkpoint {write.path} was not saved, those before it are whole"
    try:
        write.written.wait()
        agree(write.error, what)
        write.join()
        agree(write.error, what)
    except (OSError, ValueError):
        write.stop.set()
        write.join()
        shutil.rmtree(write.tmp, ignore_errors=True)
        raise
    agree(write.late, f": checkpoint {write.path} is saved, but older ones could not be deleted")
