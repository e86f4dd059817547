"""What a look at all rows found, kept on disk: the next start reads it instead of looking again.

A file is named by a digest of all that it depends on: the bytes of the rows, the tokenizer with its chat
template, the options, this package's source, and the libraries' versions. What cannot be described so is
looked at in every start: rows in memory, media (which have a cache of their own), code of strangers. A file
that is damaged, or of somebody else, is made again. The folder is `rows` in that of the models,
`$RFT_FN_CACHE` or `~/.cache/rft_fn`.
"""

import fcntl
import functools
import hashlib
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch

from rft_fn import border
from rft_fn.cache_folder import cache_dir
from rft_fn.data.table import Table, content_of
from rft_fn.data.template_variables import fixed_day

__all__ = ["Looked", "described", "held", "key_of", "locked", "read", "write"]

_LEAST = 500  # rows, below which a look takes well under a second
_DAYS = 60  # that a file is kept without being read
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow", "numpy")


class Looked(NamedTuple):
    """What a look at all rows found, of rows that can be used."""

    kept: Any  # [N] int64, the numbers of the rows that items are made of
    marks: bytes  # of each item 4 bytes of its row, 4 of all of it
    digest: str  # of all items
    warnings: tuple[str, ...]
    survey: Any = None  # what the survey saw


# ---------- the name of a file: a digest of all that it depends on


class _Unknown(Exception):
    """Something that has no description."""


def key_of(rows: Table, name: str, recipe: Any, survey: Any = None) -> str | None:
    """Return the digest of all that a look at rows depends on; None where some of it is not known.

    None too for a few rows, and for a model that reads media. `survey` is a `Survey` of the recipe, if any.
    """
    if len(rows) < _LEAST or recipe.chat.processing is not None:
        return None
    content = content_of(rows)
    asked = "" if survey is None else survey.key()
    if content is None or asked is None:
        return None
    options = described(recipe)
    if options is None:
        return None
    day = str(_day_of(recipe.chat.tokenizer))
    return _digest(repr([_environment(), content, len(rows), name, day, asked, options]))


def _digest(text: str | bytes) -> str:
    return hashlib.blake2b(text if isinstance(text, bytes) else text.encode(), digest_size=16).hexdigest()


@functools.cache
def _environment() -> str:
    """Return the digest of this package's source, with the versions of what it renders and tokenises with."""
    root = Path(__file__).resolve().parents[1]
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)} {_digest(path.read_bytes())}\n".encode())
    for library in _LIBRARIES:
        try:
            found.update(f"{library} {version(library)}\n".encode())
        except PackageNotFoundError:
            found.update(f"{library}\n".encode())
    return f"{platform.python_version()} {found.hexdigest()}"


def _day_of(tokenizer: Any) -> date | None:
    """Return the day that a chat template writes, None where it asks for none."""
    asks = "strftime_now" in str(tokenizer.chat_template)
    return (fixed_day() or date.today()) if asks else None


def described(x: Any) -> str | None:
    """Return a text that differs for other options or functions; None for a stranger's."""
    try:
        return repr(_described(x))
    except _Unknown:
        return None


def _described(x: Any) -> Any:
    """Return plain values whose `repr` is the same for equal options. _Unknown for code of strangers."""
    if x is None or isinstance(x, (str, int, float, bytes)):
        return (type(x).__name__, x)
    if isinstance(x, Mapping):
        return [type(x).__name__, *([_described(name), _described(y)] for name, y in x.items())]
    if isinstance(x, (set, frozenset)):
        return ["set", *sorted(map(repr, map(_described, x)))]
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return ["list", *map(_described, x)]
    if is_dataclass(x) and _is_ours(type(x)):
        return [_name(type(x)), *(_described(getattr(x, field.name)) for field in fields(x))]
    if isinstance(x, functools.partial):
        return ["partial", _described(x.func), _described(x.args), _described(x.keywords)]
    if isinstance(x, MethodType):
        return ["method", _described(x.__self__), x.__name__]
    if isinstance(x, FunctionType) and _is_ours(x) and x.__closure__ is None:
        return [_name(x), x.__code__.co_firstlineno, _described(x.__defaults__)]
    if isinstance(x, itertools.count):
        return "count"
    if hasattr(x, "backend_tokenizer"):
        return _of_tokenizer(x)
    raise _Unknown


def _is_ours(x: Any) -> bool:
    return x.__module__.startswith("rft_fn.") and not x.__module__.startswith("rft_fn.user_files")


def _name(x: Any) -> str:
    return f"{x.__module__}.{x.__qualname__}"


_NO_MATTER = {
    "name_or_path", "_tokenizer", "init_kwargs", "tokenizer_file", "vocab_file", "deprecation_warnings",
    "files_loaded", "verbose", "is_local", "local_files_only",
}  # fmt: skip


def _of_tokenizer(tokenizer: Any) -> Any:
    """Return the description of a tokenizer of transformers, all of it but where it comes from."""
    if not type(tokenizer).__module__.startswith("transformers."):
        raise _Unknown  # a stranger's code, which may do anything with a text
    options = [
        {name: x for name, x in given.items() if name not in _NO_MATTER}
        for given in (tokenizer.init_kwargs, vars(tokenizer))
    ]
    about = [_name(type(tokenizer)), tokenizer.chat_template, tokenizer.special_tokens_map, options]
    return [
        _digest(tokenizer.backend_tokenizer.to_str()),
        _digest(json.dumps(about, sort_keys=True, default=_of_token)),
    ]


def _of_token(x: Any) -> str:
    """Return the description of a special token among a tokenizer's options."""
    if type(x).__name__ == "AddedToken":
        return repr(x)
    raise _Unknown


# ---------- files


def _folder() -> Path:
    return cache_dir() / "rows"


@contextmanager
def locked(key: str) -> Iterator[bool]:
    """Let one process of this machine at a time into the block; all of them, told by False, without locks.

    Who waited finds what the first one has written. The lock of a process that dies is released.
    """
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f".{key}.lock").open("w")
    except OSError:  # no folder that can be written
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone


def read(key: str, count: int) -> Looked | None:
    """Return what is kept under a key of `count` rows; None for nothing, and for a damaged file."""
    found = _tensors(key)
    if found is None:
        return None
    tensors, about = found
    try:
        kept, marks = tensors["kept"].numpy(), tensors["marks"].numpy()
        if kept.dtype != np.int64 or marks.dtype != np.uint8 or marks.size != 8 * kept.size or not kept.size:
            return None
        if kept[0] < 0 or kept[-1] >= count or (np.diff(kept) <= 0).any():
            return None
        warnings = tuple(border.entries("warnings", about["warnings"], None))
        return Looked(kept, marks.tobytes(), str(about["digest"]), warnings, about["survey"])
    except (KeyError, TypeError, ValueError):
        return None


def write(key: str, looked: Looked) -> None:
    """Keep what was found, where the folder can be written; files that nobody reads any more go."""
    marks = torch.frombuffer(bytearray(looked.marks), dtype=torch.uint8)
    tensors = {"kept": torch.from_numpy(np.asarray(looked.kept, dtype=np.int64)), "marks": marks}
    about = {"digest": looked.digest, "warnings": looked.warnings, "survey": looked.survey}
    _save(key, tensors, about)


def _sum_of(tensors: Mapping[str, torch.Tensor], about: str) -> str:
    found = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].numpy().data)
    return found.hexdigest()


def _tensors(key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return the tensors of a file, mapped into memory, and what it tells beside them; None if damaged."""
    from safetensors import SafetensorError, safe_open

    path = _folder() / f"{key}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
        if told["key"] != key or told["sum"] != _sum_of(tensors, told["about"]):
            return None
        with suppress(OSError):
            os.utime(path)  # it was read today
        return tensors, border.object_of("about", border.read_json(told["about"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _save(key: str, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    text = json.dumps(about)
    told = {"key": key, "about": text, "sum": _sum_of(tensors, text)}
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            file = Path(own) / "whole.safetensors"
            save_file(tensors, file, metadata=told)
            file.rename(folder / f"{key}.safetensors")
        for path in folder.iterdir():
            if path.is_file() and time.time() - path.stat().st_mtime > 86400 * _DAYS:
                path.unlink(missing_ok=True)
    except OSError:  # a full disk, or a folder of somebody else: the next start looks again
        return


def held(key: str, make: Any) -> Any:
    """Return an array of numbers that depends on nothing but `key`, kept under it."""
    key = _digest(f"{_environment()} {key}")
    found = _tensors(key)
    if found is None or "numbers" not in found[0]:
        found = ({"numbers": torch.from_numpy(np.asarray(make(), dtype=np.int64))}, {})
        _save(key, found[0], found[1])
    return found[0]["numbers"].numpy()
