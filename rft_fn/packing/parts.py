"""Packs taken apart and put together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rft_fn import check, tree
from rft_fn.packing import lending
from rft_fn.packing import units as groups
from rft_fn.types import Packed
from rft_fn.types.media import Media

__all__ = ["join", "masked", "own", "reset_position_ids", "units"]


def reset_position_ids(seq: Tensor) -> Tensor:
    """Positions that restart at 0 with every sequence, [T] i64.

    `seq` [T] has the sequence numbers, in contiguous runs. The function does not wait for a GPU.
    """
    check.shapes(seq=(seq, "T"))
    index = torch.arange(seq.shape[0], device=seq.device)
    if not seq.numel():
        return index
    return index - torch.where(_begins(seq), index, 0).cummax(0).values


def _begins(seq: Tensor) -> Tensor:
    """Whether each token is the first of its sequence, [T] bool."""
    starts = torch.ones_like(seq, dtype=torch.bool)
    starts[1:] = seq[1:] != seq[:-1]
    return starts


def masked(b: Packed) -> Packed:
    """A pack with nothing to learn: the tokens that were read, in no row.

    Tokens that were sampled are left out, which are text whatever their number says.
    """
    sampled = torch.cat([b.mask.new_zeros(1), b.mask[:-1]]) & (b.pos > 0)
    part = tree.map(lambda x: x[~sampled], tree.replace(b, media=None))

    nothing = tree.map(torch.zeros_like, part)
    return tree.replace(
        nothing,
        tokens=part.tokens,
        target=part.target,
        pos=reset_position_ids(part.seq),
        seq=part.seq,
        media=b.media,
        rows=(),
        padding=0,
    )


def join(b: Packed, borrowed: Packed) -> Packed:
    """A pack without padding, and behind it what it borrows."""
    plain = tree.replace(borrowed, seq=borrowed.seq + b.num_seqs, media=None)

    # static fields agree
    like = tree.replace(plain, num_seqs=b.num_seqs, rows=b.rows, padding=b.padding, unit=b.unit)
    return tree.replace(
        tree.map(lambda x, y: torch.cat([x, y]), tree.replace(b, media=None), like),
        media=Media.concat([b.media, borrowed.media], [b.num_seqs, borrowed.num_seqs]),
        num_seqs=b.num_seqs + borrowed.num_seqs,
        unit=groups.joined(b.unit, borrowed.unit),
    )


def units(b: Packed, which: Sequence[int]) -> Packed:
    """Some units of the sequences of a pack, in the order of the pack; without padding."""
    which = sorted(which)
    members = groups.members(check.units(b.unit, b.num_seqs), which)

    # a token at position 0 that does not begin its sequence is padding
    number = torch.tensor(which, device=b.seq.device)
    at = torch.isin(groups.unit_of(b)[b.seq], number) & (_begins(b.seq) | (b.pos > 0))
    part = tree.map(lambda x: x[at], tree.replace(b, media=None))
    media = None
    if b.media is not None:
        media = b.media.take(members)
    seq = torch.searchsorted(torch.tensor(members, device=b.seq.device), part.seq)
    rows = tuple(b.rows[i] for i in members if i < len(b.rows))
    unit = groups.chosen(b.unit, which)
    return tree.replace(part, seq=seq, media=media, num_seqs=len(members), rows=rows, unit=unit, padding=0)


def own(b: Packed) -> Packed:
    """A pack without what it borrowed and its padding; an empty one as it is."""
    if not b.rows:
        return b
    part = units(b, range(groups.filled(b)))
    if not lending.counts(part.media):
        part = tree.replace(part, media=None)
    return part
