"""Data sets, and the items of a step as a pure function of the step.

There is no loader, no cursor and no state to lose: `draw(dataset, n, step, seed)` is the same on every rank
and in every resumed run.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rft_fn import rng

__all__ = ["Dataset", "Item", "ItemT", "Mixture", "draw", "first_row", "take"]


# ---------- the order in which several sources are drawn from, by their shares


_LONGEST = 100_000  # places, at most, after which the order repeats


class Mixture:
    """The order of places of sources with these shares.

    Shares are relative: 7 and 3 are 0.7 and 0.3. ValueError for shares that are not above 0, and whose order
    would not repeat within 100,000 places.
    """

    def __init__(self, shares: Sequence[Fraction]):
        if any(share <= 0 for share in shares):
            raise ValueError(f"shares: expected each above 0, got {', '.join(map(str, shares))}")

        # the smallest whole numbers of the same proportions
        denominator = math.lcm(*(share.denominator for share in shares))
        whole = [int(share * denominator) for share in shares]
        self.weights = tuple(w // math.gcd(*whole) for w in whole)
        if sum(self.weights) > _LONGEST:
            raise ValueError(
                f"shares: expected the proportions of whole numbers that add up to at most {_LONGEST}, got "
                f"{':'.join(map(str, self.weights))}; round them"
            )

        self._period = sum(self.weights)
        self._order, self._before, self._places = _pattern(self.weights)

    def source(self, place: int) -> tuple[int, int]:
        """Return (k, j): a place holds row j drawn from source k, from 0."""
        turn, at = divmod(place, self._period)
        k = self._order[at]
        return k, turn * self.weights[k] + self._before[at]

    def place(self, k: int, j: int) -> int:
        """Return the place of row j drawn from source k: the inverse of `source`."""
        turn, at = divmod(j, self.weights[k])
        return turn * self._period + self._places[k][at]

    def counts(self, n: int) -> list[int]:
        """Return how many of the first n places each source has."""
        turns, rest = divmod(n, self._period)
        last = self._order[:rest]
        return [turns * w + last.count(k) for k, w in enumerate(self.weights)]

    def first(self, n: int, sizes: Sequence[int | None]) -> list[int]:
        """Return the first n places of rows that exist. Source k has sizes[k] rows; None is without end."""
        # no more places than there are rows in all
        count = n if None in sizes else min(n, sum(size or 0 for size in sizes))
        kept: list[int] = []
        place = 0
        while len(kept) < count:
            k, j = self.source(place)
            size = sizes[k]
            if size is None or j < size:
                kept.append(place)
            place += 1
        return kept


@cache
def _pattern(weights: tuple[int, ...]) -> tuple[array, array, tuple[array, ...]]:
    """Return (source of each place, its earlier places in the period, places of each source).

    Row j of a source with share w belongs into the places floor(j / w) to ceil((j + 1) / w) - 1. Of the rows
    whose first place has come, the one with the earliest last place is next: that meets every last place, so
    the count of any source in the first n places is between n w - 1 and n w + 1, both excluded (Baruah et
    al., Proportionate progress, 1996, with one resource).
    """
    period = sum(weights)
    drawn = [0] * len(weights)
    order = array("q")
    before = array("q")
    places = tuple(array("q") for _ in weights)
    for at in range(period):
        # the sources with a next row that may come here
        ready = [k for k, w in enumerate(weights) if drawn[k] < w and drawn[k] * period // w <= at]

        # of them the one with the earliest last place, rounded up
        k = min(ready, key=lambda k: -(-(drawn[k] + 1) * period // weights[k]))
        order.append(k)
        before.append(drawn[k])
        places[k].append(at)
        drawn[k] += 1
    return order, before, places


# ---------- data sets: items that a recipe makes of rows


class Item(Protocol):
    """An element of a data set: a frozen dataclass with these fields."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def columns(self) -> Mapping[str, Any]:
        """The row that it was made of."""
        ...

    @property
    def index(self) -> int:
        """Its index in the data set."""
        ...


ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True)
class Dataset(Generic[ItemT]):
    """Prompts, or pairs, by index. Without end where `size` is None."""

    name: str
    size: int | None
    prompt: Callable[[int], ItemT]
    """The item at an index in [0, size), or any >= 0 without a size: the same at every call.

    ValueError for a row without end that cannot be used.
    """
    digest: str = ""  # of all rows of a file, and of the items made of them
    parts: tuple["Dataset[ItemT]", ...] = ()  # the sources of a mixture
    mixture: Mixture | None = None  # which of the parts each place is drawn from
    seed: int = 0  # with which the rows of a generator are drawn from the first on
    note: str = ""  # which rows of its source these are, for the line that describes a run
    marks: bytes = field(default=b"", repr=False)  # of each item of a file 4 bytes of its row, 4 of all of it
    place: Callable[[int], str] | None = None  # where the row of an item is in its file


# ---------- the items of a step, as a pure function of the step


# The rows of a generator between one round of a step and the next, so that no row is drawn in two rounds.
_ROUND = 1 << 40
_STARTS = 1 << 39  # where the rows of a generator begin for one seed or another


def draw(
    dataset: Dataset[ItemT], n: int, step: int, seed: int, *, round: int = 0, start: int | None = None
) -> tuple[list[ItemT], list[int]]:
    """Return (n prompts, a key for each) of a step.

    It depends on nothing but the arguments. It draws the places `start` to `start + n` of an endless sequence
    of prompts: the rows of a generator in order, or the data set over and over, each pass in an order drawn
    from (seed, pass). The rows of a generator begin with its first for the seed that it was loaded with, and
    for any other seed at a row drawn from that, so that two seeds draw other rows. `start` is step * n unless
    it is given. So with the same n at every step each pass draws each row once, and a generator none twice. A
    caller that changes n from step to step keeps the number of prompts drawn before in its state, and gives
    that as `start`: otherwise rows repeat, and others are skipped.

    The key of a prompt is fold_in(seed, step, index): a prompt that comes again is sampled anew, in a later
    step or, where a pass ends within one, in the same. `round` > 0 gives more prompts for the same step, for
    dynamic sampling: places in a sequence of that round, with another order and other keys. Two rounds share
    no row of a generator. ValueError unless n >= 1 and step, round, start >= 0.
    """
    _check_count(n)
    for name, x in (("step", step), ("round", round), ("start", start or 0)):
        if x < 0:
            raise ValueError(f"{name}: expected >= 0, got {x}")

    # the rows at these places; a later round has another order
    if start is None:
        start = step * n
    order = rng.fold_in(seed, "round", round) if round else seed
    index = _rows_at(dataset, range(start, start + n), seed, order, round)
    prompts = [dataset.prompt(i) for i in index]

    # a row that comes twice in a step has another key the second time
    keys = []
    times = Counter()
    for i, p in zip(index, prompts):
        key = rng.fold_in(order, step, p.index)
        keys.append(rng.fold_in(key, "again", times[i]) if times[i] else key)
        times[i] += 1
    return prompts, keys


def take(dataset: Dataset[ItemT], n: int, seed: int) -> tuple[list[ItemT], list[int]]:
    """Return (the first n prompts in order, a key for each), for evaluation.

    All of a finite data set if it has fewer. Of a mixture the first of each part, by the shares until a part
    has no more. The first of a generator are those that `draw` begins with for that seed: other rows for
    another seed than the one that it was loaded with. ValueError unless n >= 1.
    """
    _check_count(n)
    if dataset.mixture is not None:
        places = dataset.mixture.first(n, [part.size for part in dataset.parts])
        index = []
        for k, j in map(dataset.mixture.source, places):
            index.append(dataset.mixture.place(k, j + first_row(dataset.parts[k], seed)))
    elif dataset.size is None:
        begin = first_row(dataset, seed)
        index = range(begin, begin + n)
    else:
        index = range(min(n, dataset.size))
    keys = [rng.fold_in(seed, "take", i) for i in range(len(index))]
    return [dataset.prompt(i) for i in index], keys


def first_row(dataset: Dataset, seed: int) -> int:
    """Return the row that a generator begins with for a seed; 0 of other data sets."""
    if dataset.size is not None or dataset.mixture is not None or seed == dataset.seed:
        return 0
    return rng.fold_in(seed, "rows") % _STARTS


def _check_count(n: int) -> None:
    if n < 1:
        raise ValueError(f"prompts: expected to take at least 1, got {n}")


def _rows_at(dataset: Dataset, places: Sequence[int], seed: int, order: int, round: int) -> list[int]:
    """Return the row at each place. `seed` chooses the rows of a generator, `order` those of others."""
    if dataset.mixture is not None:
        return _mixed_rows(dataset, dataset.mixture, places, seed, order, round)
    if dataset.size is None:
        begin = first_row(dataset, seed) + round * _ROUND
        return [begin + place for place in places]

    # each pass over the rows has its own order
    orders: dict[int, Tensor] = {}
    rows = []
    for place in places:
        epoch, at = divmod(place, dataset.size)
        if epoch not in orders:
            shuffle = rng.generator(rng.fold_in(order, "order", epoch))
            orders[epoch] = torch.randperm(dataset.size, generator=shuffle)
        rows.append(int(orders[epoch][at]))
    return rows


def _mixed_rows(
    dataset: Dataset, mixture: Mixture, places: Sequence[int], seed: int, order: int, round: int
) -> list[int]:
    """Return the rows at these places of a mixture, each part in its own order."""
    drawn = [mixture.source(place) for place in places]
    rows = []
    for k, part in enumerate(dataset.parts):
        mine = [j for source, j in drawn if source == k]
        rows.append(iter(_rows_at(part, mine, seed, rng.fold_in(order, "source", k), round)))
    return [mixture.place(k, next(rows[k])) for k, _ in drawn]
