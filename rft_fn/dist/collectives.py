"""Trees and small objects that travel between processes.

Everything here works on one process too, where it does nothing. Host data (rollouts, metrics, plans) travels
over gloo also where gradients travel over NCCL.
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from rft_fn import tree
from rft_fn.types.media import Media

__all__ = [
    "all_gather_object", "all_reduce", "barrier", "differences", "fetch_media", "gather", "is_main",
    "rank", "started", "world",
]  # fmt: skip


_OPS = ("sum", "mean", "max", "min")


def started() -> int:
    """Return the number of processes that torchrun started, or in the group; 1 without either."""
    return world() if torch_dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the number of this process among all of them."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of processes that work together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this process writes the files and prints."""
    return rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    if world() > 1:
        all_gather_object(None)


def all_gather_object(x: Any, group: Any = None) -> list[Any]:
    """Gather x, any small object that pickles, from every process in the order of the ranks."""
    if world() == 1:
        return [x]
    out: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(out, x, group=group)
    return out


def gather(x: Any) -> Any:
    """Join the trees of all processes: leaves concatenated along dim 0 in the order of the ranks.

    Numbers and [] become [world]. The input is unchanged. Further dims may differ between processes: shorter
    ones are padded with 0 at the end, so rows [b, s] of each become [B, S]. The structure must be the same
    everywhere, except for the media of a struct: a process that lacks them, or some of their names, has no
    rows of these. Of media only the numbers travel; their rows stay on the process that has them, until
    `Strategy.shard` or `Strategy.score` asks for some. ValueError for another structure.
    """
    if world() == 1:
        return _gather(x)

    # media differ in structure between processes, so they travel apart from the structs that have them
    owners = [s for s in tree.leaves(x, is_leaf=_has_media) if _has_media(s)]
    media = iter([_gather_media(s) for s in owners])
    out = _gather(tree.map(_without_media, x, is_leaf=_has_media))

    def restore(s: Any) -> Any:
        return tree.replace(s, media=next(media)) if _has_media(s) else s

    return tree.map(restore, out, is_leaf=_has_media)


def _has_media(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and any(field.name == "media" for field in dataclasses.fields(x))


def _without_media(x: Any) -> Any:
    return tree.replace(x, media=None) if _has_media(x) else x


def _gather_media(x: Any) -> Media | None:
    """Gather the numbers of the media of the structs `x`, with the rows of this process's."""
    # a process without media has none of the names that others have
    numbers = None if x.media is None else tree.map(lambda v: v.cpu(), _empty(x.media))
    count = len(tree.leaves(_without_media(x))[0])
    everyone = all_gather_object((count, numbers))

    # rows stay where they are: other processes' owners are there only by their numbers
    parts = [part for _, part in everyone]
    if x.media is not None:
        parts = [tree.map(lambda v: v.to(x.media.of.device), part) for part in parts]
        parts[rank()] = x.media
    return Media.concat(parts, [n for n, _ in everyone])


def _empty(media: Media) -> Media:
    """Return media without any rows: the numbers, and tensors of no rows."""
    tensors = {name: torch.empty_like(x[:0]) for name, x in media.tensors.items()}  # a view would pickle all
    return tree.replace(media, tensors=tensors, held=torch.zeros_like(media.held))


def _gather(x: Any) -> Any:
    """Gather trees of one structure."""
    leaves = {name: torch.atleast_1d(torch.as_tensor(v)) for name, v in tree.leaves_with_path(x)}
    if world() == 1:
        return tree.unflatten_like(x, list(leaves.values()))

    plans = all_gather_object({name: (tuple(v.shape), v.dtype) for name, v in leaves.items()})
    names = dict.fromkeys(name for plan in plans for name in plan)
    if list(names) != list(leaves):
        raise ValueError(
            f"gather: expected the same tree on every rank, rank {rank()} lacks some of {list(names)}"
        )
    return tree.unflatten_like(x, [_gather_leaf(v, [plan[n] for plan in plans]) for n, v in leaves.items()])


def _gather_leaf(x: Tensor, plan: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Tensor:
    """Gather one leaf, padded to one shape on the way; `plan` has the shape and type on each rank."""
    shapes = [shape for shape, _ in plan]
    size = [max(sizes) for sizes in zip(*shapes)]
    bits = {torch.bool: torch.uint8, torch.int16: torch.int32}.get(x.dtype, x.dtype)  # gloo has neither
    mine = torch.zeros(size, dtype=bits)
    mine[tuple(slice(n) for n in x.shape)] = x.detach().cpu().to(bits)

    parts = [torch.empty_like(mine) for _ in plan]
    torch_dist.all_gather(parts, mine)
    return torch.cat([p[: s[0]] for p, s in zip(parts, shapes)]).to(device=x.device, dtype=x.dtype)


def all_reduce(x: Any, op: str = "mean") -> Any:
    """Reduce each leaf to the "mean", "sum", "max" or "min" over the processes.

    Numbers come back as numbers. Added in the order of the ranks, so every rank has the same bits. The input
    is unchanged. ValueError for another op.
    """
    if op not in _OPS:
        raise ValueError(f"op: expected {', '.join(_OPS)}, got {op!r}")

    def reduce(v: Any) -> Any:
        every = gather({"x": torch.as_tensor(v)[None]})["x"]
        out = _over_ranks(every, op)
        return out if isinstance(v, Tensor) else out.item()

    return tree.map(reduce, x)


def _over_ranks(x: Tensor, op: str) -> Tensor:
    """Reduce [world, ...] -> [...]; the mean of whole numbers in float64."""
    if op == "sum":
        return x.sum(0)
    if op == "max":
        return x.amax(0)
    if op == "min":
        return x.amin(0)
    return (x if x.is_floating_point() else x.double()).mean(0)


def differences(named: dict[str, str]) -> list[str]:
    """Return lines "name: rank 0 has a, rank 1 has b" for texts that differ between processes.

    Texts are compared by hash and shown by their first 200 characters.
    """
    digest = {k: hashlib.blake2b(v.encode(), digest_size=16).hexdigest() for k, v in named.items()}
    everyone = all_gather_object(digest)
    odd = [k for k in dict.fromkeys(k for d in everyone for k in d) if len({d.get(k) for d in everyone}) > 1]
    shown = all_gather_object({k: named.get(k, "nothing")[:200] for k in odd})
    lines = []
    for k in odd:
        other = next(i for i, d in enumerate(everyone) if d.get(k) != everyone[0].get(k))
        lines.append(f"{k}: rank 0 has {shown[0][k]}, rank {other} has {shown[other][k]}")
    return lines


# ---------- rows of media, on their way to the processes that need them


def fetch_media(media: Media | None, owners: Sequence[int]) -> Media | None:
    """Return the media with the rows of `owners`, and no others, on this process.

    All processes call it, with media of the same numbers and each with the owners that it needs. An owner's
    rows come from the first process that holds them, one owner at a time: no process ever has more than what
    it had and what it asked for. On one process the media come back as they are. ValueError for an owner that
    no process holds.
    """
    if media is None or world() == 1:
        return media
    needed = sorted(set(owners))
    everyone = all_gather_object((media.held.nonzero().flatten().tolist(), needed))
    source: dict[int, int] = {}
    for r, (held, _) in enumerate(everyone):
        for owner in held:
            source.setdefault(owner, r)
    lost = sorted({owner for _, asked in everyone for owner in asked} - source.keys())
    if lost:
        raise ValueError(f"media: expected a process that holds each owner, got none for {lost[:5]}")

    # every process walks through the same list, so nobody waits for a message that comes after another
    mine = _travel(media, [set(held) for held, _ in everyone], [set(asked) for _, asked in everyone], source)
    tensors = {}
    for name, x in media.tensors.items():
        tensors[name] = torch.cat([x[:0], *(mine[owner, name] for owner in needed)])
    held = torch.zeros_like(media.held)
    held[needed] = True
    return Media(tensors=tensors, rows=media.rows, of=media.of, held=held)


def _travel(
    media: Media, held: Sequence[set[int]], asked: Sequence[set[int]], source: dict[int, int]
) -> dict[tuple[int, str], Tensor]:
    """Return (owner, name) -> its rows, for the owners that this process asked for."""
    me = rank()
    own = {name: media.split(name, range(len(media.held))) for name in media.tensors}
    rows: dict[tuple[int, str], Tensor] = {}
    sent: list[tuple[torch_dist.Work | None, Tensor]] = []
    for owner in sorted(source):
        receivers = [r for r, needs in enumerate(asked) if owner in needs and owner not in held[r]]
        for name, x in media.tensors.items():
            shape = (int(media.rows[name][owner]), *x.shape[1:])
            if owner in asked[me] and owner in held[me]:
                rows[owner, name] = own[name][owner]
            if me in receivers:
                rows[owner, name] = _received(shape, x, source[owner])
            if me == source[owner]:
                sent += [_sent(own[name][owner], r) for r in receivers]
    for work, _ in sent:
        if work is not None:
            work.wait()
    return rows


def _sent(x: Tensor, to: int) -> tuple[torch_dist.Work | None, Tensor]:
    """Begin to send the bytes of a tensor; they must live until the work is done."""
    data = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    if not data.numel():
        return None, data
    return torch_dist.isend(data, to), data


def _received(shape: Sequence[int], like: Tensor, source: int) -> Tensor:
    """Receive a tensor of the type and device of `like` from another process."""
    x = torch.empty(*shape, dtype=like.dtype)
    data = x.view(-1).view(torch.uint8)
    if data.numel():
        torch_dist.recv(data, source)
    return x.to(like.device)
