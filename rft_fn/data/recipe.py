"""Make data sets of rows by a recipe, in worker processes if asked for; refuse rows that cannot be used."""

import hashlib
import multiprocessing
import warnings
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from datetime import date
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from rft_fn.data.chat import Chat
from rft_fn.data.chat_template import fix_day, fixed_day
from rft_fn.data.dataset import Dataset, ItemT, ItemT_co
from rft_fn.data.masks import FirstFew, Lesson, TooLong, Unfit, unfit_line
from rft_fn.data.medium import digest
from rft_fn.data.messages import unread
from rft_fn.data.rows import Endless, Place, Row, Table, place_of, row_at

__all__ = ["Recipe", "make_dataset"]


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


# ---------- the outcome of each row


_CHUNK = 8  # rows that a worker takes at a time


class Made(NamedTuple):
    """An item that was made."""

    text: str  # that has all of its content, for a digest
    row: str  # that has the content of its row
    notes: tuple[str, ...]  # how its media were changed
    unread: Sequence[str] = ()  # columns of a known schema that are not read
    tokens: int = 0
    unknown: int = 0  # of them, those that stand for text that the tokenizer does not know


Outcome = Made | Unfit | TooLong


def outcomes(rows: Table, recipe: Any, name: str, *, workers: int = 0) -> Iterator[Outcome]:
    """What becomes of each row, in order.

    `workers` processes make the items, if there are any. They are started anew and get the recipe once.
    """
    if not workers:
        for i in range(len(rows)):
            yield _tried(recipe, rows, i, name)
        return
    how = {"initializer": _start, "initargs": (recipe, fixed_day())}
    how["mp_context"] = multiprocessing.get_context("spawn")
    workers = min(workers, -(-len(rows) // _CHUNK))  # more would have nothing to do
    with ProcessPoolExecutor(workers, **how) as pool:
        yield from pool.map(_in_worker, _read(rows, name), chunksize=_CHUNK)


def _tried(recipe: Any, rows: Table, i: int, name: str) -> Outcome:
    try:
        return made_of(recipe.make(*row_at(rows, i, name), i), recipe)
    except (Unfit, TooLong) as error:
        return error


def made_of(item: Any, recipe: Any) -> Made:
    """Return what is kept of an item: its content for a digest, and what is said of it."""
    unknown = _unknown_token(recipe.chat.tokenizer)
    ids = list(_ids(item))
    return _made(item)._replace(
        unread=unread(item.columns, recipe.reads),
        tokens=len(ids),
        unknown=sum(token == unknown for token in ids),
    )


def _unknown_token(tokenizer: Any) -> int | None:
    """Return the token for unknown text; None without one, and where it has another meaning too."""
    token = tokenizer.unk_token_id
    if token in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return None
    return token


def _ids(item: Any) -> Iterator[int]:
    """The tokens of an item: those of its sequences to learn, of a prompt without any its own."""
    values = [getattr(item, field.name) for field in fields(item)]
    found = [x for x in values if isinstance(x, Lesson)]
    for x in values:
        if isinstance(x, tuple) and not isinstance(x, Lesson):
            found += [y for y in x if isinstance(y, Lesson)]
    for lesson in found:
        yield from lesson.ids
    if not found:
        yield from item.ids


class Seen:
    """What is said once of all rows: columns that are not read, and the share of unknown text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._unread: dict[str, FirstFew] = {}
        self._tokens = 0
        self._unknown = 0
        self._first = ""

    def add(self, made: Made, place: str) -> None:
        for name in made.unread:
            self._unread.setdefault(name, FirstFew()).add(place)
        if made.unknown and not self._unknown:
            self._first = place
        self._tokens += made.tokens
        self._unknown += made.unknown

    def warn(self) -> None:
        """Warn of columns that are not read, and of unknown text."""
        for name, rows in self._unread.items():
            warnings.warn(
                f"data: column {name!r} of {rows.count} rows is not read, the first is {rows.shown[0]}; a "
                "template may name it",
                stacklevel=4,
            )
        if self._unknown:
            warnings.warn(
                f"data: {self._unknown / self._tokens:.2g} of the tokens ({self._unknown} of {self._tokens}) "
                f"are {self._tokenizer.unk_token}, for text that the tokenizer does not know; the first row "
                f"is {self._first}",
                stacklevel=4,
            )


def _made(item: Any) -> Made:
    values = tuple(getattr(item, field.name) for field in fields(item))
    row: Any = item.columns
    if getattr(item, "media", None) is not None or _have_media(values):
        values = _plain(values)
        row = _plain(row)
    return Made(repr(values), repr(row), getattr(item, "media_notes", ()))


def _have_media(values: tuple[Any, ...]) -> bool:
    """Whether one of the sequences among these values has tensors of media."""
    for x in values:
        if isinstance(x, Lesson) and x.media is not None:
            return True
        if isinstance(x, tuple) and not isinstance(x, Lesson) and _have_media(x):
            return True
    return False


def _plain(x: Any) -> Any:
    """x with digests in place of tensors and images, whose texts are not their content."""
    if isinstance(x, torch.Tensor):
        return digest(x.numpy())
    if hasattr(x, "convert") or isinstance(x, bytes):
        return digest(x)
    if isinstance(x, Mapping):
        return {name: _plain(y) for name, y in sorted(x.items())}  # a cache has its own order
    if isinstance(x, (list, tuple)) and not isinstance(next(iter(x), None), (int, bool)):
        return [_plain(y) for y in x]
    return x


# ------------------------------------------------------------------------------------------------- processes

_recipe: Any = None  # of a worker


def _start(recipe: Any, day: date | None) -> None:
    """Keep the recipe and the day of the run in a worker, which computes on one thread."""
    global _recipe
    _recipe = recipe
    fix_day(day)
    torch.set_num_threads(1)


def _read(rows: Table, name: str) -> Iterator[tuple[int, Row | Unfit, Place]]:
    """(index, row, place) of each row; the error of one that cannot be read."""
    for i in range(len(rows)):
        try:
            yield i, *row_at(rows, i, name)
        except Unfit as error:
            yield i, error, place_of(rows, i, name)


def _in_worker(given: tuple[int, Row | Unfit, Place]) -> Outcome:
    i, row, place = given
    if isinstance(row, Unfit):
        return row
    try:
        return made_of(_recipe.make(row, place, i), _recipe)
    except (Unfit, TooLong) as error:
        return error
