"""Weights through a folder of safetensors, which a server reads by its path."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from rft_fn.engine.transport.bucket import Bucket, tensors
from rft_fn.engine.transport.send import Receipt

__all__ = ["Folder", "read_folder"]

INDEX = "model.safetensors.index.json"


class Folder:
    """A channel into ROOT/version_N_ID, a folder that is whole or absent.

    ROOT/latest always points to the last. `tell` is called with the path of each new folder, and returns what
    the server there took, where it counts; without it the receipt is that of the files. The folder before the
    last stays, because a server may still read it; older ones are deleted.
    """

    def __init__(self, root: str | Path, tell: Callable[[Path], Receipt | None] | None = None):
        self.root = Path(root)
        self.tell = tell

    def begin(self, version: int, /) -> None:
        self.name = f"version_{version:08d}_{uuid.uuid4().hex[:8]}"
        self.part = self.root / f".{self.name}.part"
        self.part.mkdir(parents=True)
        self.files: dict[str, str] = {}  # the file of each tensor
        self.bytes = 0

    def put(self, bucket: Bucket) -> None:
        from safetensors.torch import save_file

        file = f"model-{len(set(self.files.values())):05d}.safetensors"
        found = {name: x.cpu() for name, x in tensors(bucket)}
        save_file(found, self.part / file, metadata={"format": "pt"})
        self.files |= dict.fromkeys(found, file)
        self.bytes += sum(entry.size for entry in bucket.entries)

    def end(self, error: str, /) -> list[Receipt]:
        if error:
            shutil.rmtree(self.part)
            return []
        index = {"metadata": {"total_size": self.bytes}, "weight_map": self.files}
        (self.part / INDEX).write_text(json.dumps(index))
        path = self.root / self.name
        self.part.rename(path)
        before = self._point_to(path)
        receipt = Receipt(len(self.files), self.bytes)
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
                shutil.rmtree(path)


def read_folder(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder by name, one file open at a time."""
    from safetensors import safe_open

    path = Path(path).resolve()  # of `latest`, which may point elsewhere before the last file is read
    files = json.loads((path / INDEX).read_text())["weight_map"]
    for file in dict.fromkeys(files.values()):
        with safe_open(path / file, framework="pt") as found:
            for name in found.keys():  # noqa: SIM118 - not a dict
                yield name, found.get_tensor(name)
