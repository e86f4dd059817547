"""Rows that packs without media borrow.

Where a batch has media, the towers run in every pack. Models whose parts are sharded run
alike on all processes, so a tower that only some packs need would stop the others. What is borrowed has
nothing to learn: its mask is False and its w 0, and it is in no row.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.packing.packs import smallest, total
from rft_fn.types import Experience, Packed
from rft_fn.types.media import Media

__all__ = ["counts", "lenders", "owners", "reserve", "with_media"]


def counts(media: Media | None) -> dict[str, Tensor]:
    """name -> [B] i64: the rows of media of each sequence, for the names of which there are any."""
    if media is None:
        return {}
    found = {name: media.count(name) for name in media.tensors}
    return {name: count for name, count in found.items() if bool(count.any())}


def _cheapest(count: Mapping[str, Tensor], size: Tensor, have: Sequence[int]) -> list[int]:
    """Items to add to `have`, so that there are rows of every name.

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


def lenders(exp: Experience, rows: Sequence[int]) -> list[int]:
    """The rows that a pack of `rows` borrows.

    For each kind of media that the batch has and the pack lacks, the row that has it and the fewest tokens
    that were read, not sampled. A function of numbers alone: media need not be held.
    """
    count = counts(exp.media)
    if all(bool(owned[list(rows)].any()) for owned in count.values()):
        return []
    return _cheapest(count, _read(exp), rows)


def _read(exp: Experience) -> Tensor:
    """The inputs of each row that were not sampled, [B] i64."""
    inputs = (exp.length - 1).clamp(min=0)
    position = torch.arange(exp.mask.shape[1], device=exp.mask.device)
    return inputs - (exp.mask & (position < inputs[:, None])).sum(-1)


def reserve(exp: Experience, unit: int | Sequence[int]) -> int:
    """The tokens that a pack may have to borrow: 0 if every unit of rows has each kind of media."""
    sizes = check.units(unit, len(exp.tokens))
    lacking = [c for c in counts(exp.media).values() if not bool(total(c, sizes).all())]
    if not lacking:
        return 0
    return smallest(unit) * int(_read(exp)[lenders(exp, [])].sum())


def owners(exp: Experience, packs: Sequence[Sequence[int]]) -> list[int]:
    """The owners of media that packs of these rows read, also those that they borrow."""
    if exp.media is None:
        return []
    rows = [row for pack in packs for row in [*pack, *lenders(exp, pack)]]
    of = exp.media.of[rows]
    return of[of >= 0].unique().tolist()


def with_media(b: Packed, which: Sequence[int]) -> list[int]:
    """The units of a pack that `which` of them borrow: the smallest of each kind that they lack."""
    sizes = check.units(b.unit, b.num_seqs)
    size = total(torch.bincount(b.seq, minlength=b.num_seqs), sizes)
    count = {name: total(c, sizes) for name, c in counts(b.media).items()}
    return _cheapest(count, size, which)
