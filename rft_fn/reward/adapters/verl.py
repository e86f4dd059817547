"""`compute_score` functions of verl and of TinyZero."""

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from rft_fn.data.rows import column_at
from rft_fn.reward.adapters.calling import ForeignFn, read_columns, required_columns, whole_texts
from rft_fn.reward.convention import RewardFn, parameters, reads, taken, takes_all, text

__all__ = ["tinyzero", "verl"]

_TRUTH = "reward_model.ground_truth"


def verl(fn: ForeignFn, answer: str = _TRUTH) -> RewardFn:
    """verl's compute_score, called once per row.

    That is `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, called as the naive
    reward manager of verl 0.7 does: `data_source` and `extra_info` are columns of these names, `ground_truth`
    is `answer`; an `extra_info` that is missing is {}. One that takes `solution_strs` is called once per
    batch, with plural names, as the batch reward manager does. One that names neither, as some of verl's own,
    gets the response as its first argument. Async functions run together. Of a dict its "score" is read, of a
    tuple the first entry.
    """
    return _compute_score(fn, answer, _responses)


def tinyzero(fn: ForeignFn, answer: str = _TRUTH) -> RewardFn:
    """TinyZero's `compute_score(solution_str, ground_truth)`: an early verl's, given the whole sequence.

    `solution_str` is prompt and response, with the special tokens of the chat template: these functions read
    the text behind "Assistant:" or "<|im_start|>assistant", and give 0 where there is no such mark.
    """
    return _compute_score(fn, answer, whole_texts)


class _Solutions(Protocol):
    """Makes the texts to score."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], prompt_texts: Any, /) -> list[str]:
        """One text per completion."""
        ...


def _responses(prompts: Sequence[Any], completions: Sequence[Any], prompt_texts: Any) -> list[str]:
    return [text(x) for x in completions]


def _compute_score(fn: ForeignFn, answer: str, solutions: _Solutions) -> RewardFn:
    """The reward function of a compute_score that reads `solutions`."""
    # the batched form has plural names
    response = _name_of_response(fn)
    batched = response == "solution_strs"
    end = ""
    if batched:
        end = "s"
    paths = {f"data_source{end}": "data_source", f"ground_truth{end}": answer}
    extra = f"extra_info{end}"

    @reads(*required_columns(fn, {**paths, extra: "extra_info"}))
    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        count = len(completions)
        given = read_columns(fn, paths, columns, count)
        infos = column_at(columns, "extra_info", count, default=None)
        given[extra] = [info or {} for info in infos]
        given[response] = solutions(prompts, completions, columns.get("prompt_texts"))
        if batched:
            return fn(**taken(fn, given))

        # one call per row, those of an async function together
        results = []
        for i in range(count):
            row = {name: values[i] for name, values in given.items()}
            results.append(fn(**taken(fn, row)))
        if any(inspect.isawaitable(x) for x in results):
            return _gather(results)
        return [_score(x) for x in results]

    return reward


def _name_of_response(fn: ForeignFn) -> str:
    """The parameter of a compute_score that takes the response.

    It is the first one if it has none of verl's names.
    """
    names = [p.name for p in parameters(fn)]
    for usual in ("solution_strs", "solution_str"):
        if usual in names:
            return usual
    if takes_all(fn) or not names:
        return "solution_str"
    return names[0]


async def _gather(results: Sequence[Awaitable[Any]]) -> list[Any]:
    return [_score(x) for x in await asyncio.gather(*results)]


def _score(result: Any) -> Any:
    """The first entry of a tuple (score, ...), else the result.

    verl itself reads results so.
    """
    if isinstance(result, tuple) and result:
        return result[0]
    return result
