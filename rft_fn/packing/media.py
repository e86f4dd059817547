"""Packs of a batch with media: a pack without media borrows a row that has some.

Where a batch has media, the towers run in every pack. Models with sharded parts run
alike on all processes, so a tower that only some packs need would stop the others. What is borrowed has
nothing to learn: its mask is False and its w 0, and it is in no row.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rft_fn import check, tree
from rft_fn.packing import packs
from rft_fn.packing.packs import begins, of_rows, reset_position_ids
from rft_fn.packing.units import (
    common_size,
    count_filled,
    members_of,
    placeholder_size,
    sizes_of,
    total,
    unit_of,
)
from rft_fn.types import Experience, Packed
from rft_fn.types.media import Media

__all__ = [
    "counts", "drop_borrowed", "fill", "join", "masked", "owners", "pack", "placeholder", "rows_to_borrow",
    "select_units", "single_unit", "tokens_to_borrow", "units_to_borrow",
]  # fmt: skip


def pack(exp: Experience, rows: Sequence[int], *, unit: int | Sequence[int] = 1) -> Packed:
    """Pack rows of a batch into one micro-batch.

    The rows' tokens follow each other. Every auxiliary field is 0 outside mask. `unit` consecutive rows
    belong together: 2 for losses of pairs; for ranked lists of any length it is the number of rows of
    each. With no rows, or no tokens: a `placeholder`, so that all ranks run equally many packs.

    Where the batch has media of a kind that none of the rows has, the pack borrows the row with the fewest
    tokens that has some. Its tokens are at the end, mask False and w 0, and it is not in `rows`. So the
    towers of a model run in every pack. ValueError for units that do not make up the rows, and for media
    that this process does not hold.
    """
    packed = packs.pack(exp, rows, unit=unit)
    if not counts(exp.media):
        return packed
    if packed.rows:
        packed = _with_media(exp, packed)
    # a borrowed row is both sides of a pair
    size = placeholder_size(unit)
    lenders = rows_to_borrow(exp, packed.rows)
    if not lenders:
        return packed
    borrowed = [row for row in lenders for _ in range(size)]
    lent = masked(_with_media(exp, of_rows(exp, borrowed, (size,) * len(lenders))))
    return join(packed, lent) if packed.rows else lent


def _with_media(exp: Experience, packed: Packed) -> Packed:
    """Return a pack with the media of its rows."""
    assert exp.media is not None
    media = exp.media.take(packed.rows)
    media.require_held()
    return tree.replace(packed, media=media)


def placeholder(like: Packed, *, size: int = 0) -> Packed:
    """Return a masked pack that adds nothing, with media where `like` has some.

    It has the fields of `like`, with one unit of `size` sequences, by default as many as each unit of `like`,
    one where they differ. Of a pack with media it has the smallest such units of sequences that have some, of
    each kind, so that it runs the towers too; else it is `packs.placeholder`.
    """
    size = size or common_size(like)
    even = tree.replace(like, unit=(size,) * (like.num_seqs // size))
    lenders = units_to_borrow(even, [])
    return masked(select_units(even, lenders)) if lenders else packs.placeholder(like, size=size)


def masked(b: Packed) -> Packed:
    """Return a pack with nothing to learn: the tokens that were read, in no row.

    Tokens that were sampled are left out; they are text whatever their number says.
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
    """Append what an unpadded pack borrows to it."""
    plain = tree.replace(borrowed, seq=borrowed.seq + b.num_seqs, media=None)

    # static fields agree
    like = tree.replace(plain, num_seqs=b.num_seqs, rows=b.rows, padding=b.padding, unit=b.unit)
    return tree.replace(
        tree.map(lambda x, y: torch.cat([x, y]), tree.replace(b, media=None), like),
        media=Media.concat([b.media, borrowed.media], [b.num_seqs, borrowed.num_seqs]),
        num_seqs=b.num_seqs + borrowed.num_seqs,
        unit=sizes_of(b) + sizes_of(borrowed),
    )


def select_units(b: Packed, which: Sequence[int]) -> Packed:
    """Return some units of the sequences of a pack, in the order of the pack; without padding."""
    which = sorted(which)
    sizes = sizes_of(b)
    members = members_of(sizes, which)

    # a token at position 0 that does not begin its sequence is padding
    number = torch.tensor(which, device=b.seq.device)
    at = torch.isin(unit_of(b)[b.seq], number) & (begins(b.seq) | (b.pos > 0))
    part = tree.map(lambda x: x[at], tree.replace(b, media=None))
    media = None if b.media is None else b.media.take(members)
    seq = torch.searchsorted(torch.tensor(members, device=b.seq.device), part.seq)
    rows = tuple(b.rows[i] for i in members if i < len(b.rows))
    unit = tuple(sizes[u] for u in which)
    return tree.replace(part, seq=seq, media=media, num_seqs=len(members), rows=rows, unit=unit, padding=0)


def drop_borrowed(b: Packed) -> Packed:
    """Return a pack without what it borrowed and its padding; an empty one unchanged."""
    if not b.rows:
        return b
    part = select_units(b, range(count_filled(b)))
    return part if counts(part.media) else tree.replace(part, media=None)


def fill(b: Packed, count: int) -> Packed:
    """Add placeholders of one sequence to a pack of lists of any length, up to `count` sequences.

    So packs of one list each are equally many forwards of a model that takes one sequence at a time.
    """
    while b.num_seqs < count:
        b = join(b, placeholder(b, size=1))
    return b


def single_unit(b: Packed, unit: int) -> Packed:
    """Return one unit of a pack as a pack, which borrows media from the others."""
    part = select_units(b, [unit])
    lenders = units_to_borrow(b, [unit])
    return join(part, masked(select_units(b, lenders))) if lenders else part


def counts(media: Media | None) -> dict[str, Tensor]:
    """Return name -> [B] i64, the rows of media of each sequence, of the names that have any."""
    if media is None:
        return {}
    named = {name: media.count(name) for name in media.tensors}
    return {name: count for name, count in named.items() if bool(count.any())}


def _cheapest(count: Mapping[str, Tensor], size: Tensor, have: Sequence[int]) -> list[int]:
    """Choose items to add to `have`, so that there are rows of every name.

    For each name that is missing the item of the smallest `size` above 0; ties go by index.
    """
    chosen: list[int] = []
    for rows in count.values():
        if bool(rows[[*have, *chosen]].any()):
            continue
        able = ((rows > 0) & (size > 0)).nonzero().flatten().tolist()
        sizes = size.tolist()
        chosen += sorted(able, key=lambda i: (sizes[i], i))[:1]
    return chosen


def rows_to_borrow(exp: Experience, rows: Sequence[int]) -> list[int]:
    """Return the rows that a pack of `rows` borrows.

    For each kind of media that the batch has and the pack lacks, the row that has it and the fewest tokens
    that were read, not sampled. A function of numbers only: media need not be held.
    """
    count = counts(exp.media)
    if all(bool(owned[list(rows)].any()) for owned in count.values()):
        return []
    return _cheapest(count, _read(exp), rows)


def _read(exp: Experience) -> Tensor:
    """Count the inputs of each row that were not sampled, [B] i64."""
    inputs = (exp.length - 1).clamp(min=0)
    position = torch.arange(exp.mask.shape[1], device=exp.mask.device)
    return inputs - (exp.mask & (position < inputs[:, None])).sum(-1)


def tokens_to_borrow(exp: Experience, unit: int | Sequence[int]) -> int:
    """Return the most tokens that a pack may borrow: 0 if every unit has all kinds of media."""
    sizes = check.units(unit, len(exp.tokens))
    lacking = [c for c in counts(exp.media).values() if not bool(total(c, sizes).all())]
    if not lacking:
        return 0
    return placeholder_size(unit) * int(_read(exp)[rows_to_borrow(exp, [])].sum())


def owners(exp: Experience, packs: Sequence[Sequence[int]]) -> list[int]:
    """Return the owners of media that packs of these rows read, also of what they borrow."""
    if exp.media is None:
        return []
    rows = [row for pack in packs for row in [*pack, *rows_to_borrow(exp, pack)]]
    of = exp.media.of[rows]
    return of[of >= 0].unique().tolist()


def units_to_borrow(b: Packed, which: Sequence[int]) -> list[int]:
    """Return the smallest units of a pack that supply each kind of media that `which` lack."""
    sizes = sizes_of(b)
    size = total(torch.bincount(b.seq, minlength=b.num_seqs), sizes)
    count = {name: total(c, sizes) for name, c in counts(b.media).items()}
    return _cheapest(count, size, which)
