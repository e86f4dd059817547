"""Checkpoints: one folder holds the whole run and appears in one rename.

step_00000012/  rank_00000.safetensors ...  what each rank wrote of the tensors of {"state", "extra"}, by
                                            their paths in the tree
                meta.json                   every other leaf, the shape of extra, which file holds which part
                                            of which tensor, the score, digests of the files and of itself

One format for every backend: what some processes saved, any other number restores, sharded or not. All ranks
call these functions alike and see one file system. The planning is that of torch.distributed.checkpoint.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import dist, tree
from rft_fn.ckpt import writing
from rft_fn.ckpt.folder import FORMAT, delete, latest, number, outline, steps, sum_of
from rft_fn.ckpt.reading import States, each, planner, read, restore, weights
from rft_fn.ckpt.writing import Writer, Writing, agree, complete

__all__ = ["latest", "restore", "save", "steps", "weights"]

_OWN = uuid.uuid4().hex[:8]  # in the names of this process's temporary folders, which `rotate` does not touch


def save(
    path: str | Path,
    state: States,
    extra: Any = None,
    *,
    score: float | None = None,
    writer: Writer | None = None,
) -> Path:
    """Write `state` and `extra` as the folder `path`, atomically.

    `extra` is a tree of tensors, numbers and strings, the same on every rank. Several states that are trained
    together (an actor and its critic) are one dict of them, by name, or a list. The rest is as in `write`.
    ValueError for a state that is not finite, which names the tensor.
    """
    named = dict(tree.leaves_with_path({"state": state, "extra": extra}))
    about: dict[str, Any] = {"step": max(x.step for x in each(state)), "score": score}
    error = None
    try:
        about["extra"] = outline(extra)
        _check_names(extra)
        _check_finite(path, named)
    except ValueError as caught:
        error = caught
    agree(error)
    return _write(path, named, about, writer)


def _check_names(extra: Any) -> None:
    """Raise ValueError for two leaves with one path: "a/b" is a key, or b is a part of a."""
    paths = [path for path, _ in tree.leaves_with_path({"extra": extra})]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise ValueError(f"extra: expected leaves with different paths, got {twice[0]} twice")


def _check_finite(path: str | Path, named: Mapping[str, Any]) -> None:
    """Raise ValueError for the first tensor of a state with a NaN or an inf in this rank's part."""
    for name, x in named.items():
        if not name.startswith("state/") or not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        if not bool(planner().local(x).isfinite().all()):
            raise ValueError(
                f"checkpoint {path}: {name}: expected finite numbers, got NaN or inf; it is not saved, go "
                "on from the last one with a lower learning rate"
            )


def write(
    path: str | Path,
    named: Mapping[str, Any],
    *,
    step: int = 0,
    score: float | None = None,
    writer: Writer | None = None,
) -> Path:
    """Write tensors (plain or DTensors), numbers and strings by name as the folder `path`.

    Each rank writes the parts that it holds, each part once, into a temporary folder next to `path`; rank 0
    renames it when all of them are on the disk: whoever is killed at any moment leaves no `path` or a whole
    one. An existing `path` is moved aside first, and deleted last (`latest` moves it back if a kill came
    between the two renames).

    With a `writer` this returns as soon as a copy is in host memory, and training continues while files are
    written; the next write, `Writer.finish` and the exit of the process wait for them.

    ValueError for a leaf that JSON cannot hold, or that is not the same on all ranks; OSError (a full disk)
    on every rank. Nothing is left of it; with a writer the error comes from its next call.
    """
    return _write(path, named, {"step": step, "score": score}, writer)


def _write(path: str | Path, named: Mapping[str, Any], about: dict[str, Any], writer: Writer | None) -> Path:
    """Do `write`, with `about` in the meta.json next to what reading the files needs."""
    # one write at a time
    path = Path(path)
    if about["score"] is not None:
        about["score"] = float(about["score"])
    if writer is not None:
        writer.finish()

    # a plan of who writes what, made by all ranks; after an error there is no folder
    tensors, plain = _split(named)
    tmp = _make(path)
    try:
        meta = {"format": FORMAT, "names": list(named), "plain": plain, **about}
        mine, meta["tensors"] = planner().mine(tensors, copy=writer is not None)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise

    # a thread writes in either case: waiting for it is the only difference
    work = Writing(path, tmp, mine, meta)
    if writer is None:
        work.start()
        complete(work)
    else:
        writer.begin(work)
    return path


def _split(named: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, the other leaves), which must be the same on all ranks."""
    tensors = {n: x for n, x in named.items() if isinstance(x, Tensor)}
    plain = {n: x for n, x in named.items() if n not in tensors}

    # what is written as JSON must be JSON, on every rank
    facts: dict[str, str] = {}
    error = None
    try:
        facts = {n: json.dumps(x) for n, x in plain.items()}
    except (TypeError, ValueError) as caught:
        error = ValueError(f"extra: expected tensors, numbers and strings: {caught}")
    agree(error)

    # ranks compare one digest, and the facts themselves only where it differs
    if dist.world() > 1:
        facts |= {n: _fact(n, x) for n, x in tensors.items()}
    if len(set(dist.all_gather_object(sum_of(facts)))) > 1:
        odd = dist.differences(facts)
        raise ValueError(f"checkpoint: expected the same on all ranks: {'; '.join(odd[:3])}")
    return tensors, plain


def _fact(name: str, x: Tensor) -> str:
    """Return the type and shape of a tensor; of one in `extra`, which is small, a digest of values too."""
    text = f"{x.dtype} {list(x.shape)}"
    if not name.startswith("extra/") or hasattr(x, "device_mesh"):
        return text
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{text} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _make(path: Path) -> Path:
    """Make the temporary folder, on rank 0."""
    tmp = None
    error = None
    if number() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tmp = path.with_name(f".{path.name}.{_OWN}{uuid.uuid4().hex[:8]}")
            tmp.mkdir()  # with the rights that the umask leaves: others of a group read it too
        except OSError as caught:
            error = caught
    agree(error, f": checkpoint {path} was not saved, those before it are whole")
    return dist.all_gather_object(tmp)[0]


def rotate(
    folder: str | Path,
    *,
    keep: int,
    best: int = 0,
    max_bytes: int | None = None,
    writer: Writer | None = None,
) -> list[Path]:
    """Delete all checkpoints except the newest and the best ones; returns the deleted.

    The `keep` newest stay and the `best` ones of the highest score, and of these as many as fit into
    `max_bytes` (the newest first, then the best). Ties go to the later checkpoint. The newest is never
    deleted. Half-written folders of killed runs are deleted too. While the `writer` is writing a checkpoint,
    this happens when that is whole, and [] is returned. Rank 0 deletes; all ranks call it.
    """
    if keep < 1:
        raise ValueError(f"keep: expected >= 1, got {keep}")
    warned: set[Path] = set() if writer is None else writer.warned
    run = partial(delete, Path(folder), keep=keep, best=best, max_bytes=max_bytes, spare=_OWN, warned=warned)

    # a checkpoint that is being written counts as soon as it is whole
    if writer is not None and writer.pending is not None:
        if number() == 0:
            writer.pending.then(run)
        return []

    gone: list[Path] = []
    error = None
    if number() == 0:
        try:
            gone = run()
        except (OSError, ValueError) as caught:
            error = caught
    agree(error)
    return dist.all_gather_object(gone)[0]
