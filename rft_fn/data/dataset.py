"""Data sets, and the items of a step as a pure function of the step.

There is no loader, no cursor and no state to lose: `draw(dataset, n, step, seed)` is the same on every rank
and in every resumed run.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rft_fn import rng
from rft_fn.data.mixture import Mixture

__all__ = ["Dataset", "Item", "ItemT", "draw", "first_row", "take"]


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
