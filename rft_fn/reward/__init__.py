"""Rewards: functions from a response to a number, in TRL's calling convention.

    def reward(prompts, completions, **columns) -> list[float]

Lists with one value per completion. Prompts and completions are texts, or lists of messages where the data
has messages; `signature` has the other arguments that a function may name, `results` the values that it may
return, `reward_record` what becomes of it before the first batch, `verifiable` the built-in ones,
`unit_tests` the one that runs code, `generative_model` judges, `foreign` the adapters of other libraries'
functions, `combine` their weighted sum and `scoring` the way from a rollout to rewards.
`completions` are the *response only*: a reward that scores prompt and response together can be satisfied by
the instructions in the prompt, and is then a constant.
"""

from rft_fn.reward.combine import Weighted, columns, label_values, weighted
from rft_fn.reward.from_spec import by_column, load, parse
from rft_fn.reward.generative_model import generative, generative_by_name
from rft_fn.reward.preflight import check
from rft_fn.reward.remote import served_at
from rft_fn.reward.reward_record import Reward, as_reward
from rft_fn.reward.rubric_judge import by_criterion
from rft_fn.reward.scalar_model import Reading, ScalarReward, scalar
from rft_fn.reward.scales import normalized
from rft_fn.reward.scoring import concat, judge, judge_rows, means, responses, select
from rft_fn.reward.signature import (
    JointReward,
    Judged,
    RewardFn,
    Score,
    Scored,
    TrainerState,
    stateless,
    text,
    trainer_state,
)
from rft_fn.reward.unit_tests import code
from rft_fn.reward.verifiable import (
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
from rft_fn.reward.veto import Veto

__all__ = [
    "Judged", "Reading", "Reward", "RewardFn", "Veto", "boxed_format", "by_column", "by_criterion",
    "check", "code", "columns", "concat", "exact", "extract_boxed", "extract_number", "extract_tag",
    "generative", "generative_by_name", "judge", "judge_rows", "label_values", "load",
    "math", "means", "normalized", "numeric", "parse", "pattern_format",
    "responses", "scalar", "served_at", "stateless", "tag_format", "task", "text",
    "trainer_state", "weighted",
]  # fmt: skip
