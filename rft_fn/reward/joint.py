"""The values of joint rewards, which all ranks compute together, once for a batch."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn.data.prompts import Prompt
from rft_fn.reward.calling import noted
from rft_fn.reward.combine import Known, joint_names
from rft_fn.reward.row_weights import RowWeights, weights_of
from rft_fn.reward.signature import Score
from rft_fn.rollout import take
from rft_fn.types import Rollout

__all__ = ["Joint"]


class Joint:
    """The values [B] of the joint rewards of a score for a rollout, which are computed once."""

    def __init__(self, score: Score, rollout: Rollout, prompts: Sequence[Prompt], tokenizer: Any):
        self._score: Any = score
        self._rollout = rollout
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._found: dict[str, Tensor] | None = None
        self._parts: dict[tuple[int, ...], Rollout] = {}
        self.begun = False  # it may have failed

    def values(self) -> dict[str, Tensor]:
        """Return the values by name. ValueError for a reward that gives another number of them."""
        if self._found is None:
            self.begun = True
            self._found = {name: self._one(name) for name in joint_names(self._score)}
        return self._found

    def prepare(self) -> None:
        """Do what each rank does by itself, so that its errors are shared before the ranks meet."""
        for name in joint_names(self._score):
            prepare = self._score.components[name][0].prepare
            rows = self._rows(name)
            if prepare is not None and rows:
                self._named(name, prepare, rows)

    def _one(self, name: str) -> Tensor:
        """Return the values [B] of one reward, which is asked for the rows that it applies to."""
        values = torch.full((len(self._rollout.group),), math.nan)
        rows = self._rows(name)
        if not rows:
            return values
        given = self._named(name, self._score.components[name][0].fn, rows)
        if not isinstance(given, Tensor) or given.shape != (len(rows),):
            got = list(getattr(given, "shape", ())) or type(given).__name__
            raise ValueError(f"reward {name!r}: expected [B] = [{len(rows)}], got {got}")
        return values.index_copy(0, torch.tensor(rows), given.detach().cpu().float())

    def _rows(self, name: str) -> tuple[int, ...]:
        """Return the rows that a reward applies to."""
        weight = self._score.components[name][1]
        owners = self._rollout.group.tolist()
        column = weight.column if isinstance(weight, RowWeights) else ""
        asked = {column: [self._prompts[i].columns.get(column) for i in owners]}
        applies = ~weights_of(name, weight, asked, len(owners)).isnan()
        return tuple(applies.nonzero().flatten().tolist())

    def _named(self, name: str, call: Any, rows: tuple[int, ...]) -> Any:
        """Call a reward, or its `prepare`, for some rows; its errors name it."""
        self._score.running = name
        with noted(name):
            return call(self._part(rows), self._prompts, self._tokenizer)

    def _part(self, rows: tuple[int, ...]) -> Rollout:
        """Return rows of the rollout: the same object for all rewards of the same rows."""
        if len(rows) == len(self._rollout.group):
            return self._rollout
        if rows not in self._parts:
            self._parts[rows] = take(self._rollout, list(rows))
        return self._parts[rows]

    def of_rows(self, rows: Sequence[int]) -> Known:
        """Return a function that gives the values of some rows."""

        def known() -> dict[str, Tensor]:
            return {name: x[list(rows)] for name, x in self.values().items()}

        return known
