"""Rubrics of the library verifiers, which is not imported: a rubric's attributes are enough."""

import asyncio
import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rft_fn.data.row_paths import column_at
from rft_fn.reward.reward_record import Reward, as_reward, parameters, required, taken
from rft_fn.reward.signature import GIVEN, Columns, as_messages

__all__ = ["score_conversation", "verifiers"]


_FIELDS = ("prompt", "completion", "answer", "state", "task", "info")  # of a response; plural for a group


def verifiers(rubric: Any, answer: str = "answer") -> Reward:
    """Call a `Rubric` of verifiers (0.1): the weighted sum of its functions.

    Each function is a metric too. A function is called once per response with the arguments that it names, of
    `prompt` and `completion` (messages), `answer`, `state`, `task`, `info`, the columns, and the rubric's
    class objects (its parser). One that names `completions` is called once for the responses to a prompt,
    with plural names. Async functions run together. One that raises scores 0, as in verifiers: the metric
    `failed` counts these, and the first is a warning. A group of rubrics is their sum; an environment is its
    rubric, a function a rubric of one.
    """
    functions = _functions(getattr(rubric, "rubric", rubric))
    needed = (answer,) if any(function.reads_answer for function in functions) else ()

    async def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> dict[str, Any]:
        rows = _rows(prompts, completions, columns, answer)
        groups = _groups(prompts)
        every = await asyncio.gather(*(_scores(function, rows, groups) for function in functions))

        # the weighted sum, to which a failure adds nothing
        total = [0.0] * len(rows)
        failed = [0.0] * len(rows)
        logs: dict[str, Any] = {}
        for function, scores in zip(functions, every, strict=True):
            logs[function.name] = scores
            for i, score in enumerate(scores):
                if score is None:
                    failed[i] += 1
                else:
                    total[i] += function.weight * score
        return {"rewards": total, **logs, "failed": failed}

    return replace(as_reward(reward), columns=needed)


async def score_conversation(rubric: Any, state: Mapping[str, Any]) -> float:
    """Return the weighted sum of a rubric's functions for one conversation of several turns.

    `state` is verifiers' own, with prompt, completion, answer, task and info. A function that raises adds
    nothing. ValueError for a function of a whole group.
    """
    row = {**state.get("input", {}), **state, "state": state}
    total = 0.0
    for function in _functions(rubric):
        if function.takes_group:
            raise ValueError(f"rubric: expected no function of a whole group, got {function.name}")
        total += function.weight * (await _call(function, row) or 0.0)
    return total


class _Function(NamedTuple):
    """A function of a rubric."""

    fn: Callable[..., Any]
    weight: float
    objects: Mapping[str, Any]  # of the rubric, by the names that functions give them

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def reads_answer(self) -> bool:
        return not {"answer", "answers"}.isdisjoint(required(self.fn))

    @property
    def takes_group(self) -> bool:
        plural = {f"{name}s" for name in _FIELDS}
        return any(p.name in plural for p in parameters(self.fn))


def _functions(rubric: Any) -> list[_Function]:
    """Return the functions of a rubric, a group of rubrics, or a function. ValueError for anything else."""
    if hasattr(rubric, "rubrics"):
        return [function for part in rubric.rubrics for function in _functions(part)]
    if not hasattr(rubric, "funcs") and not hasattr(rubric, "reward_funcs"):
        if callable(rubric):
            return [_Function(rubric, 1.0, {})]
        raise ValueError(f"verifiers: expected a rubric with funcs and weights, got {type(rubric).__name__}")

    # the second names are those up to verifiers 0.1.4
    functions = getattr(rubric, "funcs", None) or getattr(rubric, "reward_funcs", [])
    weights = getattr(rubric, "weights", None) or getattr(rubric, "reward_weights", None)
    objects = getattr(rubric, "class_objects", {})
    pairs = zip(functions, weights or [1.0] * len(functions), strict=True)
    return [_Function(fn, float(weight), objects) for fn, weight in pairs]


def _rows(
    prompts: Sequence[Any], completions: Sequence[Any], columns: Columns, answer: str
) -> list[dict[str, Any]]:
    """Return the arguments that a function may name, one dict per response."""
    names = [name for name in columns if name not in GIVEN]
    answers = column_at(columns, answer, len(completions), default="")
    rows = []
    for i in range(len(completions)):
        row: dict[str, Any] = {"task": "default", "info": {}, **{name: columns[name][i] for name in names}}
        row["prompt"] = as_messages(prompts[i], "user")
        row["completion"] = as_messages(completions[i], "assistant")
        row["answer"] = answers[i]
        row["state"] = {**row, "turn": 1, "timing": {}}
        rows.append(row)
    return rows


def _groups(prompts: Sequence[Any]) -> list[list[int]]:
    """Return the places of the responses to one prompt, prompt by prompt."""
    runs = itertools.groupby(range(len(prompts)), key=lambda i: prompts[i])
    return [list(places) for _, places in runs]


async def _scores(
    function: _Function, rows: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[int]]
) -> list[float | None]:
    """Return the score of every response by one function; None where it raised."""
    if not function.takes_group:
        return list(await asyncio.gather(*(_call(function, row) for row in rows)))

    # a group's arguments have plural names and one value per response of the group
    calls = []
    for group in groups:
        calls.append(_call(function, {f"{name}s": [rows[i][name] for i in group] for name in _FIELDS}))
    scores: list[float | None] = []
    for values, group in zip(await asyncio.gather(*calls), groups, strict=True):
        scores += values or [None] * len(group)
    return scores


async def _call(function: _Function, given: Mapping[str, Any]) -> Any:
    """Return the result of a function, or None and a warning where it raises; Python shows it once."""
    try:
        value = function.fn(**taken(function.fn, {**given, **function.objects}))
        if inspect.isawaitable(value):
            value = await value
        return [float(x) for x in value] if isinstance(value, (list, tuple)) else float(value)
    except Exception as error:  # so does verifiers: a response that breaks a function is a bad response
        warnings.warn(f"rubric: {function.name} raised {error!r}; that scores 0", stacklevel=1)
        return None
