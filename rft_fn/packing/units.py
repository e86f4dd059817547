"""Units: sequences that belong together, such as both sides of a pair or all of a ranked list."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.types.batch import Packed

__all__ = [
    "Unit", "count_filled", "members_of", "placeholder_size", "placeholder_units", "total", "unit_of",
    "units_of",
]  # fmt: skip

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
