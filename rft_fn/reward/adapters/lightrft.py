"""Reward functions of LightRFT."""

from collections.abc import Sequence
from typing import Any

import torch

from rft_fn.reward.adapters.calling import ForeignFn, call, read_columns, required_columns
from rft_fn.reward.adapters.openrlhf import openrlhf
from rft_fn.reward.convention import RewardFn, parameters, reads, text

__all__ = ["lightrft"]

_REFERENCE = "reference"
_OF_RECIPES = {"model_reward_list", "labels", "queries", "refs", "label_map"}


def lightrft(fn: ForeignFn, answer: str = _REFERENCE) -> RewardFn:
    """LightRFT's `reward_fn(model_reward_list, labels, queries, refs, label_map)` or `reward_func` (0.1).

    `labels` is the column "label", which names the recipe of a row; `refs` is the column `answer`,
    LightRFT's `--reference_key`. There are no reward models: `label_map` is empty, `model_reward_list` one
    score of 0 per row, as without any these functions make their tensors on "cuda". `queries` are the
    responses alone: with the prompt in front, as LightRFT has them, a format that the prompt describes is met
    by every response. Returns rewards and a dict of metrics.

    `reward_func(queries, prompts, labels)`, of its file for `--remote_rm_url`, is called as OpenRLHF's: its
    `labels` are the column "label" unless `answer` names another; `references` in their place are `answer`.
    """
    if _is_reward_func(fn):
        of_references = [p.name for p in parameters(fn)][2:3] in (["references"], ["refs"])
        return openrlhf(fn, answer if of_references or answer != _REFERENCE else "label")
    paths = {"labels": "label", "refs": answer}

    @reads(*required_columns(fn, paths))
    def reward(*, completions: Sequence[Any], **columns: Any) -> Any:
        found = read_columns(fn, paths, columns, len(completions))
        given = {
            "model_reward_list": [torch.zeros(len(completions))],
            "labels": found["labels"],
            "queries": [text(x) for x in completions],
            "refs": found["refs"],
            "label_map": {},
        }
        return call(fn, given)

    return reward


def _is_reward_func(fn: ForeignFn) -> bool:
    """Whether a function is of (queries, prompts, labels), told by its names, else by their number."""
    names = {p.name for p in parameters(fn)}
    return "prompts" in names or (len(names) <= 3 and not names <= _OF_RECIPES)
