"""Whole batches, cut into packs or minibatches."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from einops import reduce
from torch import Tensor

from rft_fn import rng, tree
from rft_fn.packing import lending, plan
from rft_fn.packing.packs import pack
from rft_fn.types import Experience, Packed, Rollout
from rft_fn.types.media import MEDIA_COST

__all__ = ["cut", "left_out", "minibatches", "shard", "take"]

Batch = TypeVar("Batch", Experience, Rollout)


def take(exp: Batch, index: Tensor) -> Batch:
    """The rows `index` [n] of an experience or a rollout."""
    rows = tree.map(lambda x: x[index], tree.replace(exp, media=None))
    if exp.media is None:
        return rows
    return tree.replace(rows, media=exp.media.take(index.tolist()))


def _learns(exp: Experience, unit: int) -> Tensor:
    """Whether each unit of rows has targets, [B / unit] bool.

    A target is a token in mask with one before it.
    """
    rows = exp.tokens.shape[0]
    if unit < 1 or rows % unit:
        raise ValueError(f"unit: expected a divisor of the {rows} rows, got {unit}")
    return exp.mask[:, 1:].any(-1).view(-1, unit).any(-1)


def left_out(exp: Experience, *, unit: int = 1) -> list[int]:
    """The units of rows that `shard` leaves out.

    None of their tokens is in mask. Their numbers serve to count them in a metric, or to find out what is
    wrong with them. ValueError for a unit that does not divide the rows.
    """
    return (~_learns(exp, unit)).nonzero()[:, 0].tolist()


def _sizes(exp: Experience, unit: int) -> list[int]:
    """Inputs of each unit of rows.

    A unit without a token in mask counts 0.
    """
    learns = _learns(exp, unit)
    inputs = reduce((exp.length - 1).clamp(min=0), "(units unit) -> units", "sum", unit=unit)
    return torch.where(learns, inputs, 0).tolist()


def _costs(exp: Experience, sizes: Sequence[int], unit: int, media_cost: float) -> list[int]:
    """The work of each unit of rows, in that of a token: its tokens, and its numbers of media."""
    numbers = torch.zeros(len(sizes), dtype=torch.float64)
    if exp.media is not None:
        for name, x in exp.media.tensors.items():
            count = exp.media.count(name).cpu().view(-1, unit).sum(-1)
            numbers += count * math.prod(x.shape[1:])
    costs = [size + round(media_cost * n) for size, n in zip(sizes, numbers.tolist())]
    return [cost * (size > 0) for size, cost in zip(sizes, costs)]


def cut(
    exp: Experience,
    budget: int,
    world: int = 1,
    *,
    unit: int = 1,
    most: int = 0,
    media_cost: float = MEDIA_COST,
) -> list[list[list[int]]]:
    """The rows of each pack of each rank, as `shard` packs them.

    A function of numbers alone, the same on every rank: rows of media need not be held.
    """
    if most and most < unit:
        raise ValueError(f"most: expected >= unit = {unit} rows per pack, got {most}")
    if media_cost < 0:
        raise ValueError(f"media_cost: expected >= 0 tokens per number of media, got {media_cost}")
    sizes = _sizes(exp, unit)
    costs = _costs(exp, sizes, unit, media_cost)
    most //= unit  # from here on, of units
    budget = budget or sum(sizes)

    # a pack may have to borrow; only a unit that fills the budget alone leaves no room for that
    room = min(budget, max(budget - lending.reserve(exp, unit), *sizes, 0))

    # best fit tells how many packs are needed; equal packs run faster than a few full ones and a small one
    packs = plan.assign(sizes, room, most=most)
    each = max(math.ceil(len(packs) / world), 1)
    packs = plan.spread(sizes, costs, room, each * world, most) or packs
    packs = packs + [[] for _ in range(each * world - len(packs))]

    # a unit stays whole, and its rows in order
    def rows(units: list[int]) -> list[int]:
        return [i * unit + j for i in sorted(units) for j in range(unit)]

    return [[rows(p) for p in part] for part in plan.deal(costs, packs, world)]


def shard(
    exp: Experience,
    budget: int,
    world: int = 1,
    *,
    unit: int = 1,
    most: int = 0,
    media_cost: float = MEDIA_COST,
) -> list[list[Packed]]:
    """Cut a batch into equally many packs for each rank.

    Returns the packs of each of `world` ranks. Packs have at most `budget` tokens and `most` rows, where 0
    is no limit. Units without a token in mask have nothing to teach and are left out (`left_out` names
    them). `unit` consecutive rows stay together in one pack, in order: 2 for losses of pairs. There are as
    few packs as best fit needs, rounded up to a multiple of `world`; rows are spread over them evenly if
    the budget allows it. ValueError for a row (or unit) that is larger than the budget, a unit that does
    not divide the rows, or a `most` below it.

    With media, packs and ranks are balanced by tokens + media_cost * numbers of media. The default, 1e-4, is
    the work of an encoder of a tenth of the text model: Qwen2-VL's 0.675 B parameters beside 7.6 B make 0.09
    tokens of a patch of 1,176 numbers. The budget stays in tokens; it has room for a row that a pack without
    media borrows (see `pack`), except beside a row (or unit) that is nearly as large as the budget.
    """
    plans = cut(exp, budget, world, unit=unit, most=most, media_cost=media_cost)
    return [[pack(exp, rows, unit=unit) for rows in part] for part in plans]


def minibatches(exp: Experience, n: int, key: int, *, unit: int = 1) -> list[Experience]:
    """Cut a batch into n minibatches in random order.

    They are of nearly equal size, and `key` draws the order. Each is for one update; `unit` consecutive
    rows stay together, in order. `w` is cut with the rest, so on average it sums to 1/n of the batch's:
    recompute it with `weight.*` on each minibatch to give every update a mean over its tokens. One
    minibatch is `exp` itself. ValueError unless 1 <= n <= B / unit, or for a unit that does not divide the
    rows.
    """
    units = len(_learns(exp, unit))
    if not 1 <= n <= units:
        of = "rows"
        if unit > 1:
            of = f"units of {unit} rows"
        raise ValueError(f"n: expected between 1 and the number of {of} {units}, got {n}")
    if n == 1:
        return [exp]
    order = torch.randperm(units, generator=rng.generator(key)).to(exp.tokens.device)
    members = order[:, None] * unit + torch.arange(unit, device=order.device)
    return [take(exp, part.flatten()) for part in members.tensor_split(n)]
