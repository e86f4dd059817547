"""A copy of a run's folder at an address of fsspec (s3://, gs://, file://), made during training.

ADDRESS/complete.json        the checkpoint that is whole there, with the bytes of its files; written last
        checkpoints/step_N/  that checkpoint, and while the next one arrives that one too
        config.json ...      the other files of the folder

A checkpoint is there or it is not: what complete.json does not name is never read.
"""

import json
import os
import re
import shutil
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from rft_fn import border, ckpt
from rft_fn.run.earlier_run import begun, checkpoints
from rft_fn.run.files import write_whole
from rft_fn.text import error_text, printable

__all__ = ["Mirror", "check", "fetch"]


_POINTER = "complete.json"
_NAME = ".mirror"  # in the folder: the name of the run there, by which it is known again
_SENT = ".mirror_sent"  # in the folder: links to the files that are sent, which may be deleted meanwhile
_LAST = 600.0  # seconds that the end of a run waits for what is not there yet
_LOOK = 1.0  # seconds between two looks for a checkpoint that is whole
_AGAIN = 60.0  # seconds until what failed is tried again


def fetch(folder: Path, address: str) -> None:
    """Get the run that is at an address into a folder that has no checkpoint, before anything reads it.

    ValueError for an address that cannot be read and written, for another run there than the folder's, and
    for a checkpoint there that is newer than those of the folder.
    """
    fs, root = _opened(address)
    own = folder / _NAME
    run = own.read_text() if own.exists() else ""
    found = _whole(fs, root, address)
    if found is not None:
        newest = ckpt.steps(checkpoints(folder))[-1:]
        if found["run"] != run and (run or newest or begun(folder)):
            raise ValueError(
                f"mirror: expected the run of {folder} at {address}, got another one; choose another address "
                "or another folder"
            )
        if newest and _number(newest[0].name) < _number(found["step"]):
            raise ValueError(
                f"mirror: {address} has {found['step']}, and {folder} has {newest[0].name}: delete the "
                "checkpoints of the folder to go on from the newer one, or choose another address"
            )
        if not newest:
            _get(folder, fs, root, address, found)
        run = found["run"]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(own, run or uuid.uuid4().hex)


def check(address: str) -> None:
    """Raise ValueError for an address that cannot be written, or whose package is missing."""
    _opened(address)


def _opened(address: str) -> tuple[Any, str]:
    """Return (the file system, the folder in it) of an address that can be written."""
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(address)
        root = root.rstrip("/")
        fs.makedirs(root, exist_ok=True)
        probe = f"{root}/.probe_{uuid.uuid4().hex[:8]}"
        fs.pipe_file(probe, b"rft_fn")
        fs.rm_file(probe)
    except Exception as error:  # of any file system
        raise ValueError(f"mirror: {address} cannot be written: {error_text(error)}") from error
    return fs, root


def _whole(fs: Any, root: str, address: str) -> dict[str, Any] | None:
    """Return what complete.json says, or None where nothing is whole. ValueError where it is damaged."""
    path = f"{root}/{_POINTER}"
    try:
        if not fs.exists(path):
            return None
        found = border.object_of("complete.json", border.read_json(fs.cat_file(path)))
        border.text("run", found.get("run"))
        if not re.fullmatch(r"step_\d+", border.text("step", found.get("step"))):
            raise ValueError(f"step: expected step_N, got {border.quoted(found['step'])}")
        for name, size in border.object_of("files", found.get("files")).items():
            border.integer(f"files[{border.quoted(name)}]", size, low=0)
            if "/" in name or not _plain(name):
                raise ValueError(f"files: expected names of files, got {border.quoted(name)}")
    except Exception as error:  # of any file system
        raise ValueError(f"mirror: {address}/{_POINTER} cannot be read: {error_text(error)}") from error
    return found


def _number(step: str) -> int:
    return int(step.removeprefix("step_"))


def _plain(name: str) -> bool:
    """Return whether a name is that of a file of a run: nothing hidden, and nothing above the folder."""
    return not any(part.startswith(".") or not part for part in name.split("/"))


def _get(folder: Path, fs: Any, root: str, address: str, found: dict[str, Any]) -> None:
    """Download a whole checkpoint and the files around it; it appears last, by one rename."""
    print(f"mirror: getting {found['step']} from {address}", flush=True)
    target = checkpoints(folder) / found["step"]
    part = target.with_name(f".{target.name}.mirror")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for path in fs.find(root):
            name = path.removeprefix(f"{root}/")
            if _plain(name) and name != _POINTER and not name.startswith("checkpoints/"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(path, str(folder / name))
        for name, size in found["files"].items():
            fs.get_file(f"{root}/checkpoints/{target.name}/{name}", str(part / name))
            if (got := (part / name).stat().st_size) != size:
                raise OSError(f"{target.name}/{name}: expected {size} bytes, got {got}")
    except Exception as error:  # of any file system
        shutil.rmtree(part, ignore_errors=True)
        raise ValueError(f"mirror: {address} cannot be read: {error_text(error)}") from error
    os.replace(part, target)


class Mirror:
    """Sends each checkpoint of a run's folder to an address, in a thread.

    A checkpoint is left out where a newer one is there before it is sent.
    """

    def __init__(self, folder: Path, address: str):
        """Begin to send, after `fetch`."""
        self._folder = folder
        self._address = address
        self._fs, self._root = _opened(address)
        found = _whole(self._fs, self._root, address)
        self._step = found["step"] if found else ""  # the checkpoint that is whole there
        self._there: dict[str, tuple[int, int]] = {}  # bytes and time of files, as they were sent
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send_each, name="mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is not there yet, for ten minutes at most, and stop."""
        self._ending.set()
        self._thread.join(_LAST)
        if self._thread.is_alive():
            _warn(f"{self._address} is not whole after {_LAST:g} s; it has {self._step or 'no checkpoint'}")

    def _send_each(self) -> None:
        """Send the newest checkpoint whenever there is another one, and all files once more at the end."""
        failed = -_AGAIN  # when
        ending = False
        while not ending:
            ending = self._ending.wait(_LOOK)
            newest = ckpt.steps(checkpoints(self._folder))[-1:]
            due = bool(newest) and newest[0].name != self._step and time.monotonic() > failed + _AGAIN
            if not ending and not due:
                continue
            try:
                self._send(newest[0] if newest else None)
            except Exception as error:  # of any file system: the run goes on
                failed = time.monotonic()
                named = newest[0].name if newest else "the folder"
                _warn(f"{named} is not at {self._address}: {error_text(error)}")

    def _send(self, checkpoint: Path | None) -> None:
        """Send a checkpoint and the files around it, then name it, then delete those before it."""
        linked = self._folder / _SENT
        shutil.rmtree(linked, ignore_errors=True)
        try:
            files = self._linked(linked, checkpoint)
            for name, source in files.items():
                about = source.stat()
                mark = (about.st_size, about.st_mtime_ns)
                if self._there.get(name) != mark:
                    self._put(source, name)
                    self._there[name] = mark
            if checkpoint is not None:
                self._name(checkpoint, linked)
        finally:
            shutil.rmtree(linked, ignore_errors=True)

    def _linked(self, linked: Path, checkpoint: Path | None) -> dict[str, Path]:
        """Return the files to send by their names at the address, those of the checkpoint as links."""
        files: dict[str, Path] = {}
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if not name.startswith("checkpoints/") and _plain(name) and path.is_file():
                files[name] = path
        if checkpoint is not None:
            linked.mkdir()
            for path in sorted(checkpoint.iterdir()):
                try:
                    os.link(path, linked / path.name)
                except OSError:  # a file system without links
                    shutil.copyfile(path, linked / path.name)
                files[f"checkpoints/{checkpoint.name}/{path.name}"] = linked / path.name
        return files

    def _put(self, source: Path, name: str) -> None:
        target = f"{self._root}/{name}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(source), target)

    def _name(self, checkpoint: Path, linked: Path) -> None:
        """Write which checkpoint is whole, and delete the others."""
        sizes = {path.name: path.stat().st_size for path in linked.iterdir()}
        about = {"run": (self._folder / _NAME).read_text(), "step": checkpoint.name, "files": sizes}
        pointer = linked / _POINTER
        pointer.write_text(json.dumps(about))
        self._put(pointer, _POINTER)
        self._step = checkpoint.name
        for path in self._fs.ls(f"{self._root}/checkpoints", detail=False):
            if path.rstrip("/").rpartition("/")[2] != checkpoint.name:
                self._fs.rm(path, recursive=True)
        self._there = {n: x for n, x in self._there.items() if not n.startswith("checkpoints/")}


def _warn(text: str) -> None:
    print(printable(f"warning: mirror: {text}"), file=sys.stderr, flush=True)
