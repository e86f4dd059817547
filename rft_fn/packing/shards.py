"""Whole batches, cut into the packs of each rank, or into minibatches."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rft_fn import check, rng, tree
from rft_fn.packing.families import find_families
from rft_fn.packing.media import pack, tokens_to_borrow
from rft_fn.packing.plan import assign, bundle, deal, spread
from rft_fn.packing.units import members_of_each, total, units_of
from rft_fn.types import Experience, Packed, Rollout
from rft_fn.types.media import MEDIA_COST

__all__ = [
    "Halves", "cut", "halves", "left_out", "minibatch_units", "minibatches", "shard", "take",
]  # fmt: skip

MORE = 1.25  # packs in place of one, at most, to keep the rows of a family together

Batch = TypeVar("Batch", Experience, Rollout)


def take(exp: Batch, index: Tensor) -> Batch:
    """Take the rows `index` [n] of an experience or a rollout."""
    rows = tree.map(lambda x: x[index], tree.replace(exp, media=None))
    return rows if exp.media is None else tree.replace(rows, media=exp.media.take(index.tolist()))


def _learns(exp: Experience, rows: Sequence[int]) -> Tensor:
    """Return whether each unit has targets, [U] bool, from the number of rows of each.

    A target is a token in mask with one before it.
    """
    return total(exp.mask[:, 1:].any(-1).long(), rows) > 0


def left_out(exp: Experience, *, unit: int | Sequence[int] = 1) -> list[int]:
    """Return the units of rows that `shard` leaves out.

    None of their tokens is in mask. Their numbers serve to count them in a metric, or to find out what is
    wrong with them. ValueError for units that do not make up the rows.
    """
    learns = _learns(exp, check.units(unit, len(exp.tokens)))
    return (~learns).nonzero()[:, 0].tolist()


def _sizes(exp: Experience, rows: Sequence[int]) -> list[int]:
    """Return the inputs of each unit of rows; 0 for a unit without a token in mask."""
    inputs = total((exp.length - 1).clamp(min=0), rows)
    return torch.where(_learns(exp, rows), inputs, 0).tolist()


def _costs(exp: Experience, sizes: Sequence[int], rows: Sequence[int], media_cost: float) -> list[int]:
    """Return the work of each unit of rows, in that of a token: its tokens, and its numbers of media."""
    numbers = torch.zeros(len(sizes), dtype=torch.float64)
    if exp.media is not None:
        for name, x in exp.media.tensors.items():
            count = total(exp.media.count(name).cpu(), rows)
            numbers += count * math.prod(x.shape[1:])
    costs = [size + round(media_cost * n) for size, n in zip(sizes, numbers.tolist())]
    return [cost * (size > 0) for size, cost in zip(sizes, costs)]


def cut(
    exp: Experience,
    budget: int,
    world: int = 1,
    *,
    unit: int | Sequence[int] = 1,
    most: int = 0,
    one_unit: bool = False,
    media_cost: float = MEDIA_COST,
    share_prefixes: bool = False,
) -> list[list[list[int]]]:
    """Return the rows of each pack of each rank, as `shard` packs them.

    A function of numbers only, the same on every rank: rows of media need not be held. With `one_unit` each
    pack has one unit, whatever `most`.
    """
    rows = check.units(unit, len(exp.tokens))
    largest = max(rows, default=1)
    if most and most < largest:
        raise ValueError(f"most: expected >= {largest} rows per pack, a unit's, got {most}")
    if media_cost < 0:
        raise ValueError(f"media_cost: expected >= 0 tokens per number of media, got {media_cost}")
    sizes = _sizes(exp, rows)
    costs = _costs(exp, sizes, rows, media_cost)
    budget = budget or sum(sizes)

    # a pack of one unit is a pack of one row, where each unit counts as a row
    counted = [1] * len(rows) if one_unit else rows
    most = 1 if one_unit else most

    # a pack may have to borrow; only a unit that fills the budget leaves no room for that
    room = min(budget, max(budget - tokens_to_borrow(exp, unit), *sizes, 0))

    packs = _packs(sizes, costs, counted, room, world, most)
    if share_prefixes and not one_unit:
        families, saved = find_families(exp, sizes, rows)
        lists = bundle(sizes, families, room, most=most, rows=counted)
        cheaper = list(costs)
        for i in itertools.chain.from_iterable(items[1:] for items in lists):
            cheaper[i] -= saved[i]

        # a list is packed as one item
        totals = [[sum(x[i] for i in items) for items in lists] for x in (sizes, cheaper, counted)]
        together = _packs(totals[0], totals[1], totals[2], room, world, most)
        if len(together) <= MORE * len(packs):
            packs = [[i for k in pack for i in lists[k]] for pack in together]
            costs = cheaper

    # a unit stays whole, and its rows in order
    return [members_of_each(rows, map(sorted, part)) for part in deal(costs, packs, world)]


class Halves(NamedTuple):
    """A batch in two halves, with no prompt in both."""

    second: Tensor  # [B] bool, the rows of the second half
    prompts: tuple[int, int]  # how many each has
    packs: int  # packs of the first half; 0 where no first packs hold half of the prompts whole


def halves(exp: Experience, packs: Sequence[Sequence[int]], *, unit: int | Sequence[int] = 1) -> Halves:
    """Return the halves of a batch: its first packs and the others, else the first prompts and the others.

    Prompts are the groups of `exp`; without groups each unit of rows is one. `packs` are the rows of each
    pack. Its first packs are a half where they hold at least a quarter of the prompts, at most three, and all
    of them whole, in packs of two or more on average: packs of single rows are in the order of their length.
    """
    sizes = check.units(unit, len(exp.tokens))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))
    if exp.group is not None:
        starts = torch.tensor([0, *itertools.accumulate(sizes)][: len(sizes)], dtype=torch.long)
        owner = exp.group.cpu()[starts][owner]
    of_packs = [set(owner[list(rows)].tolist()) for rows in packs]
    every = sorted(set().union(*of_packs))

    # how many prompts are in the first packs, for each number of packs that leaves no prompt in both
    filled = [pack for pack in of_packs if pack]
    ways = []
    for count in range(1, len(of_packs)):
        first, rest = set().union(*of_packs[:count]), set().union(*of_packs[count:])
        if not first & rest and 4 * min(len(first), len(rest)) >= len(every) >= 2 * len(filled):
            ways.append((abs(len(first) - len(rest)), count, first))
    _, count, first = min(ways, default=(0, 0, set(every[: len(every) // 2])))
    second = ~torch.isin(owner, torch.tensor(sorted(first), dtype=torch.long))
    return Halves(second.to(exp.mask.device), (len(first), len(every) - len(first)), count)


def _packs(
    sizes: Sequence[int], costs: Sequence[int], rows: Sequence[int], room: int, world: int, most: int
) -> list[list[int]]:
    """Put items into as few packs as best fit needs, rounded up to a multiple of `world`."""
    # best fit tells how many packs are needed; equal packs run faster than a few full ones and a small one
    packs = assign(sizes, room, most=most, rows=rows)
    count = max(math.ceil(len(packs) / world), 1) * world
    packs = spread(sizes, costs, room, count, most=most, rows=rows) or packs
    return packs + [[] for _ in range(count - len(packs))]


def shard(
    exp: Experience,
    budget: int,
    world: int = 1,
    *,
    unit: int | Sequence[int] = 1,
    most: int = 0,
    media_cost: float = MEDIA_COST,
    share_prefixes: bool = False,
) -> list[list[Packed]]:
    """Cut a batch into equally many packs for each rank.

    Returns the packs of each of `world` ranks. Packs have at most `budget` tokens and `most` rows, where 0
    is no limit. Units without a token in mask have nothing to teach and are left out (`left_out` names
    them). `unit` consecutive rows stay together in one pack, in order: 2 for losses of pairs; for ranked
    lists of any length it is the number of rows of each. There are as few packs as best fit needs, rounded
    up to a multiple of `world`; rows are spread over them evenly if the budget allows it. ValueError for a
    row (or unit) that is larger than the budget, units that do not make up the rows, or a `most` below one.

    With `share_prefixes` units that begin alike stay in one pack where they can, for models that compute such
    beginnings once: samples of one prompt, and of one group also branches, turns and rewritten contexts. That
    may take a quarter more packs, with fewer tokens to compute. Packs and ranks are then balanced by these.

    With media, packs and ranks are balanced by tokens + media_cost * numbers of media. The default, 1e-4, is
    the work of an encoder of a tenth of the text model: Qwen2-VL's 0.675 B parameters to 7.6 B make 0.09
    tokens of a patch of 1,176 numbers. The budget stays in tokens; it has room for a row that a pack without
    media borrows (see `pack`), except with a row (or unit) that is nearly as large as the budget.
    """
    plans = cut(
        exp,
        budget,
        world,
        unit=unit,
        most=most,
        media_cost=media_cost,
        share_prefixes=share_prefixes,
    )
    return [[pack(exp, rows, unit=units_of(unit, rows)) for rows in part] for part in plans]


def minibatches(exp: Experience, n: int, key: int, *, unit: int | Sequence[int] = 1) -> list[Experience]:
    """Cut a batch into n minibatches in random order.

    They are of nearly equal size, and `key` draws the order. Each is for one update; `unit` consecutive
    rows stay together, in order; units of different sizes are given by their sizes, and `minibatch_units`
    has those of each minibatch. `w` is cut with the rest, so on average it sums to 1/n of the batch's:
    recompute it with `weight.*` on each minibatch to give every update a mean over its tokens. One
    minibatch is `exp` itself. ValueError unless 1 <= n <= the number of units, or for units that do not
    make up the rows.
    """
    rows = check.units(unit, len(exp.tokens))
    parts = _shuffled(unit, len(rows), n, key)
    if n == 1:
        return [exp]
    index = [torch.tensor(part, device=exp.tokens.device) for part in members_of_each(rows, parts)]
    return [take(exp, part) for part in index]


def minibatch_units(unit: Sequence[int], n: int, key: int) -> list[list[int]]:
    """Return the sizes of the units in each of `minibatches(exp, n, key, unit=unit)`."""
    return [[unit[u] for u in part] for part in _shuffled(unit, len(unit), n, key)]


def _shuffled(unit: int | Sequence[int], count: int, n: int, key: int) -> list[list[int]]:
    """Return the numbers of the units in each of n minibatches, in random order; one has all in order."""
    if not 1 <= n <= count:
        of = f"units of {unit} rows" if isinstance(unit, int) else "units"
        of = "rows" if unit == 1 else of
        raise ValueError(f"n: expected between 1 and the number of {of} {count}, got {n}")
    if n == 1:
        return [list(range(count))]
    order = torch.randperm(count, generator=rng.generator(key))
    return [part.tolist() for part in order.tensor_split(n)]
