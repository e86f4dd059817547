"""References: the cells of the column with the right answers, read once, and what they read as.

A cell is a text, a number, or a list of such, which are alternatives: any of them is right. A reward that
reads references says of each what it reads as (`Reward.references`), so that a whole file can be looked at
before a run (`Survey`).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import isfinite
from typing import Any, NamedTuple

from rft_fn.data.invalid_rows import FirstFew
from rft_fn.data.row_cache import described
from rft_fn.data.row_paths import value_at
from rft_fn.reward.combine import components_of
from rft_fn.reward.mathematics import close
from rft_fn.reward.row_weights import RowWeights

__all__ = ["UNREADABLE", "Reference", "Survey", "alternatives"]

UNREADABLE = "nothing that can be read"
"""What a reference reads as that no answer will equal."""


class Reference(NamedTuple):
    """One right answer."""

    text: str
    is_number: bool = False  # in the data, which has no notation
    is_rounded: bool = False  # a float, which is rarely the decimal that was meant

    def equals(self, given: Fraction, value: Fraction) -> bool:
        """Return whether a number is the reference's `value`: exactly, or but for the rounding of a float."""
        return close(value, given) if self.is_rounded else value == given


def alternatives(cell: Any, column: str) -> list[Reference]:
    """Return the right answers in a cell. ValueError for one that holds none, or something else."""
    if hasattr(cell, "tolist"):  # an array, or a number of one
        cell = cell.tolist()
    cells = list(cell) if isinstance(cell, (list, tuple, set, frozenset)) else [cell]
    if not cells:
        raise ValueError(f"column {column!r}: expected an answer or several, got an empty list")
    return [_reference(x, column) for x in cells]


def _reference(x: Any, column: str) -> Reference:
    if isinstance(x, str):
        return Reference(x)
    if isinstance(x, bool):
        return Reference(str(x))
    if isinstance(x, int):
        return Reference(str(x), is_number=True)
    if isinstance(x, float) and isfinite(x):
        whole = x.is_integer() and abs(x) < 2**53
        return Reference(str(int(x)) if whole else repr(x), is_number=True, is_rounded=not whole)
    if isinstance(x, (Mapping, list, tuple, set, float)) or x is None:
        shown = repr(x) if isinstance(x, float) else type(x).__name__
        raise ValueError(
            f"column {column!r}: expected a text, a number, or a list of these as alternatives, got {shown}"
        )
    return Reference(str(x))  # a date, a Decimal


class Survey:
    """What the references of a file read as, by reward; see `see`.

    It is a `data.recipe.Survey`, so that what it saw of a file is kept for the next start.
    """

    def __init__(self, score: Any):
        self._score = score
        self._rows = 0
        self._parts = {}
        for name, (reward, weight) in components_of(score).items():
            if reward.references is not None:
                column, kind = reward.references
                self._parts[name] = _Part(column, kind, weight)

    def see(self, row: Mapping[str, Any], place: str) -> None:
        """Add the references of a row that is at that place."""
        for part in self._parts.values():
            part.see(row, place)

    __call__ = see

    def key(self) -> str | None:
        """Return the description of the rewards; None for one of a stranger, which may read anything."""
        return described({name: (x.column, x.kind, x.weight) for name, x in self._parts.items()})

    def fresh(self) -> "Survey":
        """Return a survey of the same rewards that has seen nothing."""
        return Survey(self._score)

    def state(self) -> dict[str, Any]:
        """Return what was seen, as JSON."""
        return {
            name: {
                "count": x.count,
                "kinds": x.kinds,
                "refused": [x.refused.count, x.refused.shown],
                "lost": [x.lost.count, x.lost.shown],
            }
            for name, x in self._parts.items()
        }

    def add(self, state: Mapping[str, Any]) -> None:
        """Add the `state` of another survey of these rewards."""
        for name, part in self._parts.items():
            part.count += state[name]["count"]
            part.kinds.update(state[name]["kinds"])
            part.refused.join(*state[name]["refused"])
            part.lost.join(*state[name]["lost"])

    def refused(self) -> str:
        """Return the line about references that stop a run when they are drawn; "" for none."""
        return "; ".join(
            f"reward {name!r}: {part.refused.count} of {part.count} references cannot be used: "
            f"{'; '.join(part.refused.shown)}{part.refused.more()}"
            for name, part in self._parts.items()
            if part.refused.count
        )

    def unreadable(self) -> list[str]:
        """Return a line for each reward with references that no answer will equal."""
        return [
            f"reward {name!r}: {part.lost.count} of {part.count} references read as {UNREADABLE}, and score "
            f"0 whatever is answered: {'; '.join(part.lost.shown)}{part.lost.more()}"
            for name, part in self._parts.items()
            if part.lost.count
        ]

    def shares(self) -> list[str]:
        """Return a line for each reward that reads references: which share reads as what."""
        lines = []
        for name, part in self._parts.items():
            shown = [f"{100 * n / part.count:.3g} % {kind}" for kind, n in part.kinds.most_common()]
            if shown:
                lines.append(
                    f"reward {name!r}: {part.count} references of {part.column!r}: {', '.join(shown)}"
                )
        return lines


class _Part:
    """What the references of one reward read as."""

    def __init__(self, column: str, kind: Callable[[Reference], str], weight: Any):
        self.column = column
        self.kind = kind
        self.weight = weight
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self.refused = FirstFew()
        self.lost = FirstFew()

    def see(self, row: Mapping[str, Any], place: str) -> None:
        """Add the reference of a row; a reward by a column has only the rows of its labels."""
        cell = value_at(row, self.column, None)
        by_label = isinstance(self.weight, RowWeights)
        if cell is None or (by_label and str(row.get(self.weight.column)) not in self.weight.of):
            return
        self.count += 1
        try:
            found = alternatives(cell, self.column)
            kinds = [self.kind(reference) for reference in found]
        except ValueError as error:
            self.refused.add(f"{place}: {error}")
            return
        if all(kind == UNREADABLE for kind in kinds):
            self.lost.add(f"{place}: {str(cell)!r:.80}")
        readable = [kind for kind in kinds if kind != UNREADABLE] or [UNREADABLE]
        self.kinds[readable[0] if len(found) == 1 else "alternatives"] += 1
