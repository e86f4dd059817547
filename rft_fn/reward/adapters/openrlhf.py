"""Reward functions of OpenRLHF, from its files for `--remote_rm_url`."""

from collections.abc import Sequence
from typing import Any

from rft_fn.data.rows import column_at
from rft_fn.reward.adapters.calling import ForeignFn, call, missing, whole_texts
from rft_fn.reward.convention import RewardFn, parameters, reads, text

__all__ = ["openrlhf"]


def openrlhf(fn: ForeignFn, answer: str = "label") -> RewardFn:
    """OpenRLHF's `reward_func(queries, prompts, labels)`, of its file for `--remote_rm_url` (0.8).

    `queries` are prompt and response, with the special tokens of the chat template where the tokenizer is
    known; `labels` is the column `answer`, OpenRLHF's `--label_key`. Returns rewards, or a dict with
    "rewards", "scores" and "extra_logs".
    """
    # before 0.5.8 the function was (queries, prompts), and the data needed no labels
    needed = (answer,)
    if len(parameters(fn)) < 3:
        needed = ()

    @reads(*needed)
    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        asked = columns.get("prompt_texts") or [text(x) for x in prompts]
        queries = whole_texts(prompts, completions, asked)
        labels = column_at(columns, answer, len(completions), default=None)
        if needed and None in labels:
            raise ValueError(missing(answer, "labels", columns))
        return call(fn, {"queries": queries, "prompts": asked, "labels": labels})

    return reward
