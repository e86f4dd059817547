"""Units: sequences that belong together, such as both sides of a pair or all of a ranked list.

A unit is one number, the sequences of every unit, or their number in each unit.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.types import Packed

__all__ = ["among", "chosen", "filled", "joined", "members", "singles", "smallest", "total", "unit_of"]

Unit = int | tuple[int, ...]  # of a pack


def unit_of(b: Packed) -> Tensor:
    """The unit of each sequence of a pack, [K] i64.

    Scores of a listwise loss are compared within it: `loss.plackett_luce(score, rank, unit_of(b))`.
    """
    return _numbers(check.units(b.unit, b.num_seqs), b.seq.device)


def _numbers(sizes: Sequence[int], device: torch.device) -> Tensor:
    """0 for each member of the first unit, 1 for each of the second, ..., i64."""
    return torch.tensor([u for u, size in enumerate(sizes) for _ in range(size)], device=device).long()


def total(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The sum of x [B] over the members of each unit, [U]."""
    zeros = x.new_zeros(len(sizes))
    return zeros.index_add(0, _numbers(sizes, x.device), x)


def members(sizes: Sequence[int], which: Sequence[int]) -> list[int]:
    """The members of some units, in that order."""
    ends = list(accumulate(sizes))
    return [i for u in which for i in range(ends[u] - sizes[u], ends[u])]


def among(unit: int | Sequence[int], rows: Sequence[int]) -> Unit:
    """The units of a pack of whole units of a batch, from those of the batch."""
    if isinstance(unit, int):
        return unit
    starts = dict(zip(accumulate(unit, initial=0), unit))
    return tuple(starts[row] for row in rows if row in starts)


def chosen(unit: Unit, which: Sequence[int]) -> Unit:
    """The units of a pack of only some of them."""
    if isinstance(unit, int):
        return unit
    return tuple(unit[u] for u in which)


def joined(unit: Unit, more: Unit) -> Unit:
    """The units of a pack and of what it borrows."""
    if isinstance(unit, int) or isinstance(more, int):
        return unit
    return unit + more


def smallest(unit: int | Sequence[int]) -> int:
    """The sequences of a unit that only fills up: as many as all have, or one where they differ."""
    if isinstance(unit, int):
        return unit
    return 1


def singles(unit: int | Sequence[int], count: int) -> Unit:
    """The units of `count` sequences that only fill up."""
    if isinstance(unit, int):
        return unit
    return (1,) * count


def filled(b: Packed) -> int:
    """The number of units with rows."""
    return sum(end <= len(b.rows) for end in accumulate(check.units(b.unit, b.num_seqs)))
