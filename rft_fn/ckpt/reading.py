"""Read checkpoints: into a state, as tensors by name, or as the weights of a model."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import border, dist, tree
from rft_fn.ckpt import folder, writing
from rft_fn.ckpt.folder import damaged, number, read_meta
from rft_fn.ckpt.writing import agree
from rft_fn.types import TrainState

__all__ = ["States", "each", "read", "restore", "weights"]

# several that are trained together: by name, or a population
States = TrainState | Mapping[str, TrainState] | Sequence[TrainState]


def each(state: States) -> list[TrainState]:
    """Return the states, in their order."""
    if isinstance(state, TrainState):
        return [state]
    return list(state.values()) if isinstance(state, Mapping) else list(state)


def planner() -> Any:
    """Import the module that plans which process reads and writes which part."""
    from rft_fn.ckpt import layout  # torch.distributed.checkpoint is slow to import

    return layout


def _checked(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the meta of a checkpoint, if it is like `like` and this rank's share of the files is whole."""
    meta = read_meta(path)
    if odd := sorted(set(meta["names"]) ^ set(like)):
        raise ValueError(
            f"checkpoint {path}: it is of another model, optimizer or run: {odd[:3]} "
            f"({len(odd)} names differ)"
        )
    for name, x in like.items():
        _check(path, name, x, meta)
    _check_files(path, list(meta["files"].items())[number() :: dist.world()])
    return meta


def _alike(like: Any, saved: Any) -> bool:
    """Return whether a plain value may stand where `like` does: of its type; a number for a number."""
    if like is None or saved is None:
        return True
    if isinstance(like, float):
        return type(saved) in (int, float)
    return not isinstance(like, (bool, int, str)) or type(saved) is type(like)


def _check_files(path: Path, files: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError for a file that has changed since it was written."""
    for file, digest in files:
        try:
            if writing.digest(path / file) != digest:
                raise ValueError(damaged(path, f"{file}: its digest does not match"))
        except OSError as error:
            raise ValueError(damaged(path, f"{file}: {error}")) from error


def _check(path: Path, name: str, like: Any, meta: Mapping[str, Any]) -> None:
    """Raise ValueError where the checkpoint has another shape or type of that name than `like`."""
    got = want = "no tensor"
    if saved := meta["tensors"].get(name):
        got = f"{saved['shape']} {saved['dtype']}"
    if isinstance(like, Tensor):
        want = f"{list(like.shape)} {str(like.dtype).removeprefix('torch.')}"
    if got != want:
        raise ValueError(
            f"checkpoint {path}: {name}: expected {want}, got {got}: it is of another model or optimizer"
        )


def read(path: str | Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read the leaves that `write` wrote, by name, in host memory.

    Of each tensor it is the part that `like` holds on this rank. ValueError on every rank, with the remedy,
    if the folder is damaged or holds other names, shapes or types.
    """
    from safetensors import SafetensorError

    path = Path(path)
    meta: dict[str, Any] = {}
    parts: dict[str, Tensor] = {}

    # nobody reads tensors before every rank knows that its share of the files is whole
    error = None
    try:
        meta = _checked(path, like)
    except ValueError as caught:
        error = caught
    agree(error)

    try:
        tensors = {n: x for n, x in like.items() if isinstance(x, Tensor)}
        parts = planner().read(path, meta["tensors"], tensors)
    except (OSError, SafetensorError) as caught:
        error = ValueError(damaged(path, str(caught)))
    agree(error)
    leaves = meta["plain"] | parts
    return {n: leaves[n] for n in like}


def _nested(named: dict[str, Any]) -> dict[str, Any]:
    """Nest names: {"a/b": 1} -> {"a": {"b": 1}}"""
    out: dict[str, Any] = {}
    for name, value in named.items():
        *trail, last = name.split("/")
        inner = out
        for part in trail:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return out


def _extra(path: Path, like: Any) -> Any:
    """Make a template of the extra that was saved.

    It is like `like`, with the lengths that were saved; without `like` it is all as saved.
    """
    meta: dict[str, Any] = {}
    error = None
    try:
        meta = read_meta(path)
    except ValueError as caught:
        error = caught
    agree(error)

    # a leaf keeps its type and device in `like`, and has the shape that was saved
    def leaf(name: str, like: Any) -> Any:
        saved = meta["tensors"].get(name)
        if saved is None and like is None:
            return 0
        if saved is None:
            return like
        empty = partial(torch.empty, saved["shape"], dtype=_dtype(saved))
        if like is None:
            return empty()
        if not isinstance(like, Tensor) or like.dtype != _dtype(saved) or hasattr(like, "device_mesh"):
            return like
        return empty(device=like.device, requires_grad=like.requires_grad)

    if "extra" in meta:
        return folder.build(meta["extra"], leaf, like)
    if like is not None:  # a checkpoint that is older than its outline
        return like
    return _nested({n: leaf(n, None) for n in meta["names"] if n.startswith("extra/")}).get("extra")


def restore(path: str | Path, like: States, extra: Any = None) -> tuple[Any, Any]:
    """Restore (state, extra) from the checkpoint at `path`.

    `state` has the structure of `like` (one, a dict or a list of them), `extra` is as it was saved, None if
    nothing was.

    With an `extra` given it has the fields and types of that, and the devices of its tensors; only lengths of
    lists and shapes of tensors are as saved, and what is None or empty in it. Without one a struct comes back
    as itself where its class is defined by now, else as a dict.

    Tensors are sharded as in `like`, whatever wrote them, and take its memory, so that the module of `apply`
    has the parameters; `like` is donated. ValueError on every rank that names the folder and the remedy if it
    is damaged or of another model; then nothing has been changed.
    """
    path = Path(path)
    want = {"state": like, "extra": _extra(path, extra)}
    named = dict(tree.leaves_with_path(want))
    saved = read(path, named)
    for name, x in tree.leaves_with_path({} if extra is None else {"extra": extra}):
        if not isinstance(x, Tensor) and not _alike(x, saved.get(name)):
            got = border.quoted(saved[name])
            raise ValueError(
                f"checkpoint {path}: {name}: expected a value like {border.quoted(x)}, got {got}"
            )
    values = [_filled(n, x, saved[n]) for n, x in named.items()]
    out = tree.unflatten_like(want, values)
    tree.donate(*each(like))
    return out["state"], out["extra"]


@torch.no_grad()
def _filled(name: str, like: Any, saved: Any) -> Any:
    """Return the value: of a state in the memory of `like`, of an extra in new memory."""
    if not isinstance(like, Tensor):
        return saved
    in_place = name.startswith("state/")
    out = like if in_place else torch.empty_like(like, requires_grad=like.requires_grad)
    planner().local(out).copy_(saved)
    return out


def weights(
    path: str | Path, *, ema: bool = False, master: bool = False, name: str | None = None
) -> dict[str, Tensor]:
    """Read the weights of a checkpoint by the model's own names, whole, in host memory.

    No optimizer is needed. They are the parameters; with `ema` the average that optim.ema kept, with `master`
    the float32 masters. `name` selects one of several states that were saved together: "actor" or
    "critic". Only trained weights are there. A single process may call it. ValueError if the folder is
    damaged, or lacks these weights.
    """
    from safetensors import SafetensorError

    if ema and master:
        raise ValueError("ema, master: expected one of them, got both")
    path = Path(path)
    meta = read_meta(path)
    tensors = meta["tensors"]
    kind = "average" if ema else "params"
    kind = "master" if master else kind

    # all files are checked, for this process reads all of them
    names = _weights(path, tensors, kind, name)
    whole = {at: torch.empty(tensors[at]["shape"], dtype=_dtype(tensors[at])) for at in names.values()}
    _check_files(path, list(meta["files"].items()))
    try:
        parts = planner().read(path, tensors, whole)
    except (OSError, SafetensorError) as error:
        raise ValueError(damaged(path, str(error))) from error
    return {own: parts[at] for own, at in names.items()}


def _dtype(saved: Mapping[str, Any]) -> torch.dtype:
    return getattr(torch, saved["dtype"])


def _weights(path: Path, tensors: Mapping[str, Any], kind: str, name: str | None) -> dict[str, str]:
    """Map a model's names to the checkpoint's, of the weights that are kept as `kind`."""
    params = [at for at in tensors if re.match(r"state/([^/]+/)?params/", at)]
    single = any(at.startswith("state/params/") for at in params)
    if not params:
        raise ValueError(f"checkpoint {path}: expected the parameters of a model, got none")

    # several states each have a name, and their paths begin with it
    starts: dict[str | None, str] = {None: "state/"}
    if not single:
        starts = {at.split("/")[1]: f"state/{at.split('/')[1]}/" for at in params}
    if name not in starts:
        want = "None for the only state" if single else f"one of {', '.join(map(str, starts))}"
        raise ValueError(f"name: expected {want} in checkpoint {path}, got {name}")

    start = starts[name]
    own = {at.removeprefix(f"{start}params/"): at for at in params if at.startswith(f"{start}params/")}
    if kind == "params":
        return own

    # the paths of the optimizer's state depend on the optimizer; what it keeps has the parameters' names
    kept = {at.split(f"/{kind}/", 1)[-1]: at for at in tensors if re.match(f"{start}opt/.*{kind}/", at)}
    if set(kept) != set(own):
        raise ValueError(f"checkpoint {path}: expected an optimizer with {kind} weights, got none")
    return kept
