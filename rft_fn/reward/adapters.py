"""Reward functions of other libraries, given what they are given there, as reward functions of this one.

Each takes a function, as it is, and the column of the answer. The one that is made names in its attribute
`columns` what the rows must have.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rft_fn.data.column_path import column_at
from rft_fn.reward.convention import (
    GIVEN,
    RewardFn,
    as_messages,
    columns_of,
    parameters,
    taken,
    takes_all,
    text,
)
from rft_fn.reward.rubric import verifiers

__all__ = ["ADAPTERS", "lightrft", "messages", "openrlhf", "texts", "tinyzero", "verl"]


def _required(fn: Callable[..., Any], paths: Mapping[str, str]) -> tuple[str, ...]:
    """The columns behind the parameters that a function cannot do without."""
    return tuple(paths[p.name] for p in parameters(fn) if p.default is p.empty and p.name in paths)


def _read(
    fn: Callable[..., Any], paths: Mapping[str, str], columns: Mapping[str, Any], count: int
) -> dict[str, list[Any]]:
    """The arguments of a function that are columns: None where it can do without one that is not there."""
    needed = _required(fn, paths)
    found: dict[str, list[Any]] = {}
    for name, path in paths.items():
        found[name] = column_at(columns, path, count, default=None)
        if path in needed and None in found[name]:
            raise ValueError(_missing(path, name, columns))
    return found


def _call(fn: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Calls a function by name, or in order where it has names of its own for what it is given."""
    needed = {p.name for p in parameters(fn) if p.default is p.empty}
    if needed <= given.keys():
        return fn(**taken(fn, given))
    places = [p for p in parameters(fn) if p.kind is not p.KEYWORD_ONLY]
    return fn(*list(given.values())[: len(places)])


def _missing(path: str, name: str, columns: Mapping[str, Any]) -> str:
    known = ", ".join(c for c in columns if c not in GIVEN) or "none"
    return f"column {path!r}, the reward's {name}: not in every row of the dataset; its columns are: {known}"


# -------------------------------------------------------------------------------------- the form of the texts


def messages(fn: RewardFn) -> RewardFn:
    """`fn`, given prompts and completions as lists of messages, whatever the data has."""
    return _formed(fn, as_messages)


def texts(fn: RewardFn) -> RewardFn:
    """`fn`, given prompts and completions as texts, whatever the data has."""
    return _formed(fn, lambda x, role: text(x))


def _formed(fn: RewardFn, form: Callable[[Any, str], Any]) -> RewardFn:
    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **given: Any) -> Any:
        given["prompts"] = [form(x, "user") for x in prompts]
        given["completions"] = [form(x, "assistant") for x in completions]
        return fn(**taken(fn, given))

    reward.columns = columns_of(fn)
    return reward


# ------------------------------------------------------------------------------------------------------- verl


_TRUTH = "reward_model.ground_truth"


def verl(fn: Callable[..., Any], answer: str = _TRUTH) -> RewardFn:
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, called once a row.

    As the naive reward manager of verl 0.7 calls it: `data_source` and `extra_info` are columns of these
    names, `ground_truth` is `answer`; an `extra_info` that is not there is {}. One that takes `solution_strs`
    is called once a batch, with plural names, as the batch reward manager does. One that names neither, as
    some of verl's own, gets the response as its first argument. Async functions run together. Of a dict its
    "score" is read, of a tuple the first entry.
    """
    return _compute_score(fn, answer, _responses)


def tinyzero(fn: Callable[..., Any], answer: str = _TRUTH) -> RewardFn:
    """TinyZero's `compute_score(solution_str, ground_truth)`: verl's as it was, given the whole sequence.

    `solution_str` is prompt and response, with the special tokens of the chat template: these functions read
    what stands behind "Assistant:" or "<|im_start|>assistant", and give 0 where there is no such mark.
    """
    return _compute_score(fn, answer, _sequences)


def _compute_score(fn: Callable[..., Any], answer: str, solutions: Callable[..., list[str]]) -> RewardFn:
    """A compute_score of verl, given `solutions(prompts, completions, prompt_texts)`."""
    response = _name_of_response(fn)
    batched = response == "solution_strs"
    end = "s" * batched
    paths = {f"data_source{end}": "data_source", f"ground_truth{end}": answer}

    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        count = len(completions)
        given = _read(fn, paths, columns, count)
        infos = column_at(columns, "extra_info", count, default=None)
        given[f"extra_info{end}"] = [info or {} for info in infos]
        given[response] = solutions(prompts, completions, columns.get("prompt_texts"))
        if batched:
            return fn(**taken(fn, given))
        rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
        return _each([partial(fn, **taken(fn, row)) for row in rows])

    reward.columns = _required(fn, {**paths, f"extra_info{end}": "extra_info"})
    return reward


def _name_of_response(fn: Callable[..., Any]) -> str:
    """What a compute_score calls the response: the name of its first argument if it is none of verl's."""
    names = [p.name for p in parameters(fn)]
    for usual in ("solution_strs", "solution_str"):
        if usual in names:
            return usual
    if takes_all(fn) or not names:
        return "solution_str"
    return names[0]


def _responses(prompts: Sequence[Any], completions: Sequence[Any], prompt_texts: Any) -> list[str]:
    return [text(x) for x in completions]


def _sequences(prompts: Sequence[Any], completions: Sequence[Any], prompt_texts: Any) -> list[str]:
    """Prompt and response, as the model read them where the tokenizer is known."""
    asked = prompt_texts or [text(x) for x in prompts]
    return [p + text(c) for p, c in zip(asked, completions, strict=True)]


def _each(calls: Sequence[Callable[[], Any]]) -> list[Any] | Awaitable[list[Any]]:
    """The results of all calls; where they are awaitable, one awaitable for all."""
    results = [call() for call in calls]
    if any(inspect.isawaitable(x) for x in results):
        return _together(results)
    return [_first(x) for x in results]


async def _together(results: Sequence[Awaitable[Any]]) -> list[Any]:
    return [_first(x) for x in await asyncio.gather(*results)]


def _first(result: Any) -> Any:
    """The score of a tuple (score, further, ...), which verl's own door reads so; else the result."""
    if isinstance(result, tuple) and result:
        return result[0]
    return result


# ----------------------------------------------------------------------------------------- OpenRLHF, LightRFT


def openrlhf(fn: Callable[..., Any], answer: str = "label") -> RewardFn:
    """OpenRLHF's `reward_func(queries, prompts, labels)`, of its file for `--remote_rm_url` (0.8).

    `queries` are prompt and response, with the special tokens of the chat template where the tokenizer is
    known; `labels` is the column `answer`, OpenRLHF's `--label_key`. Returns rewards, or a dict with
    "rewards", "scores" and "extra_logs".
    """
    names = [p.name for p in parameters(fn)]
    unlabelled = len(names) < 3  # before 0.5.8: (queries, prompts)

    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        asked = columns.get("prompt_texts") or [text(x) for x in prompts]
        queries = _sequences(prompts, completions, asked)
        labels = column_at(columns, answer, len(completions), default=None)
        if not unlabelled and None in labels:
            raise ValueError(_missing(answer, "labels", columns))
        return _call(fn, {"queries": queries, "prompts": asked, "labels": labels})

    reward.columns = (answer,) * (not unlabelled)
    return reward


def lightrft(fn: Callable[..., Any], answer: str = "reference") -> RewardFn:
    """LightRFT's `reward_fn(model_reward_list, labels, queries, refs, label_map)` (0.1).

    `labels` is the column "label", which names the recipe of a row; `refs` is the column `answer`,
    LightRFT's `--reference_key`. There are no reward models: `label_map` is empty, `model_reward_list` one
    score of 0 a row, as without any these functions make their tensors on "cuda". `queries` are the responses
    alone: with the prompt in front, as LightRFT has them, a format that the prompt describes is met by every
    response. Returns rewards and a dict of metrics.
    """
    paths = {"labels": "label", "refs": answer}

    def reward(*, completions: Sequence[Any], **columns: Any) -> Any:
        read = _read(fn, paths, columns, len(completions))
        given = {"model_reward_list": [torch.zeros(len(completions))], "labels": read["labels"]}
        given |= {"queries": [text(x) for x in completions], "refs": read["refs"], "label_map": {}}
        return _call(fn, given)

    reward.columns = _required(fn, paths)
    return reward


ADAPTERS: dict[str, Callable[..., RewardFn]] = {
    "messages": messages,
    "text": texts,
    "verl": verl,
    "tinyzero": tinyzero,
    "openrlhf": openrlhf,
    "lightrft": lightrft,
    "verifiers": verifiers,
}
"""By the name that stands in front of a file or a module on the command line."""
