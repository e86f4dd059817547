"""Rubrics: a judge is asked about each criterion of a row; the reward is the weighted mean."""

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rft_fn import border, rng
from rft_fn.reward.reward_record import Reward
from rft_fn.reward.signature import Messages, text

__all__ = ["CRITERION", "Criterion", "by_criterion", "criteria_of"]


CRITERION = (
    "Judge only whether the response meets this criterion, whatever else is good or bad about it.\n"
    "<criterion>\n{criterion}\n</criterion>\n"
    "2 says that it is met, 1 that it is met in part, 0 that it is not."
)
"""The usual `criteria` of a form that asks for one criterion, from 0 to 2."""

_PLACE = "criterion"  # of the form
_TAKEN = (
    "score",
    "reward",
    "overall",
    "vetoed",
    "said",
    "agreement",
)  # names that the results of a reward have


class Criterion(NamedTuple):
    """A criterion of a rubric."""

    name: str  # of its metric and its column
    text: str
    weight: float = 1.0
    veto: float = 0.0  # the least verdict, below which the whole reward is 0


Results = list[dict[str, Any]]


def by_criterion(judge: Reward, column: str = "rubric", *, unparsable: float | str | None = 0.0) -> Reward:
    """Return a reward in [0, 1] by the rubric in a column of the data, asking a judge once per criterion.

        reward = sum of weight * verdict / sum of weight; 0 where a verdict is below the veto of its criterion

    A cell is a list of {"name", "text", "weight": 1, "veto": 0}, or its JSON. `judge` is `generative` with a
    form that has the place {criterion}, such as `forms.rating(criteria=CRITERION, high=2)`, and with
    `unparsable=None`: a criterion without a verdict is not 0, and leaves the response `unparsable`, as there.
    Each criterion is a metric and a column by its name, with `NAME/agreement` the share of the votes that are
    the most frequent one, and `vetoed` says where a veto has decided. ValueError for a rubric without
    criteria or without a weight above 0, and for names that are missing, taken or given twice.
    """
    if _PLACE not in judge.columns:
        raise ValueError(f"form: expected one with the place {{criterion}}, got columns {judge.columns}")
    if isinstance(unparsable, str) and unparsable != "error":
        raise ValueError(f"unparsable: expected a number, None or 'error', got {unparsable!r}")
    read = tuple(name for name in judge.columns if name != _PLACE)
    scored = partial(_scored, judge, column, read, unparsable)
    return replace(judge, fn=scored, columns=(column, *(name for name in read if name != column)))


def criteria_of(cell: Any, where: str) -> list[Criterion]:
    """Return the criteria of a cell. ValueError, with `where`, for anything else."""
    rows = border.read_json(cell) if isinstance(cell, str) else cell
    if not isinstance(rows, Sequence) or not rows or not all(isinstance(x, Mapping) for x in rows):
        raise ValueError(f"{where}: expected a list of criteria, got {border.quoted(cell, 80)}")
    found: dict[str, Criterion] = {}
    for row in rows:
        name, words = row.get("name"), row.get("text")
        known = isinstance(name, str) and name not in found and name not in _TAKEN and "/" not in name
        if not known or not name or not isinstance(words, str) or not words.strip():
            raise ValueError(
                f"{where}: expected criteria with a text and a name that no other has, none of "
                f"{', '.join(_TAKEN)}, got {border.quoted(dict(row), 80)}"
            )
        weight, veto = row.get("weight", 1.0), row.get("veto", 0.0)
        if not (_is_number(weight) and weight >= 0 and _is_number(veto) and 0 <= veto <= 1):
            raise ValueError(
                f"{where}: {name}: expected a weight from 0 and a veto in [0, 1], got "
                f"{border.quoted(weight, 40)} and {border.quoted(veto, 40)}"
            )
        found[name] = Criterion(name, words, float(weight), float(veto))
    if not sum(x.weight for x in found.values()):
        raise ValueError(f"{where}: expected a criterion with a weight above 0, got none")
    return list(found.values())


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and math.isfinite(x)


def _scored(
    judge: Reward,
    column: str,
    read: Sequence[str],
    unparsable: float | str | None,
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    *,
    keys: Sequence[int] | None = None,
    log_metric: Callable[[str, Any], None] | None = None,
    log_extra: Callable[[str, Any], None] | None = None,
    media: Sequence[Any] | None = None,
    **columns: Any,
) -> Results | Awaitable[Results]:
    """Return the results of responses, in TRL's convention: every criterion is a question of the judge."""
    rubrics = [
        criteria_of(cell, f"column {column!r}, completion {i}") for i, cell in enumerate(columns[column])
    ]
    places = [i for i, own in enumerate(rubrics) for _ in own]
    asked = [criterion for own in rubrics for criterion in own]
    keys = keys or [rng.fold_in(0, text(x)) for x in completions]
    noted: dict[str, Any] = {}
    result = judge.fn(
        [prompts[i] for i in places],
        [completions[i] for i in places],
        keys=[rng.fold_in(keys[i], "criterion", x.name) for i, x in zip(places, asked, strict=True)],
        log_metric=log_metric,
        log_extra=noted.__setitem__,
        media=None if media is None else [media[i] for i in places],
        criterion=[x.text for x in asked],
        **{name: [columns[name][i] for i in places] for name in read if name in columns},
    )
    if inspect.isawaitable(result):
        return _later(rubrics, result, noted, unparsable, log_extra)
    return _joined(rubrics, result, noted, unparsable, log_extra)


async def _later(
    rubrics: Sequence[Sequence[Criterion]], result: Awaitable[Any], noted: Mapping[str, Any], *more: Any
) -> Results:
    return _joined(rubrics, await result, noted, *more)


def _joined(
    rubrics: Sequence[Sequence[Criterion]],
    verdicts: Sequence[float | None],
    noted: Mapping[str, Sequence[Any]],
    unparsable: float | str | None,
    log_extra: Callable[[str, Any], None] | None,
) -> Results:
    """Return the result of each response by the verdicts on all criteria of all responses."""
    found, said = [], []
    at = 0
    for i, own in enumerate(rubrics):
        here = slice(at, at + len(own))
        at += len(own)
        values = list(zip(own, verdicts[here], strict=True))
        row: dict[str, Any] = {x.name: v for x, v in values if v is not None}
        if "agreement" in noted:
            row |= {f"{x.name}/agreement": a for x, a in zip(own, noted["agreement"][here], strict=True)}
        if len({x.name for x in own} & row.keys()) == len(own):
            vetoed = any(v < x.veto for x, v in values if v is not None)
            mean = sum(x.weight * v for x, v in values if v is not None) / sum(x.weight for x in own)
            row |= {"score": 0.0 if vetoed else mean, "vetoed": float(vetoed)}
        elif unparsable == "error":
            raise ValueError(
                f"judge: expected a verdict on each criterion of completion {i}, got none on "
                f"{', '.join(x.name for x, v in values if v is None)}"
            )
        else:
            row["score"] = unparsable
        found.append(row)
        said.append(
            "\n".join(f"{x.name}: {words}" for x, words in zip(own, noted["said"][here], strict=True))
        )
    if log_extra is not None:
        log_extra("said", said)
    return found
