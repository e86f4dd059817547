"""A model's cache of the tokens it has read: keys and values, convolutions, recurrent states.

Every family of transformers has its own containers for it, so none is named here. A cache is searched for
tensors; comparing caches of one and of two rows shows which dimension of a tensor counts the rows of the
batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OwnRows", "Path", "Rows", "compare", "constant", "found_in", "join", "own", "select", "tensors"]

Path = tuple[Any, ...]  # of attributes, keys and indices
Rows = dict[Path, int]  # the dimension of each tensor that counts rows


class OwnRows(ABC):
    """A part of a cache that selects and adds rows itself, and is not searched for tensors."""

    @abstractmethod
    def take(self, index: Tensor, moved: Tensor) -> None:
        """Keep the rows `index` [R']; `moved` are the places whose row comes from another place."""

    @abstractmethod
    def join(self, other: Any) -> None:
        """Add the rows of another part of this kind."""

    @abstractmethod
    def lift(self, rows: int) -> tuple[Tensor, Tensor]:
        """The keys and values [R, H, W, D] of all rows; `rows` rows without any are left."""

    @abstractmethod
    def crop_left(self, count: int) -> None:
        """Forget the first `count` columns."""


def own(cache: Any) -> list[OwnRows]:
    """The parts of a cache that select their rows themselves."""
    return [layer for layer in getattr(cache, "layers", []) if isinstance(layer, OwnRows)]


def join(cache: Any, other: Any) -> None:
    """Add the rows of another cache to one of which every part is `own`."""
    for mine, new in zip(own(cache), own(other), strict=True):
        mine.join(new)


def found_in(output: Any) -> tuple[str, Any] | None:
    """(the name by which the model takes it, the cache) of a model's output, None if it has none."""
    from transformers.generation.utils import ALL_CACHE_NAMES

    for name in ALL_CACHE_NAMES:
        cache = getattr(output, name, None)
        if cache is not None:
            return name, cache
    return None


def _entries(x: Any) -> list[tuple[Any, Any]]:
    """(name, part) of everything in x that may hold tensors."""
    if isinstance(x, dict):
        return list(x.items())
    if isinstance(x, (list, tuple)):
        return list(enumerate(x))
    closed = (Tensor, nn.Module, type, FunctionType, ModuleType, OwnRows)
    if isinstance(x, closed) or not hasattr(x, "__dict__"):
        return []
    return list(vars(x).items())


def _replaced(x: Any, f: Callable[[Path, Tensor], Tensor], path: Path, seen: dict[int, Any]) -> Any:
    """`x` with f(path, tensor) in place of each tensor; containers are changed in place, tuples rebuilt."""
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
            if other is not part:
                _write(x, name, other)
    return new


def _write(x: Any, name: Any, part: Any) -> None:
    if isinstance(x, (dict, list)):
        x[name] = part
    else:
        setattr(x, name, part)


def tensors(cache: Any) -> dict[Path, Tensor]:
    """Every tensor of a cache, by its place."""
    found: dict[Path, Tensor] = {}

    def noted(path: Path, x: Tensor) -> Tensor:
        found[path] = x
        return x

    _replaced(cache, noted, (), {})
    return found


def compare(one: Any, two: Any) -> Rows:
    """The dimension of rows in each tensor, from caches of one row and of two.

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


def select(cache: Any, rows: Rows, index: Tensor) -> Any:
    """The cache of the rows `index` [R], which may repeat or leave out some."""

    def selected(path: Path, x: Tensor) -> Tensor:
        if path not in rows:
            return x
        return x.index_select(rows[path], index.to(x.device))

    parts = own(cache)
    if parts:
        moved = (index != torch.arange(len(index), device=index.device)).nonzero().squeeze(-1)
        for part in parts:
            part.take(index, moved)
    return _replaced(cache, selected, (), {})


def constant(short: Any, long: Any, rows: Rows) -> list[Path]:
    """The tensors of a cache that do not grow with the tokens: recurrent states and convolutions."""
    before = tensors(short)
    after = tensors(long)

    def rest(path: Path, x: Tensor) -> list[int]:
        return [size for dim, size in enumerate(x.shape) if dim != rows[path]]

    return [path for path in rows if rest(path, before[path]) == rest(path, after[path])]
