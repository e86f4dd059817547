"""Weights through a folder of safetensors, which a server reads by its path."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from rft_fn.engine import weight_folder
from rft_fn.engine.transport.bucket import Bucket, tensors
from rft_fn.engine.transport.send import Receipt

__all__ = ["Folder", "read_folder"]


class Folder:
    """A channel into ROOT/version_N_ID, a folder as of `weight_folder`, with a file for each bucket.

    ROOT/latest always points to the last. `tell` is called with the path of each new folder, and returns what
    the server there took, where it counts; without it the receipt is that of the files. The folder before the
    last stays, because a server may still read it; older ones are deleted.
    """

    def __init__(self, root: str | Path, tell: Callable[[Path], Receipt | None] | None = None):
        self.root = Path(root)
        self.tell = tell

    def begin(self, version: int, /) -> None:
        name = f"version_{version:08d}_{uuid.uuid4().hex[:8]}"
        self.writer = weight_folder.Writer(self.root / name)
        self.bytes = 0

    def put(self, bucket: Bucket) -> None:
        for name, x in tensors(bucket):
            problem = self.writer.add(name, x)
            if problem is not None:
                raise problem
        problem = self.writer.end_file()
        if problem is not None:
            raise problem
        self.bytes += sum(entry.size for entry in bucket.entries)

    def end(self, error: str, /) -> list[Receipt]:
        if error:
            self.writer.discard()
            return []
        self.writer.finish({})
        path = self.writer.folder
        before = self._point_to(path)
        receipt = Receipt(len(self.writer.files), self.bytes)
        if self.tell is not None:
            receipt = self.tell(path) or receipt
        self._delete_others({path, before})
        return [receipt]

    def _point_to(self, path: Path) -> Path:
        """Make `latest` point to a folder, in one step; returns the one that it pointed to."""
        latest = self.root / "latest"
        before = latest.resolve()
        link = self.root / f".latest.{uuid.uuid4().hex[:8]}"
        link.symlink_to(path.name)
        os.replace(link, latest)
        return before

    def _delete_others(self, kept: set[Path]) -> None:
        names = {path.name for path in kept}
        for path in self.root.glob("version_*"):
            if path.name not in names:
                weight_folder.remove(path)


def read_folder(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder by name, one in memory at a time."""
    # `latest` may point elsewhere before the last file is read
    return weight_folder.read(Path(path).resolve())
