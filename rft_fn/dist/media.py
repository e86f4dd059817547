"""Rows of media, on their way to the processes whose packs need them."""

from collections.abc import Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor

from rft_fn.dist.collectives import all_gather_object, rank, world
from rft_fn.types.media import Media

__all__ = ["fetch_media"]


def fetch_media(media: Media | None, owners: Sequence[int]) -> Media | None:
    """The media with the rows of `owners`, and no others, on this process.

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

    # every process walks through the same list, so nobody waits for a message that is behind another
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
    """(owner, name) -> its rows, for the owners that this process asked for."""
    me = rank()
    own = {name: media.split(name, range(len(media.held))) for name in media.tensors}
    found: dict[tuple[int, str], Tensor] = {}
    sent: list[tuple[torch_dist.Work | None, Tensor]] = []
    for owner in sorted(source):
        receivers = [r for r, needs in enumerate(asked) if owner in needs and owner not in held[r]]
        for name, x in media.tensors.items():
            shape = (int(media.rows[name][owner]), *x.shape[1:])
            if owner in asked[me] and owner in held[me]:
                found[owner, name] = own[name][owner]
            if me in receivers:
                found[owner, name] = _received(shape, x, source[owner])
            if me == source[owner]:
                sent += [_sent(own[name][owner], r) for r in receivers]
    for work, _ in sent:
        if work is not None:
            work.wait()
    return found


def _sent(x: Tensor, to: int) -> tuple[torch_dist.Work | None, Tensor]:
    """Begin to send the bytes of a tensor; they have to live until the work is done."""
    data = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    if not data.numel():
        return None, data
    return torch_dist.isend(data, to), data


def _received(shape: Sequence[int], like: Tensor, source: int) -> Tensor:
    """A tensor of the type and device of `like`, from another process."""
    x = torch.empty(*shape, dtype=like.dtype)
    data = x.view(-1).view(torch.uint8)
    if data.numel():
        torch_dist.recv(data, source)
    return x.to(like.device)
