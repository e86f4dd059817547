"""Values at a path into a row, such as "reward_model.ground_truth"."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["column_at", "value_at"]

_RAISE = object()


def value_at(row: Mapping[str, Any], path: str, default: Any = _RAISE) -> Any:
    """The value of a row at a path such as "reward_model.ground_truth".

    A column whose own name has dots wins. Where there is nothing at the path: the default, or KeyError
    without one.
    """
    if path in row:
        return row[path]

    # the longest column name that the path begins with, then the rest of the path inside its value
    for cut in range(len(path) - 1, 0, -1):
        if path[cut] != ".":
            continue
        inner = row.get(path[:cut])
        if isinstance(inner, Mapping):
            return value_at(inner, path[cut + 1 :], default)

    if default is _RAISE:
        raise KeyError(path)
    return default


def column_at(
    columns: Mapping[str, Sequence[Any]], path: str, count: int, default: Any = _RAISE
) -> list[Any]:
    """`value_at` for each of `count` rows that are given as columns."""
    heads = [name for name in columns if path == name or path.startswith(f"{name}.")]
    found = []
    for i in range(count):
        row = {name: columns[name][i] for name in heads}
        found.append(value_at(row, path, default))
    return found
