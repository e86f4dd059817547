"""Rubrics of verifiers as reward functions, without that library: what counts is what a rubric has."""

import asyncio
import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from rft_fn.data.column_path import column_at
from rft_fn.reward.convention import GIVEN, RewardFn, as_messages, parameters, taken

__all__ = ["verifiers"]

_FIELDS = ("prompt", "completion", "answer", "state", "task", "info")  # of a response; plural for a group


def verifiers(rubric: Any, answer: str = "answer") -> RewardFn:
    """A `Rubric` of verifiers (0.1): the weighted sum of its functions, each of which is a metric too.

    A function is called once a response with what it names of `prompt` and `completion` (messages), `answer`,
    `state`, `task`, `info`, the columns, and the rubric's class objects (its parser). One that names
    `completions` is called once for the responses to a prompt, with plural names. Async functions run
    together. One that raises scores 0, as in verifiers: the metric `failed` counts these, and the first is a
    warning. A group of rubrics is their sum; an environment is its rubric, a function a rubric of one.
    """
    judges = [j for one in _rubrics(getattr(rubric, "rubric", rubric)) for j in _judges(one)]

    async def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> dict[str, Any]:
        rows = _rows(prompts, completions, columns, answer)
        groups = _groups(prompts)
        found = await asyncio.gather(*(_column(judge, rows, groups) for judge in judges))

        # what the functions say of each response, where they fail, and the weighted sum
        total, failed = [0.0] * len(rows), [0.0] * len(rows)
        logs: dict[str, Any] = {}
        for judge, scores in zip(judges, found, strict=True):
            logs[judge.name] = scores
            for i, score in enumerate(scores):
                if score is None:
                    failed[i] += 1
                else:
                    total[i] += judge.weight * score
        return {"rewards": total, **logs, "failed": failed}

    reads_answer = any(p.name in ("answer", "answers") for j in judges for p in j.required)
    reward.columns = (answer,) * reads_answer
    return reward


class _Judge(NamedTuple):
    """A function of a rubric."""

    fn: Callable[..., Any]
    weight: float
    objects: Mapping[str, Any]  # of the rubric, by the names that functions call them

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def required(self) -> list[inspect.Parameter]:
        return [p for p in parameters(self.fn) if p.default is p.empty]

    @property
    def takes_group(self) -> bool:
        plural = {f"{name}s" for name in _FIELDS}
        return any(p.name in plural for p in parameters(self.fn))


def _rubrics(rubric: Any) -> list[Any]:
    """The rubrics of a rubric, of a group of them or of a function. ValueError for anything else."""
    if hasattr(rubric, "rubrics"):
        return [one for part in rubric.rubrics for one in _rubrics(part)]
    if hasattr(rubric, "funcs") or hasattr(rubric, "reward_funcs"):
        return [rubric]
    if callable(rubric):
        return [SimpleNamespace(funcs=[rubric])]
    raise ValueError(f"verifiers: expected a rubric with funcs and weights, got {type(rubric).__name__}")


def _judges(rubric: Any) -> list[_Judge]:
    """The functions of a rubric; `reward_funcs` and `reward_weights` are the names up to verifiers 0.1.4."""
    functions = getattr(rubric, "funcs", None) or getattr(rubric, "reward_funcs", [])
    weights = getattr(rubric, "weights", None) or getattr(rubric, "reward_weights", None)
    objects = getattr(rubric, "class_objects", {})
    pairs = zip(functions, weights or [1.0] * len(functions), strict=True)
    return [_Judge(fn, float(weight), objects) for fn, weight in pairs]


def _rows(
    prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any], answer: str
) -> list[dict[str, Any]]:
    """What a function may name, for each response."""
    names = [name for name in columns if name not in GIVEN]
    answers = column_at(columns, answer, len(completions), default="")
    rows = []
    for i in range(len(completions)):
        row = {"task": "default", "info": {}} | {name: columns[name][i] for name in names}
        row["prompt"] = as_messages(prompts[i], "user")
        row["completion"] = as_messages(completions[i], "assistant")
        row["answer"] = answers[i]
        row["state"] = {**row, "turn": 1, "timing": {}}
        rows.append(row)
    return rows


def _groups(prompts: Sequence[Any]) -> list[list[int]]:
    """The places of the responses to one prompt, prompt by prompt."""
    runs = itertools.groupby(range(len(prompts)), key=lambda i: prompts[i])
    return [list(places) for _, places in runs]


async def _column(
    judge: _Judge, rows: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[int]]
) -> list[float | None]:
    """What a function says of every response; None where it raised."""
    if not judge.takes_group:
        return list(await asyncio.gather(*(_call(judge, row) for row in rows)))
    plural = [{f"{name}s": [rows[i][name] for i in group] for name in _FIELDS} for group in groups]
    found = await asyncio.gather(*(_call(judge, given) for given in plural))
    columns = [values or [None] * len(group) for values, group in zip(found, groups, strict=True)]
    return [x for values in columns for x in values]


async def _call(judge: _Judge, given: Mapping[str, Any]) -> Any:
    """What a function returns; None where it raised, with a warning that Python shows once."""
    try:
        value = judge.fn(**taken(judge.fn, {**given, **judge.objects}))
        if inspect.isawaitable(value):
            value = await value
        if isinstance(value, (list, tuple)):
            return [float(x) for x in value]
        return float(value)
    except Exception as error:  # so does verifiers: a response that breaks a function is a bad response
        warnings.warn(f"rubric: {judge.name} raised {error!r}; that scores 0", stacklevel=1)
        return None
