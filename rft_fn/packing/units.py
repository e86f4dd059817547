"""Units of rows that belong together, and rows that packs without media borrow.

Where a batch has media, the towers run in every pack. Models with sharded parts run
alike on all processes, so a tower that only some packs need would stop the others. What is borrowed has
nothing to learn: its mask is False and its w 0, and it is in no row.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.types import Experience, Packed
from rft_fn.types.media import Media

__all__ = [
    "count_filled", "counts", "members_of", "owners", "placeholder_size", "placeholder_units",
    "rows_to_borrow", "tokens_to_borrow", "total", "unit_of", "units_of", "units_to_borrow",
]  # fmt: skip


# ---------- units: sequences that belong together, such as both sides of a pair or all of a ranked list


Unit = int | tuple[int, ...]  # of a pack


def unit_of(b: Packed) -> Tensor:
    """Return the unit of each sequence of a pack, [K] i64.

    Scores of a listwise loss are compared within it: `loss.plackett_luce(score, rank, unit_of(b))`.
    """
    return _numbers(check.units(b.unit, b.num_seqs), b.seq.device)


def _numbers(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return 0 for each member of the first unit, 1 for each of the second, ..., i64."""
    return torch.tensor([u for u, size in enumerate(sizes) for _ in range(size)], device=device).long()


def total(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum x [B] over the members of each unit, [U]."""
    zeros = x.new_zeros(len(sizes))
    return zeros.index_add(0, _numbers(sizes, x.device), x)


def members_of(sizes: Sequence[int], which: Sequence[int]) -> list[int]:
    """Return the members of some units, in that order."""
    ends = list(accumulate(sizes))
    return [i for u in which for i in range(ends[u] - sizes[u], ends[u])]


def units_of(unit: int | Sequence[int], rows: Sequence[int]) -> Unit:
    """Return the units of a pack of `rows`, whole units of a batch, from the units of the batch."""
    if isinstance(unit, int):
        return unit
    starts = dict(zip(accumulate(unit, initial=0), unit))
    return tuple(starts[row] for row in rows if row in starts)


def placeholder_size(unit: int | Sequence[int]) -> int:
    """Return the sequences of a placeholder unit: as many as all have, or one where they differ."""
    return unit if isinstance(unit, int) else 1


def placeholder_units(unit: int | Sequence[int], count: int) -> Unit:
    """Return the units of `count` placeholder sequences."""
    return unit if isinstance(unit, int) else (1,) * count


def count_filled(b: Packed) -> int:
    """Count the units with rows."""
    return sum(end <= len(b.rows) for end in accumulate(check.units(b.unit, b.num_seqs)))


# ---------- rows that packs without media borrow


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
    sizes = check.units(b.unit, b.num_seqs)
    size = total(torch.bincount(b.seq, minlength=b.num_seqs), sizes)
    count = {name: total(c, sizes) for name, c in counts(b.media).items()}
    return _cheapest(count, size, which)
