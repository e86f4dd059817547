"""Data sets: items that a recipe makes of rows.

An item is a `Prompt` or a `Pair`, made when it is asked for. A recipe refuses rows that cannot be used.
"""

import hashlib
import warnings
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rft_fn.data.chat import Chat
from rft_fn.data.making import Seen, made_of, outcomes
from rft_fn.data.mixture import Mixture
from rft_fn.data.rows import Endless, Row, Table, place_of, row_at
from rft_fn.data.unfit import FirstFew, TooLong, Unfit, unfit_line

__all__ = ["Dataset", "Item", "ItemT", "Make", "Recipe", "make_dataset"]


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
