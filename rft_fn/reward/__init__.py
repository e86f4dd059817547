"""Rewards: functions from the text of a response to a number, in TRL's calling convention.

    def reward(prompts: list[str], completions: list[str], **columns: list) -> list[float]

`completions` are the text of the *response only*. A reward that scores prompt and response together can be
satisfied by the instructions in the prompt, and is then a constant.
"""

from rft_fn.reward.combine import Score, Scored, Weighted, check, columns, load, parse, weighted
from rft_fn.reward.rollout import Judged, judge, means, responses
from rft_fn.reward.verifiable import (
    RewardFn,
    boxed_format,
    exact,
    extract_boxed,
    extract_number,
    extract_tag,
    math,
    numeric,
    pattern_format,
    tag_format,
    task,
)

__all__ = [
    "Judged",
    "RewardFn",
    "Score",
    "Scored",
    "Weighted",
    "boxed_format",
    "check",
    "columns",
    "exact",
    "extract_boxed",
    "extract_number",
    "extract_tag",
    "judge",
    "load",
    "math",
    "means",
    "numeric",
    "parse",
    "pattern_format",
    "responses",
    "tag_format",
    "task",
    "weighted",
]
