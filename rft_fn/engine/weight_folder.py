"""Weights in a folder of safetensors, which servers read from a path: written whole or not at all."""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["TIED", "Writer", "read", "remove", "tied"]

TIED = "rft_tied.json"  # {a tied name: the name that its tensor was sent by}
BUCKET = 1 << 30  # bytes of one file


class Writer:
    """Writes the tensors of one load, a file for each BUCKET of bytes."""

    def __init__(self, folder: Path):
        """`folder` appears when `finish` is called."""
        self.folder = folder
        self.part = folder.with_name(folder.name + ".part")
        remove(self.part)
        self.part.mkdir(parents=True)
        self.bucket: dict[str, Tensor] = {}
        self.bytes = 0
        self.files = 0

    def add(self, name: str, x: Tensor) -> OSError | None:
        """Take one tensor; it is copied. Returns the error of a disk that is full."""
        self.bucket[name] = x.detach().to("cpu", copy=True).contiguous()
        self.bytes += x.numel() * x.element_size()
        if self.bytes >= BUCKET:
            try:
                self._flush()
            except OSError as error:
                return error
        return None

    def discard(self) -> None:
        """Delete what was written."""
        remove(self.part)
        remove(self.folder)

    def finish(self, tied: Mapping[str, str]) -> None:
        """Put the folder in its place."""
        self._flush()
        (self.part / TIED).write_text(json.dumps(dict(tied)))
        remove(self.folder)
        os.replace(self.part, self.folder)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if self.bucket:
            save_file(self.bucket, str(self.part / f"model-{self.files:05d}.safetensors"))
        self.files += 1
        self.bucket = {}
        self.bytes = 0


def read(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder, one in memory at a time, and each tied name as well."""
    from safetensors import safe_open

    aliases: dict[str, list[str]] = {}
    for alias, name in json.loads(Path(folder, TIED).read_text()).items():
        aliases.setdefault(name, []).append(alias)
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                x = torch.as_tensor(file.get_tensor(name))
                yield name, x
                for alias in aliases.get(name, ()):
                    yield alias, x


def tied(required: Mapping[str, Collection[str]], sent: Collection[str]) -> dict[str, str]:
    """{each name of a tied weight that was not sent: the one that was}; `required` is a Manifest's."""
    found = {}
    for names in required.values():
        by = sorted(name for name in names if name in sent)
        if by:
            found |= {name: by[0] for name in sorted(names) if name not in sent}
    return found


def remove(folder: Path) -> None:
    """Delete a folder, if it is there."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
