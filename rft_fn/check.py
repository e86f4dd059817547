"""Checks at public boundaries: shapes and units of tensors, and which arguments are given.

The values of tensors are never read, because that would stop a GPU.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def _fits(size: tuple[int, ...], dims: list[str], known: dict[str, Any]) -> bool:
    """Return whether a size has these dimensions, and add new ones to `known`."""
    lead = dims[:1] == ["..."]
    named = [dim for dim in dims if dim != "..."]
    rest = len(size) - len(named)
    if rest < 0 or (rest and not lead):
        return False
    fits = True
    for dim, n in zip(named, size[rest:]):
        if dim.isdigit():
            fits &= int(dim) == n
        else:
            fits &= known.setdefault(dim, n) == n
    if lead:
        fits &= known.setdefault("...", size[:rest]) == size[:rest]
    return fits


def _written(dims: list[str], known: dict[str, Any]) -> str:
    """Write the expected sizes as text: "4, S" for "N S" if N is known to be 4."""
    sizes: list[Any] = [known.get(dim, dim) for dim in dims]
    if sizes and isinstance(sizes[0], tuple):  # the sizes of a leading ...
        sizes[:1] = sizes[0]
    return ", ".join(map(str, sizes))


def shapes(**args: tuple[Any, str]) -> dict[str, int]:
    """Check shapes of tensors and return the named sizes.

    Arguments are `name=(tensor, "N G")`, checked from left to right. A dimension is a name, which must have
    the same size everywhere, a number, or a leading `...`. None is skipped. Raises `ValueError("adv:
    expected [T] = [7], got [6]")`.
    """
    known: dict[str, int] = {}
    for name, (x, spec) in args.items():
        if x is None:
            continue
        dims = spec.split()
        before = dict(known)
        if not _fits(tuple(x.shape), dims, known):
            want = _written(dims, before)
            raise ValueError(f"{name}: expected [{', '.join(dims)}] = [{want}], got {list(x.shape)}")
    return known


def units(unit: int | Sequence[int], rows: int, where: str = "") -> list[int]:
    """Check that units make up all rows, and return the number of rows of each.

    `unit` is the number of rows of every unit, or of each. `where` tells what the rows are of. Raises
    `ValueError("unit: expected a divisor of the 7 rows, got 2")`.
    """
    if isinstance(unit, int):
        if unit < 1 or rows % unit:
            raise ValueError(f"unit: expected a divisor of the {rows} rows{where}, got {unit}")
        return [unit] * (rows // unit)
    sizes = [int(size) for size in unit]
    if any(size < 1 for size in sizes):
        raise ValueError(f"unit: expected at least 1 row in each of {len(sizes)} units, got {min(sizes)}")
    if sum(sizes) != rows:
        raise ValueError(f"unit: expected units of {rows} rows{where} together, got {sum(sizes)}")
    return sizes


def given(**args: T | None) -> tuple[T, ...]:
    """Check that no argument is None, and return them all.

    Raises `ValueError("old_value: expected a tensor, got None; ...")` for the first that is.
    """
    values: list[T] = []
    for name, x in args.items():
        if x is None:
            raise ValueError(
                f"{name}: expected a tensor, got None; give it to rft_fn.experience, or ask the model for it"
            )
        values.append(x)
    return tuple(values)


def at_most_one(**options: Any) -> None:
    """Check that at most one option is not None.

    Raises `ValueError("steps, epochs: expected one of them, got 30 and 3.0")`.
    """
    given = {name: x for name, x in options.items() if x is not None}
    if len(given) > 1:
        raise ValueError(
            f"{', '.join(given)}: expected one of them, got {' and '.join(map(repr, given.values()))}"
        )
