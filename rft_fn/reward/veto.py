"""Vetoes: a part below a limit decides the whole reward."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Veto", "read_veto", "vetoed"]


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
    """Read a veto from PART<LIMIT or PART<LIMIT=TOTAL. ValueError for any other text."""
    match = re.fullmatch(r"(?P<part>.+)<(?P<limit>[^<=]+)(?:=(?P<total>[^<=]+))?", text)
    wrong = ValueError(f"veto {text!r}: expected PART<LIMIT=TOTAL with finite numbers")
    if match is None:
        raise wrong
    try:
        return Veto(match["part"], float(match["limit"]), float(match["total"] or 0))
    except ValueError:
        raise wrong from None


def vetoed(
    total: Tensor, parts: Mapping[str, Tensor], vetoes: Sequence[Veto]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (the total after the vetoes, for each part with one: 1 where it has decided, else 0).

    total[b] = veto.total of the first veto with a part below its limit at b. `parts` and `total` have one
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
