"""Units: sequences that belong together, such as both sides of a pair or all of a ranked list.

A pack has the size of each of its units. A function that cuts a batch also takes one size for all, an int:
then placeholders are units of that size, where those of lists of any length are single sequences.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.types.batch import Packed

__all__ = [
    "common_size", "count_filled", "members_of", "members_of_each", "placeholder_size", "sizes_of", "total",
    "unit_of", "units_of",
]  # fmt: skip


def sizes_of(b: Packed) -> tuple[int, ...]:
    """Return the number of sequences of each unit of a pack."""
    return tuple(check.units(b.unit or 1, b.num_seqs))


def common_size(b: Packed) -> int:
    """Return the number of sequences that every unit of a pack has, or 1 where they differ."""
    sizes = set(b.unit)
    return sizes.pop() if len(sizes) == 1 else 1


def unit_of(b: Packed) -> Tensor:
    """Return the unit of each sequence of a pack, [K] i64.

    Scores of a listwise loss are compared within it: `loss.plackett_luce(score, rank, unit_of(b))`.
    """
    return _numbers(sizes_of(b), b.seq.device)


def _numbers(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return 0 for each member of the first unit, 1 for each of the second, ..., i64."""
    return torch.tensor([u for u, size in enumerate(sizes) for _ in range(size)], device=device).long()


def total(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum x [B] over the members of each unit, [U]."""
    zeros = x.new_zeros(len(sizes))
    return zeros.index_add(0, _numbers(sizes, x.device), x)


def members_of(sizes: Sequence[int], which: Sequence[int]) -> list[int]:
    """Return the members of some units, in that order."""
    return members_of_each(sizes, [which])[0]


def members_of_each(sizes: Sequence[int], parts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return `members_of` of many parts, in time that grows with their members."""
    ends = list(accumulate(sizes))
    return [[i for u in which for i in range(ends[u] - sizes[u], ends[u])] for which in parts]


def units_of(unit: int | Sequence[int], rows: Sequence[int]) -> int | tuple[int, ...]:
    """Return `unit` of a pack of `rows`, whole units of a batch, from that of the batch."""
    if isinstance(unit, int):
        return unit
    starts = dict(zip(accumulate(unit, initial=0), unit))
    return tuple(starts[row] for row in rows if row in starts)


def placeholder_size(unit: int | Sequence[int]) -> int:
    """Return the sequences of a placeholder unit: as many as all have, or one where they differ."""
    return unit if isinstance(unit, int) else 1


def count_filled(b: Packed) -> int:
    """Count the units with rows."""
    return sum(end <= len(b.rows) for end in accumulate(sizes_of(b)))
