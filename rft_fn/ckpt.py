"""Checkpoints: one folder holds the whole run, appears in one rename, and says what is wrong with it.

step_00000012/  tensors.safetensors   every tensor of {"state": ..., "extra": ...} by its path in the tree
                meta.json             every other leaf, the paths in order, the score, a digest of the tensors
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.types import TrainState

__all__ = ["latest", "restore", "rotate", "save", "steps"]

_FORMAT = 1
States = TrainState | Mapping[str, TrainState]  # several that are trained together, by name


def _each(state: States) -> list[TrainState]:
    return [state] if isinstance(state, TrainState) else list(state.values())


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as f:
        while block := f.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _split(x: Any) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    named = list(tree.leaves_with_path(x))
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in named:
        if isinstance(x, Tensor):
            x = x.detach().cpu().contiguous()
            at = x.untyped_storage().data_ptr()
            tensors[name] = x.clone() if at in seen else x  # the file format holds no shared memory
            seen.add(at)
    return tensors, {n: v for n, v in named if not isinstance(v, Tensor)}, [n for n, _ in named]


def save(path: str | Path, state: States, extra: Any = None, *, score: float | None = None) -> Path:
    """Write `state` and `extra` (a tree of tensors, numbers and strings) as the folder `path`, atomically.

    Several states that are trained together (an actor and its critic) are one dict of them, by name.
    Everything is written into a temporary folder beside it, flushed to the disk, and renamed: whoever is
    killed at any moment leaves no `path` or a whole one. An existing `path` is moved aside first, and deleted
    last (`latest` moves it back if a kill came between the two renames). ValueError for a leaf that JSON
    cannot hold; OSError (a full disk) leaves nothing behind.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors, plain, names = _split({"state": state, "extra": extra})
    tmp = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        save_file(tensors, tmp / "tensors.safetensors")
        meta = {"format": _FORMAT, "score": score, "names": names, "plain": plain}
        meta["step"] = max(x.step for x in _each(state))
        meta["digest"] = _digest(tmp / "tensors.safetensors")
        (tmp / "meta.json").write_text(json.dumps(meta))
        for file in (tmp / "tensors.safetensors", tmp / "meta.json", tmp):
            _sync(file)
        aside = path.with_name(f".{path.name}.old")
        if path.exists():
            os.rename(path, aside)
        os.rename(tmp, path)
        _sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except TypeError as error:
        raise ValueError(f"extra: expected tensors, numbers and strings: {error}") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return path


def _meta(path: Path) -> dict:
    try:
        meta = json.loads((path / "meta.json").read_text())
        if meta["format"] != _FORMAT:
            raise ValueError(f"format {meta['format']}, expected {_FORMAT}")
        return meta
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(_damaged(path, f"meta.json: {error}")) from error


def _damaged(path: Path, why: str) -> str:
    others = [s for s in steps(path.parent) if s != path]
    remedy = f"delete it to go on from {others[-1].name}" if others else "delete it to start again"
    return f"checkpoint {path} is damaged ({why}); {remedy}"


def _pick(name: str, like: Any, tensors: dict[str, Tensor], plain: dict[str, Any], path: Path) -> Any:
    if not isinstance(like, Tensor):
        return plain[name]
    x = tensors[name]
    if x.shape != like.shape or x.dtype != like.dtype:
        raise ValueError(
            f"checkpoint {path}: {name}: expected {list(like.shape)} {like.dtype}, got {list(x.shape)} "
            f"{x.dtype}: it is of another model or optimizer"
        )
    return x.to(like.device)


def _nested(named: dict[str, Any]) -> dict[str, Any]:
    """{"a/b": 1} -> {"a": {"b": 1}}"""
    out: dict[str, Any] = {}
    for name, value in named.items():
        *trail, last = name.split("/")
        inner = out
        for part in trail:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return out


def restore(path: str | Path, like: States, extra: Any = None) -> tuple[Any, Any]:
    """(state, extra) of the checkpoint at `path`: state in the structure of `like` (one, or a dict of them),
    extra in that of the `extra` given, or without one as nested dicts of what was saved (None if nothing).

    Parameters are copied into those of `like`, so that the module behind `apply` has them; `like` is donated.
    ValueError that names the folder and the remedy if it is damaged or of another model; then nothing has
    been changed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    meta, file = _meta(path), path / "tensors.safetensors"
    try:
        if _digest(file) != meta["digest"]:
            raise ValueError(_damaged(path, "tensors.safetensors: its digest does not match"))
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(_damaged(path, f"tensors.safetensors: {error}")) from error
    if extra is None:
        leaves = {n: tensors[n] if n in tensors else meta["plain"][n] for n in meta["names"]}
        extra = _nested({n: x for n, x in leaves.items() if n.startswith("extra/")}).get("extra")
    want = {"state": like, "extra": extra}
    named = list(tree.leaves_with_path(want))
    if [n for n, _ in named] != meta["names"]:
        odd = sorted(set(meta["names"]) ^ {n for n, _ in named})
        raise ValueError(
            f"checkpoint {path}: it is of another model, optimizer or run: {odd[:3]} "
            f"({len(odd)} names differ)"
        )
    values = [_pick(n, v, tensors, meta["plain"], path) for n, v in named]
    found = tree.unflatten_like(want, values)
    if isinstance(like, TrainState):
        return _adopt(like, found["state"]), found["extra"]
    return {name: _adopt(x, found["state"][name]) for name, x in like.items()}, found["extra"]


@torch.no_grad()
def _adopt(like: TrainState, found: TrainState) -> TrainState:
    """`found` in the memory of the parameters of `like`, which is donated."""
    for own, x in zip(like.params.values(), found.params.values()):
        own.copy_(x)
    state = tree.replace(found, params=tree.map(lambda x: x, like.params))
    tree.donate(like)
    return state


def steps(folder: str | Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first. Half-written ones have other
    names and are never among them."""
    folder = Path(folder)
    found = [p for p in folder.iterdir() if re.fullmatch(r"step_\d+", p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.split("_")[1]))


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint, or None. One that a killed `save` had moved aside, and not
    replaced yet, is moved back first."""
    for aside in Path(folder).glob(".step_*.old"):
        path = aside.with_name(aside.name.removeprefix(".").removesuffix(".old"))
        if not path.exists():
            with suppress(FileNotFoundError):  # another rank was faster
                os.rename(aside, path)
    return steps(folder)[-1] if steps(folder) else None


def _scores(paths: list[Path]) -> Iterator[tuple[float, Path]]:
    for p in paths:
        score = _meta(p)["score"]
        if score is not None:
            yield score, p


def rotate(folder: str | Path, *, keep: int, best: int = 0) -> list[Path]:
    """Delete all but the `keep` newest checkpoints and the `best` ones of the
    highest score; the deleted come back.

    Ties go to the later checkpoint. The newest is never deleted. Half-written folders of killed runs go too.
    """
    if keep < 1:
        raise ValueError(f"keep: expected >= 1, got {keep}")
    folder, paths = Path(folder), steps(folder)
    ranked = sorted(_scores(paths), key=lambda sp: (sp[0], int(sp[1].name.split("_")[1])), reverse=True)
    stay = {*paths[-keep:], *(p for _, p in ranked[:best])}
    gone = [p for p in paths if p not in stay]
    for p in gone:
        os.rename(p, p.with_name(f".{p.name}.gone"))  # a kill while files go must not leave half a checkpoint
    for p in folder.glob(".step_*.*"):
        if p.suffix != ".old":  # `latest` and `save` see to those
            shutil.rmtree(p, ignore_errors=True)
    return gone
