"""Paths of names into a row: the answer of a row is not always a column of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["column_at", "value_at"]

_RAISE = object()


def value_at(row: Mapping[str, Any], path: str, default: Any = _RAISE) -> Any:
    """What a row has at a path such as "reward_model.ground_truth".

    A column whose own name has dots wins. Where there is nothing at the path: the default, or KeyError.
    """
    if path in row:
        return row[path]

    # the longest name of a column that the path begins with, then what is inside of its value
    for cut in range(len(path) - 1, 0, -1):
        head, rest = path[:cut], path[cut + 1 :]
        if path[cut] == "." and isinstance(row.get(head), Mapping):
            return value_at(row[head], rest, default)
    if default is _RAISE:
        raise KeyError(path)
    return default


def column_at(
    columns: Mapping[str, Sequence[Any]], path: str, count: int, default: Any = _RAISE
) -> list[Any]:
    """`value_at` of each of `count` rows that are given by columns."""
    heads = [name for name in columns if path == name or path.startswith(f"{name}.")]
    return [value_at({name: columns[name][i] for name in heads}, path, default) for i in range(count)]
