"""The folder of a run's checkpoints: list them, name damage, decide which stay."""

import hashlib
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rft_fn import check, dist

__all__ = ["FORMAT", "damaged", "delete", "latest", "number", "read_meta", "steps", "sum_of"]

FORMAT = 2


def sum_of(meta: dict[str, Any]) -> str:
    """The digest of all fields of a meta.json but "digest"."""
    text = json.dumps({k: v for k, v in meta.items() if k != "digest"})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_meta(path: Path) -> dict[str, Any]:
    """The meta.json of a checkpoint. ValueError, with the remedy, where it is not as it was written."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}, expected {FORMAT}")
        if meta["digest"] != sum_of(meta):
            raise ValueError("its digest does not match")
        return meta
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(damaged(path, f"meta.json: {error}")) from error


def damaged(path: Path, why: str) -> str:
    """One line: why a checkpoint is damaged, and the remedy."""
    others = [s for s in steps(path.parent) if s != path]
    remedy = "delete it to start again"
    if others:
        remedy = f"delete it to resume from {others[-1].name}"
    return f"checkpoint {path} is damaged ({why}); {remedy}"


def number() -> int:
    """The rank of this process; 0 also where there is no group."""
    if dist.world() == 1:
        return 0
    return dist.rank()


def steps(folder: str | Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first.

    Half-written ones have other names and are never among them.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if re.fullmatch(r"step_\d+", p.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("_")[1])


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint that rank 0 sees, on every rank, or None. All ranks call it.

    One that a killed `save` had moved aside, and not replaced yet, is moved back first. A write that is still
    under way is not seen.
    """
    found = None
    if number() == 0:
        found = _newest(Path(folder))
    return dist.all_gather_object(found)[0]


def _newest(folder: Path) -> Path | None:
    for aside in folder.glob(".step_*.old"):
        path = aside.with_name(aside.name.removeprefix(".").removesuffix(".old"))
        if not path.exists():
            with suppress(FileNotFoundError):  # another process, without a group yet, was faster
                os.rename(aside, path)
    return next(reversed(steps(folder)), None)


def _scores(paths: list[Path], warned: set[Path]) -> tuple[list[tuple[float, Path]], set[Path]]:
    """((score, checkpoint) of those that have one, those whose score cannot be read)."""
    scored = []
    unknown = set()
    for p in paths:
        try:
            score = read_meta(p)["score"]
        except ValueError as error:
            unknown.add(p)
            if p not in warned:
                line = f"warning: {error}; it may be the best one, so it stays until then"
                print(check.printable(line), file=sys.stderr, flush=True)
            warned.add(p)
        else:
            if score is not None:
                scored.append((score, p))
    return scored, unknown


def _size(path: Path) -> int:
    return sum(f.stat().st_size for f in path.iterdir())


def _kept(paths: list[Path], keep: int, best: int, max_bytes: int | None, warned: set[Path]) -> set[Path]:
    """The checkpoints that stay: the newest, the best, then the next newest, as many as fit.

    Those whose score cannot be read stay too, for they may be the best.
    """
    scored: list[tuple[float, Path]] = []
    unknown: set[Path] = set()
    if best:
        scored, unknown = _scores(paths, warned)
    ranked = [p for _, p in sorted(scored, key=lambda sp: (sp[0], _number(sp[1])), reverse=True)]
    wanted = list(dict.fromkeys([*paths[-1:], *ranked[:best], *reversed(paths[-keep:])]))
    if max_bytes is None:
        return unknown | set(wanted)
    stay = unknown | set(wanted[:1])
    total = 0
    for p in wanted:
        total += _size(p)
        if total <= max_bytes:
            stay.add(p)
    return stay


def delete(
    folder: Path,
    *,
    keep: int,
    best: int,
    max_bytes: int | None,
    spare: str,
    warned: set[Path],
) -> list[Path]:
    """Do the work of `rotate` on this process.

    Temporary folders of killed runs are deleted, except those marked `spare`: this process may be writing
    them. `warned` collects the damaged checkpoints that a line was printed about.
    """
    paths = steps(folder)
    stay = _kept(paths, keep, best, max_bytes, warned)
    gone = [p for p in paths if p not in stay]
    for p in gone:
        os.rename(p, p.with_name(f".{p.name}.gone"))  # a kill while files go must not leave half a checkpoint
    for p in folder.glob(".step_*.*"):
        if p.suffix == ".old" or p.suffix.startswith(f".{spare}"):
            continue  # `latest` and `save` see to those that were moved aside
        shutil.rmtree(p, ignore_errors=True)
    return gone
