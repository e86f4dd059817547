"""Make data sets of rows by a recipe, in worker processes if asked for, and refuse unusable rows."""

import hashlib
import multiprocessing
import warnings
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from datetime import date
from typing import Any, Generic, NamedTuple

import torch

from rft_fn.data.chat import Chat
from rft_fn.data.dataset import Dataset, ItemT
from rft_fn.data.invalid_rows import FirstFew, TooLong, invalid_line
from rft_fn.data.lesson import Lesson
from rft_fn.data.medium import digest
from rft_fn.data.messages import unread
from rft_fn.data.rendering import TooSlow
from rft_fn.data.table import Endless, InvalidRow, Place, Row, Table, place_of, row_at
from rft_fn.data.template_variables import fix_day, fixed_day

__all__ = ["Recipe", "make_dataset"]

_CHUNK = 8  # rows that a worker takes at a time


@dataclass(frozen=True)
class Recipe(Generic[ItemT]):
    """How items are made of rows, up to a length."""

    what: str  # a name for an item in errors: "prompt", "pair"
    limit: str  # the option that bounds its length
    most: int  # the value of that option [tokens]
    chat: Chat
    reads: Collection[str]  # the columns that items are made of
    make: Callable[[Row, str, int], ItemT]
    """(row, its place, index) -> the item; ValueError for an unusable row, TooLong above the limit."""

    def item(self, row: Row, place: str, index: int) -> ItemT:
        """Return the item of a row. InvalidRow, with the place, for an unusable one; TooLong."""
        try:
            return self.make(row, place, index)
        except InvalidRow as error:
            raise InvalidRow(error.place, f"{error.reason}{_remedy(row, self.what)}") from None
        except ValueError as error:
            raise InvalidRow(place, f"{error}{_remedy(row, self.what)}") from None
        except TooSlow as error:
            raise TooSlow(f"{place}: {error}") from None


_HEADS = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


def _remedy(row: Row, what: str) -> str:
    """Return the options that read a row of a known data set, by its columns; "" for another row."""
    names = set(row)
    if {"response", "helpfulness", "correctness"} <= names:
        heads = " ".join(name for name in _HEADS if name in names)
        return (
            "; HelpSteer's rows are points: train_rm.py --kind points --completion '{response}' "
            f"--heads {heads} --loss mse; sft.py --template '{{prompt}}' --response '{{response}}' learns it"
        )
    if {"context", "response1", "response2", "overall_preference"} <= names:
        return (
            "; HelpSteer3's rows have a signed preference: write columns of messages chosen and rejected, "
            "which are response2 and response1 where it is above 0, and --messages context chosen rejected"
        )
    if {"instruction", "completions", "models"} <= names and what != "list":
        return (
            "; UltraFeedback's rows are lists: train_rm.py --kind lists --template '{instruction}'; "
            "pairs are --data HuggingFaceH4/ultrafeedback_binarized@train_prefs --messages chosen rejected"
        )
    if {"problem", "solution", "messages"} <= names and what == "prompt":
        return "; the messages end with the answer: --template '{problem}' --reward math:solution"
    truth = row.get("reward_model")
    if "prompt" in names and isinstance(truth, Mapping) and "ground_truth" in truth and what == "prompt":
        return "; the rows are verl's: --messages prompt --reward math:reward_model.ground_truth"
    return ""


def make_dataset(
    rows: Table | Endless,
    recipe: Recipe[ItemT],
    name: str,
    *,
    workers: int = 0,
    survey: Callable[[Row, str], None] | None = None,
) -> Dataset[ItemT]:
    """Make the data set of the items that a recipe makes of rows.

    Every row is made once now, the first one of endless rows; by `workers` processes, if there are any. Each
    row that is read goes to `survey` too, in this process, with its place; of endless ones none does. Items
    above the recipe's limit are left out, with one warning; another one names the first media that were
    shrunk or resampled.

    ValueError for no rows, for rows that cannot be used (with their count and the places of the first), and
    when all are too long. Endless rows raise it when they are drawn, also for an item above the limit.
    """
    if isinstance(rows, Endless):
        return _endless(rows, recipe, name)
    if not len(rows):
        raise ValueError(f"data: expected at least one row, got none in {name!r}")
    kept = array("q")
    long = FirstFew()
    invalid = FirstFew()
    changed = FirstFew()
    content = hashlib.blake2b(digest_size=16)
    seen = _Seen(recipe.chat.tokenizer)
    marks = bytearray()
    for i, built in enumerate(_built_rows(rows, recipe, name, workers, survey)):
        if isinstance(built, InvalidRow):
            invalid.add((built.place, built.reason))
        elif isinstance(built, TooLong):
            long.add(f"{place_of(rows, i, name)} with {built}")
        else:
            content.update(f"{i} {built.text}".encode())
            for text in (built.row, built.text):
                marks += hashlib.blake2b(text.encode(), digest_size=4).digest()
            kept.append(i)
            seen.add(built, place_of(rows, i, name))
            for note in built.notes:
                changed.add(f"{place_of(rows, i, name)}: {note}")

    # invalid rows are an error of the data or of the options; long ones are expected
    if invalid.count:
        raise ValueError(invalid_line(invalid, rows))
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
        prompt=lambda i: recipe.item(*row_at(rows, kept[i], name), kept[i]),
        digest=content.hexdigest(),
        marks=bytes(marks),
        place=lambda i: place_of(rows, kept[i], name),
    )


def _endless(rows: Endless, recipe: Recipe[ItemT], name: str) -> Dataset[ItemT]:
    """Make the data set of rows without end: nothing can be left out, so a long item is an error."""

    def item(index: int) -> ItemT:
        place = f"{rows.name}, {recipe.what} {index}"
        try:
            return recipe.item(rows.row(index), place, index)
        except TooLong as long:
            raise ValueError(
                f"{recipe.limit}: {place} has {long}, above {recipe.most} tokens; raise it"
            ) from None

    # wrong options are an error now, not when the first item is drawn
    seen = _Seen(recipe.chat.tokenizer)
    seen.add(_built(item(0), recipe), f"{rows.name}, {recipe.what} 0")
    seen.warn()
    return Dataset(name, None, item, seed=rows.seed)


# ---------- what a data set keeps of its items


class _Built(NamedTuple):
    """What is kept of an item that was made."""

    text: str  # that has all of its content, for a digest
    row: str  # that has the content of its row
    notes: tuple[str, ...]  # how its media were changed
    unread: Sequence[str]  # columns of a known schema that are not read
    unread_keys: Sequence[str]  # of messages
    tokens: int
    unknown: int  # of them, those for text that the tokenizer does not know


def _built(item: Any, recipe: Recipe) -> _Built:
    """Return what is kept of an item."""
    values = tuple(getattr(item, field.name) for field in fields(item))
    row: Any = item.columns
    lessons = [x for x in values if isinstance(x, Lesson)]
    for x in values:
        if isinstance(x, tuple) and not isinstance(x, Lesson):
            lessons += [y for y in x if isinstance(y, Lesson)]
    ids = [token for lesson in lessons for token in lesson.ids] if lessons else item.ids

    # a token for unknown text counts as one unless it has another meaning too
    tokenizer = recipe.chat.tokenizer
    unknown = tokenizer.unk_token_id
    if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        unknown = None
    if getattr(item, "media", None) is not None or any(lesson.media is not None for lesson in lessons):
        values = _plain(values)
        row = _plain(row)
    return _Built(
        text=repr(values),
        row=repr(row),
        notes=getattr(item, "media_notes", ()),
        unread=unread(item.columns, recipe.reads),
        unread_keys=recipe.chat.unread_keys(item.columns, recipe.reads),
        tokens=len(ids),
        unknown=sum(token == unknown for token in ids),
    )


def _plain(x: Any) -> Any:
    """Put digests in place of tensors and images, as their texts do not show their content."""
    if isinstance(x, torch.Tensor):
        return digest(x.numpy())
    if hasattr(x, "convert") or isinstance(x, bytes):
        return digest(x)
    if isinstance(x, Mapping):
        return {name: _plain(y) for name, y in sorted(x.items())}  # a cache has its own order
    if isinstance(x, (list, tuple)) and not isinstance(next(iter(x), None), (int, bool)):
        return [_plain(y) for y in x]
    return x


class _Seen:
    """What is said once of all rows: columns and keys that are not read, and the share of unknown text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._unread: dict[str, FirstFew] = {}
        self._keys: dict[str, FirstFew] = {}
        self._tokens = 0
        self._unknown = 0
        self._first = ""

    def add(self, built: _Built, place: str) -> None:
        for name in built.unread:
            self._unread.setdefault(name, FirstFew()).add(place)
        for key in built.unread_keys:
            self._keys.setdefault(key, FirstFew()).add(place)
        if built.unknown and not self._unknown:
            self._first = place
        self._tokens += built.tokens
        self._unknown += built.unknown

    def warn(self) -> None:
        """Warn of columns and keys that are not read, and of unknown text."""
        for name, rows in self._unread.items():
            warnings.warn(
                f"data: column {name!r} of {rows.count} rows is not read, the first is {rows.shown[0]}; a "
                "template may name it",
                stacklevel=4,
            )
        for key, rows in self._keys.items():
            name, _, role = key.partition(" of ")
            warnings.warn(
                f"data: {name!r} in messages of {role} is not read, in {rows.count} rows; the first is "
                f"{rows.shown[0]}",
                stacklevel=4,
            )
        if self._unknown:
            warnings.warn(
                f"data: {self._unknown / self._tokens:.2g} of the tokens ({self._unknown} of {self._tokens}) "
                f"are {self._tokenizer.unk_token}, for text that the tokenizer does not know; the first row "
                f"is {self._first}",
                stacklevel=4,
            )


# ---------- the rows of a file, in this process or in workers


_recipe: Any = None  # of a worker


def _built_rows(
    rows: Table, recipe: Recipe, name: str, workers: int, survey: Callable[[Row, str], None] | None
) -> Iterator[_Built | InvalidRow | TooLong]:
    """Build each row, in order. Workers are started anew, and get the recipe once."""
    read = _read(rows, name, survey)
    if not workers:
        for given in read:
            yield _outcome(recipe, given)
        return
    with ProcessPoolExecutor(
        min(workers, -(-len(rows) // _CHUNK)),  # more would have nothing to do
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(recipe, fixed_day()),
    ) as pool:
        yield from pool.map(_in_worker, read, chunksize=_CHUNK)


def _read(
    rows: Table, name: str, survey: Callable[[Row, str], None] | None
) -> Iterator[tuple[int, Row | InvalidRow, Place]]:
    """Yield (index, row, place) of each row, with the error of one that cannot be read in its place."""
    for i in range(len(rows)):
        try:
            row, place = row_at(rows, i, name)
            if survey is not None:
                survey(row, place)
            yield i, row, place
        except InvalidRow as error:
            yield i, error, place_of(rows, i, name)


def _outcome(recipe: Recipe, given: tuple[int, Row | InvalidRow, Place]) -> _Built | InvalidRow | TooLong:
    i, row, place = given
    if isinstance(row, InvalidRow):
        return row
    try:
        return _built(recipe.item(row, place, i), recipe)
    except (InvalidRow, TooLong) as error:
        return error


def _start(recipe: Recipe, day: date | None) -> None:
    """Keep the recipe and the day of the run in a worker, which computes on one thread."""
    global _recipe
    _recipe = recipe
    fix_day(day)
    torch.set_num_threads(1)


def _in_worker(given: tuple[int, Row | InvalidRow, Place]) -> _Built | InvalidRow | TooLong:
    return _outcome(_recipe, given)
