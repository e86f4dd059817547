"""Weights of rewards, also by a column of the data: a recipe for each kind of row."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_fn.reward.signature import (
    Columns,
)

__all__ = ["RowWeights", "Weight", "check_weight", "weights_of"]


@dataclass(frozen=True)
class RowWeights:
    """The weight of a reward by the value of a column, as text; other rows are not scored."""

    column: str
    of: Mapping[str, float]

    def joined(self, other: "RowWeights") -> "RowWeights":
        """Join both. ValueError for two columns, and for two weights of one value."""
        if other.column != self.column:
            raise ValueError(f"expected one column for its weights, got {self.column!r} and {other.column!r}")
        for value in other.of:
            if value in self.of:
                raise ValueError(f"expected one weight where {self.column} is {value!r}, got two")
        return RowWeights(self.column, {**self.of, **other.of})


Weight = float | RowWeights


def weights_of(name: str, weight: Weight, columns: Columns, count: int) -> Tensor:
    """Return the weight [B] of part `name`, NaN where it does not apply. ValueError without its column."""
    if not isinstance(weight, RowWeights):
        return torch.full((count,), float(weight))
    if weight.column not in columns:
        known = ", ".join(columns) or "none"
        raise ValueError(
            f"reward {name!r}: column {weight.column!r} is not in the dataset; its columns are: {known}"
        )
    weights = [weight.of.get(str(value), math.nan) for value in columns[weight.column]]
    return torch.tensor(weights, dtype=torch.float32)


def check_weight(name: str, weight: object) -> None:
    """Raise ValueError for anything but a finite weight, or one for some values of a column."""
    numbers = list(weight.of.values()) if isinstance(weight, RowWeights) else [weight]
    for x in numbers:
        if not isinstance(x, (int, float)) or not math.isfinite(x):
            raise ValueError(f"reward {name!r}: expected a finite weight, got {x!r}")
    if not numbers:
        raise ValueError(f"reward {name!r}: expected a weight for one value of a column at least, got none")
