"""What a processor made of media, kept by its content."""

import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Cache", "Encoded"]

_MEMORY = 1 << 28  # bytes of tensors in memory


class Encoded(NamedTuple):
    """The tokens of a text with its media, and the processor's tensors of these."""

    ids: list[int]
    media: dict[str, Tensor]
    names: tuple[str, ...] = ()  # of the media
    notes: tuple[str, ...] = ()  # how media were changed


class Cache:
    """Encoded texts by key: the last ones in memory, all of them in a folder if there is one."""

    def __init__(self, folder: str | Path = "", *, memory: int = _MEMORY):
        self._folder = folder and Path(folder)
        self._memory = memory
        self._held: OrderedDict[str, Encoded] = OrderedDict()
        self._size = 0

    def get(self, key: str) -> Encoded | None:
        """What was put under a key, or None."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
            return found
        found = self._stored(key)
        if found is not None:
            self._hold(key, found)
        return found

    def put(self, key: str, encoded: Encoded) -> None:
        """Keep an encoded text."""
        self._hold(key, encoded)
        if self._folder:
            _write(Path(self._folder) / f"{key}.safetensors", encoded)

    def _hold(self, key: str, encoded: Encoded) -> None:
        """Keep it in memory; those that were not asked for the longest make room."""
        self._held[key] = encoded
        self._size += _bytes(encoded)
        while self._size > self._memory and len(self._held) > 1:
            _, gone = self._held.popitem(last=False)
            self._size -= _bytes(gone)

    def _stored(self, key: str) -> Encoded | None:
        from safetensors import SafetensorError, safe_open

        if not self._folder:
            return None
        path = Path(self._folder) / f"{key}.safetensors"
        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
        except (FileNotFoundError, SafetensorError):  # a file that is broken is made again
            return None
        ids = tensors.pop("ids").tolist()
        return Encoded(ids, tensors, tuple(about["names"]), tuple(about["notes"]))


def _bytes(encoded: Encoded) -> int:
    return sum(x.numel() * x.element_size() for x in encoded.media.values())


def _write(path: Path, encoded: Encoded) -> None:
    """Write a file whole, for other processes may read it."""
    from safetensors.torch import save_file

    tensors: Mapping[str, Tensor] = {"ids": torch.tensor(encoded.ids), **encoded.media}
    about = json.dumps({"names": encoded.names, "notes": encoded.notes})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    save_file({name: x.contiguous() for name, x in tensors.items()}, part, metadata={"about": about})
    os.replace(part, path)
