"""Values at a path into a row, such as "reward_model.ground_truth"."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft_fn.data.table import Row

__all__ = ["column_at", "column_of", "value_at"]


_RAISE = object()


def value_at(row: Mapping[str, Any], path: str, default: Any = _RAISE) -> Any:
    """Return the value of a row at a path such as "reward_model.ground_truth".

    A column with dots in its own name wins. Where there is nothing at the path: the default, or KeyError
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


def column_of(row: Row, column: str) -> Any:
    """Return the cell of a column. ValueError, with the columns that there are, for a missing one."""
    if column not in row:
        raise ValueError(f"the row has no column {column!r}; it has {', '.join(map(repr, row))}")
    return row[column]


def column_at(
    columns: Mapping[str, Sequence[Any]], path: str, count: int, default: Any = _RAISE
) -> list[Any]:
    """Return `value_at` for all of `count` rows that are given as columns."""
    heads = [name for name in columns if path == name or path.startswith(f"{name}.")]
    cells = []
    for i in range(count):
        row = {name: columns[name][i] for name in heads}
        cells.append(value_at(row, path, default))
    return cells
