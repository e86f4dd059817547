"""The content of a medium, as a file or a row stores it, and its digest."""

import base64
import binascii
import hashlib
import json
import os
import tempfile
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rft_fn.data.media.medium import Medium, label

__all__ = ["Cache", "Content", "Encoded", "digest", "name_of", "read"]


# ---------- the content of a medium, as a file or a row stores it, and its digest


Content = Any
"""Bytes of a file, an array, an image of PIL, (array, rate) of an audio, or a list of contents of frames."""

_SECONDS = 30  # that a URL may take
_MOST = 1 << 28  # bytes of a file or a URL


def read(medium: Medium, *, urls: bool = False) -> Content:
    """The content of a medium, not yet decoded.

    Relative paths begin from the folder of the medium, and all must stay inside of it. A URL is fetched only
    with `urls`. ValueError for a source that is none, for a path outside, and for a file that is missing,
    empty or larger than 256 MiB.
    """
    return _read(medium.source, medium.kind, medium.folder, urls)


def _read(source: Any, kind: str, folder: Path | None, urls: bool) -> Content:
    if isinstance(source, (str, Path)):
        return _named(str(source), folder, urls)
    if isinstance(source, Mapping):
        return _mapped(source, kind, folder, urls)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _filled(bytes(source), "it")
    if kind == "video" and isinstance(source, (list, tuple)):
        return [_read(frame, "image", folder, urls) for frame in source]
    if hasattr(source, "convert"):  # an image of PIL
        return source
    if hasattr(source, "detach"):
        return source.detach().cpu().numpy()
    if isinstance(source, (list, tuple)):
        return _array(source)
    if isinstance(source, np.ndarray):
        return source
    raise ValueError(f"expected a path, bytes or an array, got {type(source).__name__}")


def _mapped(source: Mapping[str, Any], kind: str, folder: Path | None, urls: bool) -> Content:
    """The content of an object, such as {"bytes", "path"} or {"array", "sampling_rate"}."""
    given = {name: x for name, x in source.items() if x is not None}
    if "bytes" in given:
        return _read(given["bytes"], kind, folder, urls)
    if "array" in given:
        if "sampling_rate" not in given:
            raise ValueError("expected 'sampling_rate' beside 'array', got none")
        return _array(given["array"]), _rate(given["sampling_rate"])
    for name in ("path", "url", kind):
        if name in given:
            return _read(given[name], kind, folder, urls)
    for name in ("data", "base64"):
        if name in given:
            return _decoded(given[name])
    known = ", ".join(map(repr, source))
    raise ValueError(f"expected an object with 'bytes' or 'path', got one with {known or 'nothing'}")


def _rate(x: Any) -> int:
    try:
        if int(x) == float(x):
            return int(x)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"expected 'sampling_rate' as a whole number of Hz, got {x!r:.40}")


def _array(x: Any) -> np.ndarray:
    try:
        return np.asarray(x, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("expected an array of numbers, got a list of other things") from None


def _named(text: str, folder: Path | None, urls: bool) -> bytes:
    """The bytes that a text names: a data URI, a URL or a path."""
    if text.startswith("data:"):
        return _decoded(text.partition(",")[2])
    if text.startswith(("http://", "https://")):
        if not urls:
            raise ValueError(f"{text} is a URL, which is not fetched without --media-urls")
        return _fetched(text)
    return _file(_inside(text.removeprefix("file://"), folder))


def _decoded(text: Any) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise ValueError(f"expected base64, got {type(text).__name__}")
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected base64, got {error}") from None
    return _filled(found, "it")


def _inside(text: str, folder: Path | None) -> Path:
    """The path that a text names, without links. ValueError for one outside of the folder."""
    if folder is None:
        raise ValueError(f"{text} is a path, and the rows come from no folder: give --media-folder")
    if "\0" in text:
        raise ValueError(f"expected a path, got {text!r:.80}")
    base = os.path.abspath(folder)
    named = os.path.abspath(os.path.join(base, os.path.expanduser(text)))
    found = os.path.realpath(named)
    if os.path.commonpath([base, named]) != base:
        raise ValueError(f"{text} is outside of the data's folder {base}: --media-folder names another")
    if os.path.commonpath([os.path.realpath(base), found]) != os.path.realpath(base):
        raise ValueError(
            f"{text} is a link to {found}, outside of the data's folder {base}: --media-folder names another"
        )
    return Path(found)


def _file(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MOST:
            raise ValueError(f"{path} has {size} bytes, above {_MOST}")
        return _filled(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def _fetched(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as response:
            found = response.read(_MOST + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ValueError(f"{url} could not be fetched: {getattr(error, 'reason', error)}") from None
    if len(found) > _MOST:
        raise ValueError(f"{url} has more than {_MOST} bytes")
    return _filled(found, url)


def _filled(found: bytes, what: str) -> bytes:
    if not found:
        raise ValueError(f"{what} is empty, 0 bytes")
    return found


def digest(content: Content) -> str:
    """A hash of a content: equal bytes or numbers have equal ones."""
    found = hashlib.blake2b(digest_size=16)
    _add(found, content)
    return found.hexdigest()


def _add(found: Any, content: Content) -> None:
    if isinstance(content, bytes):
        found.update(content)
    elif isinstance(content, (list, tuple)):
        for x in content:
            found.update(digest(x).encode())
    elif isinstance(content, np.ndarray):
        found.update(f"{content.dtype} {content.shape}".encode())
        found.update(np.ascontiguousarray(content).tobytes())
    elif hasattr(content, "tobytes"):  # an image of PIL
        found.update(f"{content.mode} {content.size}".encode())
        found.update(content.tobytes())
    else:
        found.update(repr(content).encode())


def name_of(medium: Medium, content: Content) -> str:
    """A name for a medium: its file, URL or given name, else its kind and the begin of its digest."""
    return label(medium.source) or f"{medium.kind}-{digest(content)[:12]}"


# ---------- what a processor made of media, kept by its content


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
