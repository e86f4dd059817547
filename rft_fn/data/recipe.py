"""Make data sets of rows by a recipe, in worker processes if asked for, and refuse unusable rows."""

import hashlib
import os
import pickle
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from rft_fn import cores
from rft_fn.data import row_cache
from rft_fn.data.chat import Chat
from rft_fn.data.dataset import Dataset, ItemT
from rft_fn.data.invalid_rows import FirstFew, TooLong, invalid_line
from rft_fn.data.lesson import Lesson
from rft_fn.data.medium import digest
from rft_fn.data.messages import unread
from rft_fn.data.rendering import TooSlow
from rft_fn.data.row_cache import Looked
from rft_fn.data.row_workers import map_rows
from rft_fn.data.table import Endless, InvalidRow, Place, Row, Table, place_of, row_at
from rft_fn.data.template_variables import fix_day, fixed_day
from rft_fn.text import printable

__all__ = ["Recipe", "Survey", "make_dataset"]

T = TypeVar("T")

_CHUNK = 8  # rows that a worker takes at a time
_CHUNK_OF_TEXT = 256
_MANY = 20_000  # rows of text that are worth the seconds in which workers start
_MOST = 12  # workers: this process reads the rows for them, and takes a tenth of their time for it


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


@runtime_checkable
class Survey(Protocol):
    """What is asked of each row of a file, so that it can be kept for the next start."""

    def __call__(self, row: Row, place: str) -> None:
        """See a row."""
        ...

    def key(self) -> str | None:
        """Return a text that differs for other questions; None where that is not known."""
        ...

    def fresh(self) -> "Survey":
        """Return one with the same questions that has seen nothing."""
        ...

    def state(self) -> Any:
        """Return what it has seen, as JSON."""
        ...

    def add(self, state: Any) -> None:
        """Add what another one has seen."""
        ...


def make_dataset(
    rows: Table | Endless,
    recipe: Recipe[ItemT],
    name: str,
    *,
    workers: int = 0,
    survey: Callable[[Row, str], None] | None = None,
) -> Dataset[ItemT]:
    """Make the data set of the items that a recipe makes of rows.

    Every row is made once, the first one of endless rows; by `workers` processes, if there are any, and many
    rows of text by the cores there are. Each row that is read goes to `survey` too, in this process, with its
    place; of endless ones none does. What was found is kept for the next start, and for the other processes
    of a node, which wait for it (`row_cache`): none of this is done again then, and a `Survey` is given what
    it saw. Items above the recipe's limit are left out, with one warning; another one names the first media
    that were shrunk or resampled.

    ValueError for no rows, for rows that cannot be used (with their count and the places of the first), and
    when all are too long. Endless rows raise it when they are drawn, also for an item above the limit.
    """
    if isinstance(rows, Endless):
        return _endless(rows, recipe, name)
    if not len(rows):
        raise ValueError(f"data: expected at least one row, got none in {name!r}")
    known = survey if isinstance(survey, Survey) else None
    key = None
    if known is not None or survey is None:
        key = row_cache.key_of(rows, name, recipe, known)
    if key is None:
        looked = _looked(rows, recipe, name, workers or _worth(rows, recipe, alone=False), survey)
    else:
        with row_cache.locked(key) as alone:
            looked = row_cache.read(key, len(rows))
            if looked is None:
                seen = None if known is None else known.fresh()
                looked = _looked(rows, recipe, name, workers or _worth(rows, recipe, alone=alone), seen)
                looked = looked._replace(survey=None if seen is None else seen.state())
                row_cache.write(key, looked)
        if known is not None:
            known.add(looked.survey)
    for line in looked.warnings:
        warnings.warn(line, stacklevel=3)
    index = looked.kept
    return Dataset(
        name=name,
        size=len(index),
        prompt=lambda i: recipe.item(*row_at(rows, int(index[i]), name), int(index[i])),
        digest=looked.digest,
        marks=looked.marks,
        place=lambda i: place_of(rows, int(index[i]), name),
    )


def _looked(
    rows: Table, recipe: Recipe, name: str, workers: int, survey: Callable[[Row, str], None] | None
) -> Looked:
    """Return what is found by making the item of each row once. ValueError as `make_dataset`."""
    kept = array("q")
    long = FirstFew()
    invalid = FirstFew()
    changed = FirstFew()
    content = hashlib.blake2b(digest_size=16)
    seen = _Seen(recipe.chat.tokenizer)
    marks = bytearray()
    built_rows = _built_rows(rows, recipe, name, workers, survey)
    for i, built in enumerate(_tracked(built_rows, len(rows), name)):
        if isinstance(built, InvalidRow):
            invalid.add((built.place, built.reason))
        elif isinstance(built, TooLong):
            long.add(f"{place_of(rows, i, name)} with {built}")
        else:
            content.update(f"{i} {built.text}".encode())
            marks += built.mark
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
    lines = []
    if long.count:
        lines.append(
            f"data: {long.count} of {len(rows)} {recipe.what}s are longer than {recipe.limit}, {recipe.most} "
            f"tokens, and are left out: {'; '.join(long.shown)}{long.more()}"
        )
    if changed.count:
        lines.append(f"data: {'; '.join(changed.shown)}{changed.more()}")
    lines += seen.lines()
    return Looked(kept, bytes(marks), content.hexdigest(), tuple(lines))


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
    for line in seen.lines():
        warnings.warn(line, stacklevel=4)
    return Dataset(name, None, item, seed=rows.seed)


# ---------- what a data set keeps of its items


class _Built(NamedTuple):
    """What is kept of an item that was made."""

    text: str  # that has all of its content, for a digest
    mark: bytes  # 4 bytes of the content of its row, 4 of all of it
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
    text = repr(values)
    return _Built(
        text=text,
        mark=b"".join(hashlib.blake2b(x.encode(), digest_size=4).digest() for x in (repr(row), text)),
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

    def lines(self) -> list[str]:
        """Return the warnings of columns and keys that are not read, and of unknown text."""
        lines = [
            f"data: column {name!r} of {rows.count} rows is not read, the first is {rows.shown[0]}; a "
            "template may name it"
            for name, rows in self._unread.items()
        ]
        for key, rows in self._keys.items():
            name, _, role = key.partition(" of ")
            lines.append(
                f"data: {name!r} in messages of {role} is not read, in {rows.count} rows; the first is "
                f"{rows.shown[0]}"
            )
        if self._unknown:
            lines.append(
                f"data: {self._unknown / self._tokens:.2g} of the tokens ({self._unknown} of {self._tokens}) "
                f"are {self._tokenizer.unk_token}, for text that the tokenizer does not know; the first row "
                f"is {self._first}"
            )
        return lines


# ---------- the rows of a file, in this process or in workers


def _built_rows(
    rows: Table, recipe: Recipe, name: str, workers: int, survey: Callable[[Row, str], None] | None
) -> Iterator[_Built | InvalidRow | TooLong]:
    """Build each row, in order, by `workers` processes; by those that rows of text are worth without any."""
    read = _read(rows, name, survey)
    workers = min(workers, -(-len(rows) // _CHUNK))  # more would have nothing to do
    if not workers:
        return (_outcome(recipe, given) for given in read)
    chunk = _CHUNK if recipe.chat.processing is not None else _CHUNK_OF_TEXT
    return map_rows(
        partial(_outcome, recipe), read, workers=workers, chunk=chunk, begin=partial(fix_day, fixed_day())
    )


def _worth(rows: Table, recipe: Recipe, *, alone: bool) -> int:
    """Return the processes that rows of text are worth, of the cores there are.

    Unless it is `alone` while other ranks of its node wait, this process has its share of them.
    """
    if len(rows) < _MANY or recipe.chat.processing is not None:
        return 0
    ranks = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    try:
        pickle.dumps(recipe)
    except Exception:  # how a stranger's tokenizer is pickled is its own code
        return 0
    workers = min(cores.usable() // ranks, _MOST)
    return workers if workers > 1 else 0


_QUIET = 3.0  # s before the first line
_BETWEEN = (0.5, 15.0)  # s between two lines, on a terminal and elsewhere


def _tracked(done: Iterable[T], total: int, name: str) -> Iterator[T]:
    """Yield what is done, and say on standard error how many rows that are, and how long the others take."""
    on_terminal = sys.stderr.isatty()
    mine = os.environ.get("LOCAL_RANK", "0") == "0"
    first = told = shown = 0.0
    for count, x in enumerate(done):
        yield x
        now = time.monotonic()
        if not count:  # workers have started
            first, told = now, now + _QUIET
        elif mine and now >= told:
            left = (now - first) / count * (total - count - 1)
            line = printable(f"data: {count + 1:,} of {total:,} rows of {name}, {left:.0f} s left")
            _say(f"\r{line}\x1b[K" if on_terminal else f"{line}\n")
            told, shown = now + _BETWEEN[not on_terminal], now
    if shown and on_terminal:
        _say("\r\x1b[K")


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


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
