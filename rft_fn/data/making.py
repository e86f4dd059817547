"""Makes the items of rows, in worker processes if asked for, or finds the reason why there is none."""

import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from rft_fn.data.media.stored import digest
from rft_fn.data.rows import Place, Row, Table, place_of, row_at
from rft_fn.data.spans import Lesson
from rft_fn.data.unfit import TooLong, Unfit

__all__ = ["Made", "Outcome", "outcomes"]

_CHUNK = 8  # rows that a worker takes at a time


class Made(NamedTuple):
    """An item that was made."""

    text: str  # that has all of its content, for a digest
    notes: tuple[str, ...]  # how its media were changed


Outcome = Made | Unfit | TooLong


def outcomes(rows: Table, recipe: Any, name: str, *, workers: int = 0) -> Iterator[Outcome]:
    """What becomes of each row, in order.

    `workers` processes make the items, if there are any. They are started anew and get the recipe once.
    """
    if not workers:
        for i in range(len(rows)):
            yield _tried(recipe, rows, i, name)
        return
    how = {"initializer": _start, "initargs": (recipe,), "mp_context": multiprocessing.get_context("spawn")}
    with ProcessPoolExecutor(workers, **how) as pool:
        yield from pool.map(_in_worker, _read(rows, name), chunksize=_CHUNK)


def _tried(recipe: Any, rows: Table, i: int, name: str) -> Outcome:
    try:
        return _made(recipe.make(*row_at(rows, i, name), i))
    except (Unfit, TooLong) as error:
        return error


def _made(item: Any) -> Made:
    values = tuple(getattr(item, field.name) for field in fields(item))
    if getattr(item, "media", None) is not None or _have_media(values):
        values = _plain(values)
    return Made(repr(values), getattr(item, "media_notes", ()))


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


def _start(recipe: Any) -> None:
    """Keep the recipe in a worker, which computes on one thread."""
    global _recipe
    _recipe = recipe
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
        return _made(_recipe.make(row, place, i))
    except (Unfit, TooLong) as error:
        return error
