"""The structure of a tree as JSON, and the folder of a run's checkpoints: which are whole, which stay."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn import border, dist, tree
from rft_fn.foreign_json import parse_json
from rft_fn.text import printable

__all__ = [
    "FORMAT", "build", "damaged", "delete", "latest", "number", "outline", "read_meta", "steps", "sum_of",
]  # fmt: skip


# ---------- the structure of a tree as JSON, to rebuild a checkpoint's extra without a template


LEAF = "leaf"
_LISTS = {"list": list, "tuple": tuple, "deque": deque}


class _Node(NamedTuple):
    """A container: its kind, the keys of its parts as in paths, the parts."""

    kind: str  # list, tuple, deque, dict, named, or the name of a class
    keys: list[Any]
    parts: list[Any]


def _node(x: Any) -> _Node | None:
    """Return a container's node; None for a leaf."""
    if isinstance(x, tree.Named):
        return _Node("named", list(x), list(x.values()))
    if type(x) in (dict, OrderedDict, defaultdict):
        return _Node("dict", list(x), list(x.values()))
    if type(x) in _LISTS.values():
        return _Node(type(x).__name__, list(range(len(x))), list(x))
    name = f"{type(x).__module__}:{type(x).__qualname__}"
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return _Node(name, list(range(len(x))), list(x))
    if dataclasses.is_dataclass(x):
        children, _ = tree.field_names(type(x))
        return _Node(name, list(children), [getattr(x, key) for key in children])
    return None


def outline(x: Any, path: str = "extra") -> Any:
    """Return the containers of `x` with their keys, and a mark for each leaf.

    ValueError for a key that is neither a string nor a number.
    """
    if x is None:
        return None
    node = _node(x)
    if node is None:
        return LEAF
    for key in node.keys:
        if not isinstance(key, str | int | float):
            raise ValueError(f"{path}: expected keys that are strings or numbers, got {key!r}")
    parts = [outline(part, f"{path}/{key}") for key, part in zip(node.keys, node.parts)]
    out = {"kind": node.kind, "keys": node.keys, "parts": parts}
    if static := _static(x):
        out["static"] = static
    return out


def _static(x: Any) -> dict[str, Any]:
    """Return the static fields of a container, as far as JSON can hold them."""
    if isinstance(x, deque):
        return {"maxlen": x.maxlen}
    if not dataclasses.is_dataclass(x):
        return {}
    try:
        static = {name: getattr(x, name) for name in tree.field_names(type(x))[1]}
        return json.loads(json.dumps(static, default=_record))
    except (TypeError, ValueError):
        return {}


def _record(x: Any) -> dict[str, Any]:
    """Return the class and the fields of a plain frozen dataclass, such as a Sampling."""
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return json.JSONEncoder().default(x)  # raises TypeError
    return {"kind": f"{type(x).__module__}:{type(x).__qualname__}", "fields": vars(x)}


def build(saved: Any, leaf: Callable[[str, Any], Any], like: Any = None, path: str = "extra") -> Any:
    """Build the tree that was saved, with `leaf(path, leaf of like or None)` for each leaf.

    Lists, tuples and deques have the saved length. Where `like` has something, a struct or a dict has the
    fields, the order and the types of `like`; where these are not the saved ones the part of `like` comes
    unchanged. Without `like` a struct is one of its class where that is defined by now, else a dict.
    """
    if saved is None:
        return None
    if saved == LEAF:
        return leaf(path, like)
    own = _node(like)
    if like is not None and (own is None or (own.parts and _differs(own, saved))):
        return like
    likes = zip(saved["parts"], _likes(own, saved), saved["keys"])
    return _made(saved, [build(part, leaf, x, f"{path}/{key}") for part, x, key in likes], like)


def _differs(own: _Node, saved: dict[str, Any]) -> bool:
    if own.kind in _LISTS or saved["kind"] in _LISTS:
        return own.kind != saved["kind"]
    if own.kind in ("dict", "named"):
        return False  # part by part: one that is not in both is named as such
    return set(own.keys) != set(saved["keys"])


def _likes(own: _Node | None, saved: dict[str, Any]) -> list[Any]:
    """Return the part of the template for each part that was saved.

    For a longer saved list, the last part of the template serves for the rest.
    """
    if own is None or not own.parts:
        return [None] * len(saved["parts"])
    named = dict(zip(own.keys, own.parts))
    rest = own.parts[-1] if own.kind in ("list", "deque") else None
    return [named.get(key, rest) for key in saved["keys"]]


def _made(saved: dict[str, Any], parts: list[Any], like: Any) -> Any:
    """Make a container of its parts."""
    kind = saved["kind"]
    fields = dict(zip(saved["keys"], parts))

    # sequences are rebuilt as their own kind
    if kind == "deque":
        return deque(parts, **saved["static"])
    if kind in _LISTS:
        return _LISTS[kind](parts)

    # a dict keeps the order of the template, which may have been saved without some parts
    if isinstance(like, dict) and like:
        ordered = {key: fields.get(key, part) for key, part in like.items()}
        return tree.Named(ordered) if isinstance(like, tree.Named) else ordered
    if kind == "named":
        return tree.Named(fields)
    if kind == "dict":
        return fields

    # structs and named tuples have the class of the template, or the one that was saved
    if dataclasses.is_dataclass(like):
        return tree.replace(like, **fields)
    if hasattr(type(like), "_fields"):
        return type(like)(*parts)
    return _instance(saved, parts, fields)


def _instance(saved: dict[str, Any], parts: list[Any], fields: dict[Any, Any]) -> Any:
    """Make a struct or a named tuple of the saved class, where that is defined; else its fields."""
    cls = _class_of(saved["kind"])
    if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return cls(*parts)
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        return fields
    children, statics = tree.field_names(cls)
    static = {k: _frozen(v) for k, v in saved.get("static", {}).items()}
    # a field that a later version brought has its default
    every = dataclasses.fields(cls)  # type: ignore[arg-type]
    optional = {f.name for f in every if f.default is not dataclasses.MISSING}
    if set(children) != set(fields) or set(statics) - optional - set(static) or set(static) - set(statics):
        return fields
    return cls(**fields, **static)


def _class_of(kind: str) -> Any:
    """Return the class that was saved, None where it is not defined."""
    module, _, name = kind.partition(":")
    cls: Any = sys.modules.get(module)
    for part in name.split("."):
        cls = getattr(cls, part, None)
    return cls


def _frozen(x: Any) -> Any:
    """Make static fields hashable: a list of JSON was a tuple, and a record one of its class."""
    if isinstance(x, list):
        return tuple(_frozen(part) for part in x)
    if isinstance(x, dict) and set(x) == {"kind", "fields"}:
        cls = _class_of(x["kind"])
        if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
            return None
        return cls(**{name: _frozen(part) for name, part in x["fields"].items()})
    return x


# ---------- the folder of a run's checkpoints: list them, name damage, decide which stay


FORMAT = 2


def sum_of(meta: dict[str, Any]) -> str:
    """Return the digest of all fields of a meta.json but "digest"."""
    text = json.dumps({k: v for k, v in meta.items() if k != "digest"})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_meta(path: Path) -> dict[str, Any]:
    """Read the meta.json of a checkpoint; ValueError, with the remedy, if it has changed."""
    try:
        meta = border.object_of("meta.json", parse_json((path / "meta.json").read_text()))
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}, expected {FORMAT}")
        if meta["digest"] != sum_of(meta):
            raise ValueError("its digest does not match")
        return meta
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(damaged(path, f"meta.json: {error}")) from error


def damaged(path: Path, why: str) -> str:
    """Return one line: why a checkpoint is damaged, and the remedy."""
    others = [s for s in steps(path.parent) if s != path]
    remedy = f"delete it to resume from {others[-1].name}" if others else "delete it to start again"
    return f"checkpoint {path} is damaged ({why}); {remedy}"


def number() -> int:
    """Return the rank of this process; 0 also where there is no group."""
    return dist.rank() if dist.world() > 1 else 0


def steps(folder: str | Path) -> list[Path]:
    """List the checkpoints in `folder`, oldest first.

    Half-written ones have other names and are never in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if re.fullmatch(r"step_\d+", p.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("_")[1])


def latest(folder: str | Path) -> Path | None:
    """Return the newest checkpoint that rank 0 sees, on every rank, or None.

    All ranks call it.

    One that a killed `save` had moved aside, and not replaced yet, is moved back first. A write that is still
    under way is not seen.
    """
    newest = _newest(Path(folder)) if number() == 0 else None
    return dist.all_gather_object(newest)[0]


def _newest(folder: Path) -> Path | None:
    for aside in folder.glob(".step_*.old"):
        path = aside.with_name(aside.name.removeprefix(".").removesuffix(".old"))
        if not path.exists():
            with suppress(FileNotFoundError):  # another process, without a group yet, was faster
                os.rename(aside, path)
    return next(reversed(steps(folder)), None)


def _scores(paths: list[Path], warned: set[Path]) -> tuple[list[tuple[float, Path]], set[Path]]:
    """Return ((score, checkpoint) where there is a score, checkpoints with an unreadable one)."""
    scored = []
    unknown = set()
    for p in paths:
        try:
            score = read_meta(p)["score"]
        except ValueError as error:
            unknown.add(p)
            if p not in warned:
                line = f"warning: {error}; it may be the best one, so it stays until then"
                print(printable(line), file=sys.stderr, flush=True)
            warned.add(p)
        else:
            if score is not None:
                scored.append((score, p))
    return scored, unknown


def _size(path: Path) -> int:
    return sum(f.stat().st_size for f in path.iterdir())


def _kept(paths: list[Path], keep: int, best: int, max_bytes: int | None, warned: set[Path]) -> set[Path]:
    """Choose what stays: the newest, the best, then the next newest, as many as fit.

    Checkpoints with an unreadable score stay too, for they may be the best.
    """
    scored, unknown = _scores(paths if best else [], warned)
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
            continue  # `latest` and `save` look after what was moved aside
        shutil.rmtree(p, ignore_errors=True)
    return gone
