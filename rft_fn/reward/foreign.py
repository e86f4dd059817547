"""Adapters that call reward functions of other libraries as they do.

Each adapter takes a function, unchanged, and the column of the answer. The `Reward` that it makes names the
columns that the rows must have. A new library is an adapter here and a
row of `CONVENTIONS`.
"""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from rft_fn.data.row_paths import column_at
from rft_fn.reward.reward_record import (
    Reward,
    as_reward,
    column_names,
    parameters,
    required,
    taken,
    takes_all,
)
from rft_fn.reward.rubrics import verifiers
from rft_fn.reward.signature import GIVEN, Columns, Messages, RewardFn, as_messages, text

__all__ = [
    "CONVENTIONS", "OURS", "Convention", "ForeignFn", "areal", "call", "easyr1", "lightrft", "messages",
    "missing", "nemo_rl", "openrlhf", "read_columns", "required_columns", "slime", "texts", "tinyzero",
    "verl", "whole_texts",
]  # fmt: skip

ForeignFn = Callable[..., Any]
"""A reward function in the convention of another library, for one completion or for all."""


def required_columns(fn: ForeignFn, paths: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns of the parameters (parameter -> column) that a function cannot do without."""
    return tuple(paths[name] for name in required(fn) if name in paths)


def read_columns(
    fn: ForeignFn, paths: Mapping[str, str], columns: Columns, count: int
) -> dict[str, list[Any]]:
    """Return the arguments of a function that are columns, `count` values each.

    `paths` is parameter -> column. A column that is missing is None where the function has a default for it,
    else ValueError.
    """
    needed = required_columns(fn, paths)
    arguments: dict[str, list[Any]] = {}
    for name, path in paths.items():
        arguments[name] = column_at(columns, path, count, default=None)
        if path in needed and None in arguments[name]:
            raise ValueError(missing(path, name, columns))
    return arguments


def call(fn: ForeignFn, given: Mapping[str, Any]) -> Any:
    """Call a function by name, or in order where its names are others.

    ValueError where a name that it shares has another place, or where it needs more than there is.
    """
    if set(required(fn)) <= given.keys():
        return fn(**taken(fn, given))
    places = [p.name for p in parameters(fn) if p.kind is not p.KEYWORD_ONLY]
    shared = [name == known or name not in given for name, known in zip(places, given)]
    if not all(shared) or len(required(fn)) > len(given):
        raise ValueError(
            f"expected a reward of ({', '.join(given)}), by these names or in this order, got one of "
            f"({', '.join(places)})"
        )
    return fn(*list(given.values())[: len(places)])


def missing(path: str, name: str, columns: Columns) -> str:
    """Return the error for a column that a function cannot do without."""
    return (
        f"column {path!r}, the reward's {name}: not in every row of the dataset; "
        f"its columns are: {column_names(columns)}"
    )


def whole_texts(prompts: Sequence[Any], completions: Sequence[Any], prompt_texts: Any) -> list[str]:
    """Return prompt and response as one text each; the prompt as the model read it, if that is known."""
    asked = prompt_texts or [text(x) for x in prompts]
    return [p + text(c) for p, c in zip(asked, completions, strict=True)]


def messages(fn: RewardFn | Reward) -> Reward:
    """Give `fn` prompts and completions as lists of messages, whatever the data has."""
    return _formed(as_reward(fn), as_messages)


def texts(fn: RewardFn | Reward) -> Reward:
    """Give `fn` prompts and completions as texts, whatever the data has."""
    return _formed(as_reward(fn), lambda x, role: text(x))


def _formed(inner: Reward, form: Callable[[str | Messages, str], Any]) -> Reward:
    """Give a reward form(x, role) of each prompt and completion."""

    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **given: Any) -> Any:
        given["prompts"] = [form(x, "user") for x in prompts]
        given["completions"] = [form(x, "assistant") for x in completions]
        return inner.fn(**inner.arguments(given))

    return replace(inner, fn=reward, takes=None)


def openrlhf(fn: ForeignFn, answer: str = "label") -> Reward:
    """Call OpenRLHF's `reward_func(queries, prompts, labels)`, of its file for `--remote_rm_url` (0.8).

    `queries` are prompt and response, with the special tokens of the chat template where the tokenizer is
    known; `labels` is the column `answer`, OpenRLHF's `--label_key`. Returns rewards, or a dict with
    "rewards", "scores" and "extra_logs".
    """
    # before 0.5.8 the function was (queries, prompts), and the data needed no labels
    needed = () if len(parameters(fn)) < 3 else (answer,)

    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        asked = columns.get("prompt_texts") or [text(x) for x in prompts]
        queries = whole_texts(prompts, completions, asked)
        labels = column_at(columns, answer, len(completions), default=None)
        if needed and None in labels:
            raise ValueError(missing(answer, "labels", columns))
        return call(fn, {"queries": queries, "prompts": asked, "labels": labels})

    return replace(as_reward(reward), columns=needed)


_REFERENCE = "reference"
_OF_RECIPES = {"model_reward_list", "labels", "queries", "refs", "label_map"}


def lightrft(fn: ForeignFn, answer: str = _REFERENCE) -> Reward:
    """Call LightRFT's reward_fn(model_reward_list, labels, queries, refs, label_map), or reward_func.

    As of LightRFT 0.1. `labels` is the column "label", which names the recipe of a row; `refs` is the column
    `answer`, LightRFT's `--reference_key`. There are no reward models: `label_map` is empty,
    `model_reward_list` one score of 0 per row, as without any these functions make their tensors on "cuda".
    `queries` are only the responses: with the prompt first, as LightRFT has them, every response meets a
    format that the prompt describes. Returns rewards and a dict of metrics.

    `reward_func(queries, prompts, labels)`, of its file for `--remote_rm_url`, is called as OpenRLHF's: its
    `labels` are the column "label" unless `answer` names another; `references` in their place are `answer`.
    """
    if _is_reward_func(fn):
        of_references = [p.name for p in parameters(fn)][2:3] in (["references"], ["refs"])
        return openrlhf(fn, answer if of_references or answer != _REFERENCE else "label")
    paths = {"labels": "label", "refs": answer}

    def reward(*, completions: Sequence[Any], **columns: Any) -> Any:
        read = read_columns(fn, paths, columns, len(completions))
        given = {
            "model_reward_list": [torch.zeros(len(completions))],
            "labels": read["labels"],
            "queries": [text(x) for x in completions],
            "refs": read["refs"],
            "label_map": {},
        }
        return call(fn, given)

    return replace(as_reward(reward), columns=required_columns(fn, paths))


def _is_reward_func(fn: ForeignFn) -> bool:
    """Return whether a function is of (queries, prompts, labels), by its names, else their number."""
    names = {p.name for p in parameters(fn)}
    return "prompts" in names or (len(names) <= 3 and not names <= _OF_RECIPES)


_TRUTH = "reward_model.ground_truth"


def verl(fn: ForeignFn, answer: str = _TRUTH) -> Reward:
    """Call verl's compute_score, once per row.

    That is `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, called as the naive
    reward manager of verl 0.7 does: `data_source` and `extra_info` are columns of these names, `ground_truth`
    is `answer`; an `extra_info` that is missing is {}. One that takes `solution_strs` is called once per
    batch, with plural names, as the batch reward manager does. One that names neither, as some of verl's,
    gets the response as its first argument. Async functions run together. Of a dict its "score" is read, of a
    tuple the first entry.
    """
    return _compute_score(
        fn, answer, lambda prompts, completions, prompt_texts: [text(x) for x in completions]
    )


def tinyzero(fn: ForeignFn, answer: str = _TRUTH) -> Reward:
    """Call TinyZero's compute_score(solution_str, ground_truth): verl's, given the whole sequence.

    `solution_str` is prompt and response, with the special tokens of the chat template: these functions read
    the text after "Assistant:" or "<|im_start|>assistant", and give 0 where there is no such mark.
    """
    return _compute_score(fn, answer, whole_texts)


def _compute_score(fn: ForeignFn, answer: str, solutions: Callable[[Any, Any, Any], list[str]]) -> Reward:
    """Call a compute_score with solutions(prompts, completions, prompt_texts), one text per completion."""
    # the batched form has plural names
    response = _name_of_response(fn)
    batched = response == "solution_strs"
    end = "s" if batched else ""
    paths = {f"data_source{end}": "data_source", f"ground_truth{end}": answer}
    extra = f"extra_info{end}"

    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        count = len(completions)
        given = read_columns(fn, paths, columns, count)
        infos = column_at(columns, "extra_info", count, default=None)
        given[extra] = [info or {} for info in infos]
        given[response] = solutions(prompts, completions, columns.get("prompt_texts"))
        if batched:
            return fn(**taken(fn, given))

        # one call per row, those of an async function together
        rows = [{name: values[i] for name, values in given.items()} for i in range(count)]
        results = [fn(**taken(fn, row)) for row in rows]
        if any(inspect.isawaitable(x) for x in results):
            return _gather(results)
        return [_score(x) for x in results]

    return replace(as_reward(reward), columns=required_columns(fn, {**paths, extra: "extra_info"}))


def _name_of_response(fn: ForeignFn) -> str:
    """Return the parameter of a compute_score that takes the response: by verl's names, else the first."""
    names = [p.name for p in parameters(fn)]
    for usual in ("solution_strs", "solution_str"):
        if usual in names:
            return usual
    return "solution_str" if takes_all(fn) or not names else names[0]


async def _gather(results: Sequence[Awaitable[Any]]) -> list[Any]:
    return [_score(x) for x in await asyncio.gather(*results)]


def _score(result: Any) -> Any:
    """Return the first entry of a tuple (score, ...), else the result, as verl does."""
    return result[0] if isinstance(result, tuple) and result else result


def areal(fn: ForeignFn, answer: str = "answer") -> Reward:
    """Call AReaL's `reward_fn(prompt, completions, prompt_ids, completion_ids, **data)`, once per row.

    As of AReaL 1.0, which gives the first four by their places, whatever their names are: the prompt as the
    model read it, the response, and their tokens. The columns of the data come by their names; `answer` is
    the column for a parameter `answer`. Async functions run together. AReaL's response also has its end
    token as text, and an error there is a reward of 0; here it stops the run.
    """
    places = [p for p in parameters(fn) if p.kind is not p.KEYWORD_ONLY]
    own = [p.name for p in places[:4] if p.default is p.empty]
    if len(own) < 4:
        raise ValueError(
            "expected a reward of (prompt, completions, prompt_ids, completion_ids, ...), in this order, got "
            f"one of ({', '.join(p.name for p in parameters(fn))})"
        )
    paths = {name: answer if name == "answer" else name for name in required(fn) if name not in own}

    def score(row: Mapping[str, Any]) -> Any:
        further = {name: x for name, x in taken(fn, row["row"]).items() if name not in own}
        return fn(*row["own"], **further)

    def given(prompt: str, response: str, ids: Sequence[Any], row: Mapping[str, Any]) -> dict[str, Any]:
        return {"own": (prompt, response, *ids[:2]), "row": row}

    return _each_row(score, paths, given, one=True)


def nemo_rl(fn: ForeignFn, answer: str = "ground_truth") -> Reward:
    """Call NeMo-RL's `reward(ground_truth, response)`, of its environments, once per row.

    As of NeMo-RL 0.4: both are texts, a number of the data too, and the result is (score, whether it is
    right), of which the score is read. An error there is a reward of 0; here it stops the run.
    """
    paths = {"ground_truth": answer}

    def given(prompt: str, response: str, ids: Sequence[Any], row: Mapping[str, Any]) -> dict[str, Any]:
        truth = row["ground_truth"]
        return {"ground_truth": str(truth) if isinstance(truth, int | float) else truth, "response": response}

    return _each_row(fn, paths, given)


def easyr1(fn: ForeignFn, answer: str = "answer") -> Reward:
    """Call EasyR1's compute_score(reward_inputs), on a list of dicts, or (reward_input), once per row.

    As of EasyR1 0.3: they have `response`, `response_length` and `ground_truth`, the column `answer`.
    """
    together = "reward_inputs" in [p.name for p in parameters(fn)]

    def given(prompt: str, response: str, ids: Sequence[Any], row: Mapping[str, Any]) -> dict[str, Any]:
        length = len(ids[1] or ())
        return {"response": response, "response_length": length, "ground_truth": row["ground_truth"]}

    return _each_row(fn, {"ground_truth": answer}, given, one=not together, together=together)


class _Sample(SimpleNamespace):
    """What a reward of slime reads of one response; further attributes are slime's defaults."""

    prompt: str
    response: str
    label: Any
    metadata: Mapping[str, Any]  # the columns of the row, and the entries of its column "metadata"
    tokens: Sequence[int]
    response_length: int
    reward = loss_mask = rollout_log_probs = multimodal_inputs = train_metadata = custom_rm_path = None
    remove_sample = False


def slime(fn: ForeignFn, answer: str = "label") -> Reward:
    """Call slime's `custom_rm(args, sample)`, or (response, label) as its own rewards, once per row.

    As of slime 0.2, async or not; one of (args, samples) is called once for the batch. A sample has `prompt`,
    `response`, `label` (the column `answer`), `tokens`, `response_length` and `metadata`: the columns of the
    row, with the entries of a column `metadata` in their place. It is slime's own Sample where the file with
    the function imports that, with a status. `args` is empty. Of a dict its "score" is read.
    """
    names = [p.name for p in parameters(fn)]
    paths = {"label": answer}
    own = getattr(sys.modules.get("slime.utils.types"), "Sample", None)

    def sample(prompt: str, response: str, ids: Sequence[Any], row: Mapping[str, Any]) -> Any:
        inner = row.get("metadata")
        made = (own or _Sample)(
            prompt=prompt, response=response, label=row["label"], tokens=[*(ids[0] or ()), *(ids[1] or ())],
            response_length=len(ids[1] or ()), metadata={**row, **(inner if isinstance(inner, dict) else {})},
        )  # fmt: skip
        if own is not None:
            made.status = own.Status.TRUNCATED if ids[2] else own.Status.COMPLETED
        return made

    def of_texts(prompt: str, response: str, ids: Sequence[Any], row: Mapping[str, Any]) -> dict[str, Any]:
        found = {"response": response, "label": row["label"]}
        return {**found, "metadata": row} if "metadata" in names else found

    if "samples" in names:
        return _each_row(lambda samples: fn(SimpleNamespace(), samples), paths, sample, together=True)
    if "sample" in names or names[:1] == ["args"]:
        return _each_row(lambda sample: fn(SimpleNamespace(), sample), paths, sample, one=True)
    return _each_row(fn, paths, of_texts)


def _each_row(
    fn: ForeignFn,
    paths: Mapping[str, str],
    given: Callable[..., Any],
    *,
    one: bool = False,
    together: bool = False,
) -> Reward:
    """Call fn(**given(prompt, response, ids, row)) for each row of a batch.

    `ids` are the tokens of the prompt, those of the response, and whether it was cut; None if not known.

    `paths` is parameter -> column. With `one` what `given` returns is the only argument, with `together` the
    argument is the list of all.
    """

    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        count = len(completions)
        read = {name: column_at(columns, path, count, default=None) for name, path in paths.items()}
        for name, values in read.items():
            if None in values:
                raise ValueError(missing(paths[name], name, columns))
        asked = columns.get("prompt_texts") or [text(x) for x in prompts]
        names = ("prompt_ids", "completion_ids", "truncated")
        ids = list(zip(*(columns.get(name) or [None] * count for name in names), strict=True))
        known = {name: values for name, values in columns.items() if name not in GIVEN} | read
        rows = [
            given(asked[i], text(completions[i]), ids[i], {k: v[i] for k, v in known.items()})
            for i in range(count)
        ]
        if together:
            return fn(rows)
        results = [fn(row) if one else call(fn, row) for row in rows]
        if any(inspect.isawaitable(x) for x in results):
            return _gather(results)
        return [_score(x) for x in results]

    return replace(as_reward(reward), columns=tuple(paths.values()))


class Convention(NamedTuple):
    """How the reward functions of a library are called, and known."""

    adapt: Callable[
        ..., Reward
    ]  # of fn, and the column of the answer or a path into one, if it has an answer
    marks: tuple[str, ...] = ()  # parameters that its functions alone have, each one or several
    further: str = ""  # where its config has arguments of the function itself; "": arguments make the reward
    has_answer: bool = True  # functions are given it; False: they name the columns that they read
    takes_objects: bool = False  # its rewards need not be functions


OURS = Convention(as_reward, has_answer=False)
"""The convention of TRL, which is this library's."""

CONVENTIONS: dict[str, Convention] = {
    "messages": Convention(messages, has_answer=False),
    "text": Convention(texts, has_answer=False),
    "lightrft": Convention(lightrft, marks=("model_reward_list",)),
    "openrlhf": Convention(openrlhf, marks=("queries",)),
    "verl": Convention(verl, marks=("solution_str", "solution_strs"), further="verl's reward_kwargs"),
    "tinyzero": Convention(tinyzero, further="verl's reward_kwargs"),
    "easyr1": Convention(
        easyr1, marks=("reward_inputs", "reward_input"), further="EasyR1's reward_function_kwargs"
    ),
    "verifiers": Convention(verifiers, marks=("completion",), takes_objects=True),
    "slime": Convention(slime, marks=("args sample", "args samples", "response label")),
    "nemo_rl": Convention(
        nemo_rl, marks=("ground_truth response",), further="the kwargs of NeMo-RL's reward_functions"
    ),
    "areal": Convention(areal, marks=("prompt completions completion_ids",)),
}
"""By the name that comes before a file or a module on the command line; the first that is marked is meant."""
