"""Checkpoints: one folder holds the whole run, appears in one rename, and says what is wrong with it.

step_00000012/  rank_00000.safetensors ...  what each rank wrote of the tensors of {"state", "extra"}, by
                                            their paths in the tree
                meta.json                   every other leaf, the paths in order, which file holds which part
                                            of which tensor, the score, digests of the files and of itself

One format for every backend: what some processes saved, any other number restores, sharded or not. All ranks
call these functions alike and see one file system. The planning is that of torch.distributed.checkpoint.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import dist, tree
from rft_fn.ckpt import shards, writing
from rft_fn.ckpt.folder import FORMAT, damaged, delete, latest, number, read_meta, steps, sum_of
from rft_fn.ckpt.writing import agree, finish
from rft_fn.types import TrainState

__all__ = ["finish", "latest", "read", "restore", "rotate", "save", "steps", "write"]

States = TrainState | Mapping[str, TrainState]  # several that are trained together, by name


def _each(state: States) -> list[TrainState]:
    return [state] if isinstance(state, TrainState) else list(state.values())


def save(
    path: str | Path, state: States, extra: Any = None, *, score: float | None = None, wait: bool = True
) -> Path:
    """Write `state` and `extra` (a tree of tensors, numbers and strings, the same on every rank) as the
    folder `path`, atomically. Several states that are trained together (an actor and its critic) are one dict
    of them, by name. The rest is as in `write`."""
    step = max(x.step for x in _each(state))
    named = dict(tree.leaves_with_path({"state": state, "extra": extra}))
    return write(path, named, step=step, score=score, wait=wait)


def write(
    path: str | Path,
    named: Mapping[str, Any],
    *,
    step: int = 0,
    score: float | None = None,
    wait: bool = True,
) -> Path:
    """Tensors (plain, or DTensors on any mesh), numbers and strings by name, as the folder `path`.

    Each rank writes the parts that it holds, each part once, into a temporary folder beside `path`; rank 0
    renames it when all of them are on the disk: whoever is killed at any moment leaves no `path` or a whole
    one. An existing `path` is moved aside first, and deleted last (`latest` moves it back if a kill came
    between the two renames). With wait=False this returns as soon as a copy is in host memory, and the
    training goes on while files are written; the next `write` or `finish` waits for them, the exit of the
    process too.

    ValueError for a leaf that JSON cannot hold, or that is not the same on all ranks; OSError (a full disk)
    on every rank. Neither leaves anything behind; with wait=False the error comes from the next call.
    """
    path = Path(path)
    score = None if score is None else float(score)
    with dist.phase("checkpoint"):
        finish()
        tensors, plain = _split(named)
        tmp = _make(path)
        try:
            meta = {"format": FORMAT, "step": step, "score": score, "names": list(named), "plain": plain}
            mine, meta["tensors"] = _layout().mine(tensors, copy=not wait)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        writing.begin(path, tmp, mine, meta)
        if wait:
            finish()
    return path


def _layout() -> Any:
    from rft_fn.ckpt import layout  # torch.distributed.checkpoint is slow to import

    return layout


def _split(named: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, the other leaves), which have to be the same on all ranks."""
    tensors = {n: x for n, x in named.items() if isinstance(x, Tensor)}
    plain = {n: x for n, x in named.items() if n not in tensors}
    error = None
    try:
        facts = {n: json.dumps(x) for n, x in plain.items()}
    except (TypeError, ValueError) as found:
        facts, error = {}, ValueError(f"extra: expected tensors, numbers and strings: {found}")
    agree(error)
    facts |= {n: _fact(n, x) for n, x in tensors.items()} if dist.world() > 1 else {}
    if len(set(dist.share(sum_of(facts)))) > 1:
        odd = dist.differences(facts)
        raise ValueError(f"checkpoint: expected the same on all ranks: {'; '.join(odd[:3])}")
    return tensors, plain


def _fact(name: str, x: Tensor) -> str:
    """What has to be the same of a tensor on all ranks: of those in `extra`, which are small, the values."""
    text = f"{x.dtype} {list(x.shape)}"
    if not name.startswith("extra/") or hasattr(x, "device_mesh"):
        return text
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{text} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _make(path: Path) -> Path:
    """The temporary folder, made by rank 0."""
    tmp, error = None, None
    if number() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tmp = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        except OSError as found:
            error = found
    agree(error, f": checkpoint {path} was not saved, those before it are whole")
    return dist.share(tmp)[0]


def _checked(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The meta of a checkpoint, if it is one of `like`, and this rank's share of its files is whole."""
    meta = read_meta(path)
    if list(like) != meta["names"]:
        odd = sorted(set(meta["names"]) ^ set(like)) or ["their order"]
        raise ValueError(
            f"checkpoint {path}: it is of another model, optimizer or run: {odd[:3]} "
            f"({len(odd)} names differ)"
        )
    for name, x in like.items():
        _check(path, name, x, meta)
    for file, digest in list(meta["files"].items())[number() :: dist.world()]:
        try:
            if shards.digest(path / file) != digest:
                raise ValueError(damaged(path, f"{file}: its digest does not match"))
        except OSError as error:
            raise ValueError(damaged(path, f"{file}: {error}")) from error
    return meta


def _check(path: Path, name: str, like: Any, meta: Mapping[str, Any]) -> None:
    found = meta["tensors"].get(name)
    got = "no tensor" if found is None else f"{found['shape']} {found['dtype']}"
    want = "no tensor"
    if isinstance(like, Tensor):
        want = f"{list(like.shape)} {str(like.dtype).removeprefix('torch.')}"
    if got != want:
        raise ValueError(
            f"checkpoint {path}: {name}: expected {want}, got {got}: it is of another model or optimizer"
        )


def read(path: str | Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """What `write` wrote, by name: of the tensors the part that `like` holds on this rank, in host memory.

    ValueError on every rank, with the remedy, if the folder is damaged or holds other names, shapes or types.
    """
    from safetensors import SafetensorError

    path, meta, parts, error = Path(path), None, {}, None
    try:
        meta = _checked(path, like)
    except ValueError as found:
        error = found
    agree(error)
    assert meta is not None
    try:
        tensors = {n: x for n, x in like.items() if isinstance(x, Tensor)}
        parts = _layout().read(path, meta["tensors"], tensors)
    except (OSError, SafetensorError) as found:
        error = ValueError(damaged(path, str(found)))
    agree(error)
    return {n: parts[n] if n in parts else meta["plain"][n] for n in like}


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


def _saved_extra(path: Path) -> Any:
    """A template of the extra that was saved: nested dicts, tensors without their values."""
    meta, error = {"names": [], "tensors": {}, "plain": {}}, None
    try:
        meta = read_meta(path)
    except ValueError as found:
        error = found
    agree(error)
    empty = lambda t: torch.empty(t["shape"], dtype=getattr(torch, t["dtype"]))  # noqa: E731
    leaves = {n: empty(meta["tensors"][n]) if n in meta["tensors"] else 0 for n in meta["names"]}
    return _nested({n: x for n, x in leaves.items() if n.startswith("extra/")}).get("extra")


def restore(path: str | Path, like: States, extra: Any = None) -> tuple[Any, Any]:
    """(state, extra) of the checkpoint at `path`: state in the structure of `like` (one, or a dict of them),
    extra in that of the `extra` given, or without one as nested dicts of what was saved (None if nothing).

    Tensors are sharded as those of `like` are, whatever wrote them, and take their memory, so that the module
    behind `apply` has the parameters; `like` is donated. ValueError on every rank that names the folder and
    the remedy if it is damaged or of another model; then nothing has been changed.
    """
    path = Path(path)
    with dist.phase("restore"):
        want = {"state": like, "extra": _saved_extra(path) if extra is None else extra}
        named = dict(tree.leaves_with_path(want))
        found = read(path, named)
        values = [_filled(n, x, found[n]) for n, x in named.items()]
        out = tree.unflatten_like(want, values)
        tree.donate(*_each(like))
    return out["state"], out["extra"]


@torch.no_grad()
def _filled(name: str, like: Any, found: Any) -> Any:
    if not isinstance(like, Tensor):
        return found
    own = like if name.startswith("state/") else torch.empty_like(like)
    _layout().local(own).copy_(found)
    return own


def rotate(folder: str | Path, *, keep: int, best: int = 0, max_bytes: int | None = None) -> list[Path]:
    """Delete all checkpoints but the `keep` newest and the `best` ones of the highest score, and of these as
    many as fit into `max_bytes` (the newest first, then the best); the deleted come back.

    Ties go to the later checkpoint. The newest is never deleted. Half-written folders of killed runs go too.
    While a checkpoint is being written (`wait=False`) this happens when that is whole, and [] comes back.
    Rank 0 deletes; all ranks call it.
    """
    if keep < 1:
        raise ValueError(f"keep: expected >= 1, got {keep}")
    folder, write, gone, error = Path(folder), writing.pending(), [], None
    run = partial(delete, folder, keep=keep, best=best, max_bytes=max_bytes)
    if write is not None:
        if number() == 0:
            write.then(run)
        return []
    if number() == 0:
        try:
            gone = run()
        except (OSError, ValueError) as found:
            error = found
    agree(error)
    return dist.share(gone)[0]
