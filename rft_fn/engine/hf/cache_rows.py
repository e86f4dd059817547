"""Selects, joins and compares the rows of a model's cache: keys and values, or recurrent states."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "BufferedLayer", "Path", "Rows", "buffered_layers", "cache_of", "compare", "constant", "join", "select",
    "tensors",
]  # fmt: skip


Path = tuple[Any, ...]  # of attributes, keys and indices
Rows = dict[Path, int]  # the dimension of each tensor that counts rows


class BufferedLayer(ABC):
    """A part of a cache that selects and adds rows itself, and is not searched for tensors."""

    @abstractmethod
    def take(self, index: Tensor, moved: Tensor) -> None:
        """Keep the rows `index` [R']; `moved` are the places with a row of another place."""

    @abstractmethod
    def join(self, other: Any) -> None:
        """Add the rows of another part of this kind."""

    @abstractmethod
    def take_prompt_cache(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [R, H, W, D] of all rows; leave `rows` rows without any."""

    @abstractmethod
    def crop_left(self, count: int) -> None:
        """Drop the first `count` cache positions."""


def buffered_layers(cache: Any) -> list[BufferedLayer]:
    """Return the parts of a cache that select their rows themselves."""
    return [layer for layer in getattr(cache, "layers", []) if isinstance(layer, BufferedLayer)]


def join(cache: Any, other: Any) -> None:
    """Append the rows of another cache; every part of both must be in `buffered_layers`."""
    for mine, new in zip(buffered_layers(cache), buffered_layers(other), strict=True):
        mine.join(new)


def cache_of(output: Any) -> tuple[str, Any]:
    """Return the cache of a model's output after the name by which the model takes it; ("", None) without."""
    from transformers.generation.utils import ALL_CACHE_NAMES

    caches = [(name, getattr(output, name, None)) for name in ALL_CACHE_NAMES]
    return next((x for x in caches if x[1] is not None), ("", None))


def _entries(x: Any) -> list[tuple[Any, Any]]:
    """Return (name, part) of everything in x that may hold tensors."""
    if isinstance(x, dict):
        return list(x.items())
    if isinstance(x, (list, tuple)):
        return list(enumerate(x))
    closed = (Tensor, nn.Module, type, FunctionType, ModuleType, BufferedLayer)
    if isinstance(x, closed) or not hasattr(x, "__dict__"):
        return []
    return list(vars(x).items())


def _replaced(x: Any, f: Callable[[Path, Tensor], Tensor], path: Path, seen: dict[int, Any]) -> Any:
    """Put f(path, tensor) in place of each tensor of x; containers change in place, tuples are rebuilt."""
    if id(x) in seen:
        return seen[id(x)][1]

    # tensors and tuples become new objects
    new = x
    if isinstance(x, Tensor):
        new = f(path, x)
    elif isinstance(x, tuple):
        parts = [_replaced(part, f, (*path, name), seen) for name, part in _entries(x)]
        new = type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    seen[id(x)] = (x, new)  # x itself too: Python gives the id of an object that is gone to another one

    # everything else keeps its identity, so that one object in two places stays one
    if new is x and not isinstance(x, Tensor):
        for name, part in _entries(x):
            other = _replaced(part, f, (*path, name), seen)
            if other is not part and isinstance(x, (dict, list)):
                x[name] = other
            elif other is not part:
                setattr(x, name, other)
    return new


def tensors(cache: Any) -> dict[Path, Tensor]:
    """Return every tensor of a cache, by its path."""
    by_path: dict[Path, Tensor] = {}
    _replaced(cache, by_path.setdefault, (), {})
    return by_path


def compare(one: Any, two: Any) -> Rows:
    """Return the dimension of rows in each tensor, from caches of one row and of two.

    ValueError where the caches differ in more than their sizes.
    """
    first = tensors(one)
    second = tensors(two)
    if first.keys() != second.keys():
        raise ValueError(
            f"cache: expected the same tensors for one row and two, got {len(first)}, {len(second)}"
        )
    rows: Rows = {}
    for path, x in first.items():
        sizes = list(zip(x.shape, second[path].shape))
        if (1, 2) in sizes:
            rows[path] = sizes.index((1, 2))
    return rows


def select(cache: Any, rows: Rows, index: Tensor, moved: Sequence[int]) -> Any:
    """Return the cache of the rows `index` [R], which may repeat or leave out some.

    `moved` are the places with a row of another place.
    """

    def selected(path: Path, x: Tensor) -> Tensor:
        return x.index_select(rows[path], index.to(x.device)) if path in rows else x

    parts = buffered_layers(cache)
    if parts:
        places = torch.tensor(moved, dtype=torch.long, device=index.device)
        for part in parts:
            part.take(index, places)
    return _replaced(cache, selected, (), {})


def constant(short: Any, long: Any, rows: Rows) -> list[Path]:
    """Return the tensors of a cache that do not grow with the tokens: recurrent states and convolutions."""
    before = tensors(short)
    after = tensors(long)

    def rest(path: Path, x: Tensor) -> list[int]:
        return [size for dim, size in enumerate(x.shape) if dim != rows[path]]

    return [path for path in rows if rest(path, before[path]) == rest(path, after[path])]
