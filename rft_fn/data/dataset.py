"""Data sets: items that a recipe makes of rows.

An item is a `Prompt` or a `Pair`, made when it is asked for. A recipe refuses rows that cannot be used.
"""

import hashlib
import math
import warnings
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rft_fn.data.chat import Chat
from rft_fn.data.making import Seen, made_of, outcomes
from rft_fn.data.masks import FirstFew, TooLong, Unfit, unfit_line
from rft_fn.data.rows import Endless, Row, Table, place_of, row_at

__all__ = ["Dataset", "Item", "ItemT", "Make", "Mixture", "Recipe", "make_dataset"]


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
        """(k, j): a place holds row j drawn from source k, from 0."""
        turn, at = divmod(place, self._period)
        k = self._order[at]
        return k, turn * self.weights[k] + self._before[at]

    def place(self, k: int, j: int) -> int:
        """The place of row j drawn from source k: the inverse of `source`."""
        turn, at = divmod(j, self.weights[k])
        return turn * self._period + self._places[k][at]

    def counts(self, n: int) -> list[int]:
        """How many of the first n places each source has."""
        turns, rest = divmod(n, self._period)
        last = self._order[:rest]
        return [turns * w + last.count(k) for k, w in enumerate(self.weights)]

    def first(self, n: int, sizes: Sequence[int | None]) -> list[int]:
        """The first n places of rows that exist.

        Source k has sizes[k] rows; None is without end.
        """
        # no more places than there are rows in all
        count = n
        if None not in sizes:
            count = min(n, sum(size or 0 for size in sizes))

        found: list[int] = []
        place = 0
        while len(found) < count:
            k, j = self.source(place)
            size = sizes[k]
            if size is None or j < size:
                found.append(place)
            place += 1
        return found


@cache
def _pattern(weights: tuple[int, ...]) -> tuple[array, array, tuple[array, ...]]:
    """(source of each place, its earlier places in the period, places of each source).

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
        # the sources whose next row may stand here
        ready = []
        for k, w in enumerate(weights):
            if drawn[k] < w and drawn[k] * period // w <= at:
                ready.append(k)

        # of them the one whose row has to stand here soonest: its last place, rounded up
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
ItemT_co = TypeVar("ItemT_co", bound=Item, covariant=True)


class Make(Protocol[ItemT_co]):
    """Makes one item of a data set."""

    def __call__(self, index: int, /) -> ItemT_co:
        """The item at an index, the same at every call.

        The index is in [0, size), or any >= 0 where the size is None. ValueError for a row without end that
        cannot be used.
        """
        ...


@dataclass(frozen=True)
class Dataset(Generic[ItemT]):
    """Prompts, or pairs, by index. Without end where `size` is None."""

    name: str
    size: int | None
    prompt: Make[ItemT]
    digest: str = ""  # of all rows of a file, and of the items made of them
    parts: tuple["Dataset[ItemT]", ...] = ()  # the sources of a mixture
    mixture: Mixture | None = None  # which of the parts each place is drawn from
    seed: int = 0  # with which the rows of a generator are drawn from the first on
    note: str = ""  # which rows of its source these are, for the line that describes a run
    marks: bytes = field(default=b"", repr=False)  # of each item of a file 4 bytes of its row, 4 of all of it
    place: Callable[[int], str] | None = None  # where the row of an item of a file stands


class Recipe(Protocol[ItemT_co]):
    """Makes items of rows, up to a length."""

    what: ClassVar[str]  # a name for an item in errors: "prompt", "pair"
    limit: ClassVar[str]  # the option that bounds its length

    @property
    def most(self) -> int:
        """The value of that option [tokens]."""
        ...

    @property
    def chat(self) -> Chat:
        """The tokenizer and what is beside it."""
        ...

    @property
    def reads(self) -> Collection[str]:
        """The columns that items are made of."""
        ...

    def check(self) -> None:
        """ValueError for options that no row could be used with.

        Called before any row is read.
        """
        ...

    def make(self, row: Row, place: str, index: int) -> ItemT_co:
        """The item of a row.

        Unfit, with the place, for an unusable row; TooLong above the limit.
        """
        ...


def make_dataset(
    rows: Table | Endless, recipe: Recipe[ItemT], name: str, *, workers: int = 0
) -> Dataset[ItemT]:
    """The data set of the items that a recipe makes of rows.

    Every row is made once now, the first one of endless rows; by `workers` processes, if there are any. Items
    above the recipe's limit are left out, with one warning; another one names the first media that were
    shrunk or resampled.

    ValueError for options that the recipe refuses, for no rows, for rows that cannot be used (with their
    count and the places of the first), and when all are too long. Endless rows raise it when they are drawn,
    also for an item above the limit.
    """
    recipe.check()
    if isinstance(rows, Endless):
        return _endless(rows, recipe, name)

    def make(i: int) -> ItemT:
        return recipe.make(*row_at(rows, i, name), i)

    if not len(rows):
        raise ValueError(f"data: expected at least one row, got none in {name!r}")
    kept = array("q")
    long = FirstFew()
    unfit = FirstFew()
    changed = FirstFew()
    content = hashlib.blake2b(digest_size=16)
    seen = Seen(recipe.chat.tokenizer)
    marks = bytearray()
    for i, found in enumerate(outcomes(rows, recipe, name, workers=workers)):
        if isinstance(found, Unfit):
            unfit.add((found.place, found.reason))
        elif isinstance(found, TooLong):
            long.add(f"{place_of(rows, i, name)} with {found}")
        else:
            content.update(f"{i} {found.text}".encode())
            for text in (found.row, found.text):
                marks += hashlib.blake2b(text.encode(), digest_size=4).digest()
            kept.append(i)
            seen.add(found, place_of(rows, i, name))
            for note in found.notes:
                changed.add(f"{place_of(rows, i, name)}: {note}")

    # unfit rows are an error of the data or of the options; long ones are expected
    if unfit.count:
        raise ValueError(unfit_line(unfit, len(rows)))
    if not kept:
        raise ValueError(
            f"{recipe.limit}: every {recipe.what} of {name!r} is longer than {recipe.most} tokens; raise it"
        )
    if long.count:
        warnings.warn(
            f"data: {long.count} of {len(rows)} {recipe.what}s are longer than {recipe.limit}, {recipe.most} "
            f"tokens, and are left out: {'; '.join(long.shown)}{long.more()}",
            stacklevel=3,
        )
    if changed.count:
        warnings.warn(f"data: {'; '.join(changed.shown)}{changed.more()}", stacklevel=3)
    seen.warn()
    return Dataset(
        name=name,
        size=len(kept),
        prompt=lambda i: make(kept[i]),
        digest=content.hexdigest(),
        marks=bytes(marks),
        place=lambda i: place_of(rows, kept[i], name),
    )


def _endless(rows: Endless, recipe: Recipe[ItemT], name: str) -> Dataset[ItemT]:
    """The data set of rows without end.

    Nothing can be left out, so a long item is an error.
    """

    def make(index: int) -> ItemT:
        place = f"{rows.name}, {recipe.what} {index}"
        try:
            return recipe.make(rows.row(index), place, index)
        except TooLong as long:
            raise ValueError(
                f"{recipe.limit}: {place} has {long}, above {recipe.most} tokens; raise it"
            ) from None

    # wrong options are an error now, not when the first item is drawn
    seen = Seen(recipe.chat.tokenizer)
    seen.add(made_of(make(0), recipe), f"{rows.name}, {recipe.what} 0")
    seen.warn()
    return Dataset(name, None, make, seed=rows.seed)
