"""Checks weights that an engine loads, and writes folders of safetensors that servers read them from.

A folder is written whole or not at all, one for each load.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.types.engine import Delivered

__all__ = [
    "TIED", "LoadCheck", "Manifest", "Writer", "manifest", "read", "remove",
    "remove_all", "tied", "with_tied",
]  # fmt: skip


INDEX = "model.safetensors.index.json"  # {"weight_map": {name: file}}, as transformers writes it
TIED = "rft_tied.json"  # {a tied name: the name that its tensor was sent by}
KEPT = "kept"  # begins the names of files that are the same in every load
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
        self.prefix = "model"  # of the files' names
        self.files: dict[str, str] = {}  # the file of each tensor

    def add(self, name: str, x: Tensor) -> OSError | None:
        """Take a copy of one tensor. Returns the error of a disk that is full."""
        self.bucket[name] = x.detach().to("cpu", copy=True).contiguous()
        self.bytes += x.numel() * x.element_size()
        return self.end_file() if self.bytes >= BUCKET else None

    def end_file(self) -> OSError | None:
        """Begin another file. Returns the error of a disk that is full."""
        try:
            self._flush()
        except OSError as error:
            return error
        return None

    def add_kept(
        self,
        names: Collection[str],
        before: Path | None,
        tensors: Callable[[Collection[str]], Iterable[tuple[str, Tensor]]],
    ) -> OSError | None:
        """Take what is the same in every load, into separate files.

        They are links to the files of the folder `before`, where it has kept just these names; else
        `tensors(names)` are written. Returns the error of a disk that is full.
        """
        problem = self.end_file()
        if problem or self._link(names, before):
            return problem
        self.prefix = KEPT
        for name, x in tensors(names):
            problem = problem or self.add(name, x)
        problem = problem or self.end_file()
        self.prefix = "model"
        return problem

    def _link(self, names: Collection[str], before: Path | None) -> bool:
        """Link the files of these names from another folder; return whether it has them all."""
        if before is None:
            return False
        try:
            index = json.loads((before / INDEX).read_text())["weight_map"]
            kept = {name: file for name, file in index.items() if file.startswith(KEPT)}
            if kept.keys() != set(names):
                return False
            for file in sorted(set(kept.values())):
                os.link(before / file, self.part / file)
        except OSError:  # a disk without hard links, or a folder that is gone
            for path in self.part.glob(f"{KEPT}-*"):
                path.unlink()
            return False
        self.files |= kept
        return True

    def discard(self) -> None:
        """Delete what was written."""
        remove(self.part)
        remove(self.folder)

    def finish(self, tied: Mapping[str, str]) -> None:
        """Put the folder in its place."""
        self._flush()
        (self.part / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self.files}))
        (self.part / TIED).write_text(json.dumps(dict(tied)))
        remove(self.folder)
        os.replace(self.part, self.folder)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if self.bucket:
            file = f"{self.prefix}-{len(set(self.files.values())):05d}.safetensors"
            save_file(self.bucket, str(self.part / file), metadata={"format": "pt"})
            self.files |= dict.fromkeys(self.bucket, file)
        self.bucket = {}
        self.bytes = 0


def read(folder: str | Path, *, tied: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder, one in memory at a time; with `tied` by each further name as well."""
    found = _stored(Path(folder))
    return with_tied(folder, found) if tied else found


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                yield name, torch.as_tensor(file.get_tensor(name))


def with_tied(folder: str | Path, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by all of their names, as a folder says them."""
    aliases: dict[str, list[str]] = {}
    for alias, name in json.loads(Path(folder, TIED).read_text()).items():
        aliases.setdefault(name, []).append(alias)
    for name, x in tensors:
        for each in (name, *aliases.get(name, ())):
            yield each, x


def tied(required: Mapping[str, Collection[str]], sent: Collection[str]) -> dict[str, str]:
    """Return the aliases of tied weights: unsent name -> sent name; `required` is a Manifest's."""
    aliases = {}
    for names in required.values():
        by = sorted(name for name in names if name in sent)
        if by:
            aliases |= {name: by[0] for name in sorted(names) if name not in sent}
    return aliases


def remove(folder: Path) -> None:
    """Delete a folder, if it is there."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def remove_all(folders: Iterable[Path]) -> None:
    """Delete the folders that are there."""
    for folder in folders:
        remove(folder)


# ---------- loaded weights, checked against the model of an engine: shared by all engines


class Manifest(NamedTuple):
    """The weights of a model: which may arrive, and which must."""

    shape: dict[str, torch.Size]  # by name, with every name of a tied weight, and the buffers
    required: dict[str, frozenset[str]]  # each parameter, with all names that it is known by


def manifest(module: nn.Module) -> Manifest:
    """Return the Manifest of a module. Parameters must arrive, by any name of a tied one; buffers may."""
    names: dict[int, list[str]] = {}
    shape = {name: x.shape for name, x in module.named_buffers()}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
        shape[name] = p.shape
    return Manifest(shape, {tied[0]: frozenset(tied) for tied in names.values()})


class LoadCheck:
    """Counts the tensors of one load, and refuses unknown, misshapen and missing ones."""

    def __init__(self, expected: Manifest, weights: Iterable[tuple[str, Tensor]]):
        """`weights.frozen`, where there is such an attribute, names weights that need not arrive."""
        self.expected = expected
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))
        self.names: set[str] = set()
        self.bytes = 0
        self.began = time.perf_counter()

    def take(self, name: str, x: Tensor) -> None:
        """Count one tensor. ValueError for a name or shape that the model lacks, or a repeated name."""
        if name in self.names:
            raise ValueError(f"weights: {name}: expected each name once, got it twice")
        want = self.expected.shape.get(name)
        if want is None:
            raise ValueError(f"weights: {name}: expected a parameter of the model, got {list(x.shape)}")
        if want != x.shape:
            raise ValueError(f"weights: {name}: expected {list(want)}, got {list(x.shape)}")
        self.names.add(name)
        self.bytes += x.numel() * x.element_size()

    def unsent(self) -> set[str]:
        """Return the weights that did not arrive because they never change, each by one of its names."""
        known = self.expected.required.items()
        return {name for name, tied in known if tied & self.frozen and not tied & self.names}

    def finish(self, version: int) -> Delivered:
        """Return the record of the load. ValueError for a weight that has not arrived and is not frozen."""
        present = self.names | self.frozen
        missing = [name for name, tied in self.expected.required.items() if not tied & present]
        if missing:
            count = len(self.expected.required)
            raise ValueError(
                f"weights: {missing[0]}: expected it among the {count} weights of the engine's model, got "
                f"{len(self.names)} without it ({len(missing)} missing in all); load a whole model, or an "
                "export that has not been read yet"
            )
        return Delivered(len(self.names), self.bytes, time.perf_counter() - self.began, version)
