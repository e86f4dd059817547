"""Weights of rewards that depend on a column of the data: a recipe for each kind of row."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_fn.reward.convention import Columns

__all__ = ["RowWeights", "Veto", "Weight", "check_weight", "read_veto", "vetoed", "weights_of"]


# ---------- weights of rewards that depend on a column of the data: a recipe for each kind of row


@dataclass(frozen=True)
class RowWeights:
    """The weight of a reward by the value of a column; it does not apply to rows with another value.

    Values are compared as text: 1 is "1".
    """

    column: str
    of: Mapping[str, float]

    def joined(self, other: "RowWeights") -> "RowWeights":
        """Both together. ValueError for two columns, and for two weights of one value."""
        if other.column != self.column:
            raise ValueError(f"expected one column for its weights, got {self.column!r} and {other.column!r}")
        for value in other.of:
            if value in self.of:
                raise ValueError(f"expected one weight where {self.column} is {value!r}, got two")
        return RowWeights(self.column, {**self.of, **other.of})


Weight = float | RowWeights


def weights_of(name: str, weight: Weight, columns: Columns, count: int) -> Tensor:
    """The weight [B] of the part `name` for each of `count` rows, NaN where it does not apply.

    ValueError for a column that is not there.
    """
    if not isinstance(weight, RowWeights):
        return torch.full((count,), float(weight))
    if weight.column not in columns:
        known = ", ".join(columns) or "none"
        raise ValueError(
            f"reward {name!r}: column {weight.column!r} is not in the dataset; its columns are: {known}"
        )
    found = [weight.of.get(str(value), math.nan) for value in columns[weight.column]]
    return torch.tensor(found, dtype=torch.float32)


def check_weight(name: str, weight: object) -> None:
    """ValueError for anything but a finite weight, or one for some values of a column."""
    numbers = [weight]
    if isinstance(weight, RowWeights):
        numbers = list(weight.of.values())
    for x in numbers:
        if not isinstance(x, (int, float)) or not math.isfinite(x):
            raise ValueError(f"reward {name!r}: expected a finite weight, got {x!r}")
    if not numbers:
        raise ValueError(f"reward {name!r}: expected a weight for one value of a column at least, got none")


# ---------- vetoes: a part below a limit decides the whole reward


@dataclass(frozen=True)
class Veto:
    """Where `part` is below `limit`, the reward is `total`, whatever the other parts say.

    A part that does not apply to a row has no veto there. ValueError for numbers that are not finite.
    """

    part: str
    limit: float
    total: float = 0.0

    def __post_init__(self) -> None:
        for name, x in {"limit": self.limit, "total": self.total}.items():
            if not math.isfinite(x):
                raise ValueError(f"veto of {self.part!r}: {name}: expected a finite number, got {x}")


def read_veto(text: str) -> Veto:
    """The veto of a text PART<LIMIT or PART<LIMIT=TOTAL. ValueError for any other."""
    found = re.fullmatch(r"(?P<part>.+)<(?P<limit>[^<=]+)(?:=(?P<total>[^<=]+))?", text)
    wrong = ValueError(f"veto {text!r}: expected PART<LIMIT=TOTAL with finite numbers")
    if found is None:
        raise wrong
    try:
        return Veto(found["part"], float(found["limit"]), float(found["total"] or 0))
    except ValueError:
        raise wrong from None


def vetoed(
    total: Tensor, parts: Mapping[str, Tensor], vetoes: Sequence[Veto]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the total after the vetoes, for each part with one: 1 where it has decided, else 0).

    total[b] = veto.total of the first veto whose part is below its limit at b. `parts` and `total` have one
    shape, and parts are the values before weights.
    """
    free = torch.ones_like(total, dtype=torch.bool)
    by: dict[str, Tensor] = {}
    for veto in vetoes:
        hit = free & (parts[veto.part] < veto.limit)  # False for NaN
        total = torch.where(hit, veto.total, total)
        free = free & ~hit
        by[veto.part] = by.get(veto.part, torch.zeros_like(total)) + hit
    return total, by
