"""A task that a policy learns from rewards: its prompts, and the judging of responses to them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rft_fn import collect, data, model, reward, reward_shaping
from rft_fn import engine as engine_lib
from rft_fn.engine import EngineDead
from rft_fn.run import options
from rft_fn.run.folder import Run
from rft_fn.run.rewards import load_rewards
from rft_fn.run.setup import load_data, load_processing, plan_steps, with_processor
from rft_fn.types import Engine, Rollout, Sampling, Strategy

__all__ = [
    "Task", "check_engine_media", "check_rewards", "evaluate", "judge", "load_task", "normalized_reward",
    "plan_rollouts", "rewards_of", "shaped_reward",
]  # fmt: skip

_LOOKED_AT = 16  # prompts, for whether the data has media

OptionsT = TypeVar("OptionsT", bound=options.Reinforcement)


class Task(NamedTuple):
    """Prompts, and how responses to them are rewarded."""

    tokenizer: Any
    dataset: data.Dataset  # the prompts to train on
    unseen: data.Dataset  # the prompts to evaluate on
    score: reward.Weighted
    processing: data.Processing | None = None  # of media, where the model takes any

    @property
    def saved(self) -> Any:
        """The part of the model's folder beside its weights."""
        return with_processor(self.tokenizer, self.processing)


def rewards_of(cfg: options.Reward, sources: Sequence[str]) -> tuple[str, ...]:
    """The rewards of the options; by default that of the only task among the sources, or of sort_digits."""
    if cfg.reward:
        return cfg.reward
    names = {source.partition(":")[0].partition("=")[0] for source in sources}
    known = names & set(data.TASKS)
    if len(known) == 1:
        return (f"task:{known.pop()}",)
    return ("task:sort_digits",)


def load_task(cfg: options.Reinforcement, st: Strategy) -> Task:
    """Load the task that the options name, the same on every rank. ValueError for an invalid one."""
    tokenizer = model.load_tokenizer(cfg.model)
    processing = load_processing(cfg, cfg.model)
    score = load_rewards(rewards_of(cfg, cfg.data), cfg, st)
    needed = {"columns": reward.columns(score), "values": reward.label_values(score)}
    needed |= {"max_prompt": cfg.max_prompt}
    needed |= {"window": model.read_window(cfg.model), "max_new": cfg.max_new}
    dataset, unseen = load_data(cfg, st, tokenizer, processing, **needed)
    if processing is not None:
        check_engine_media(st, cfg.model, dataset)
    return Task(tokenizer, dataset, unseen, score, processing)


def check_engine_media(st: Strategy, model_name: str, dataset: data.Dataset) -> None:
    """ValueError where the engine cannot take media, and the first prompts have some. Loads no weights."""
    prompts: list[Any]
    prompts, _ = data.take(dataset, _LOOKED_AT, st.config.seed)
    if any(prompt.media_names for prompt in prompts):
        engine_lib.check_media(engine_lib.config_of(st.config), model_name)


def plan_rollouts(cfg: OptionsT, st: Strategy, task: Task, *, usual: int) -> OptionsT:
    """Decide the number of steps, each of which draws `prompts` prompts; see `plan_steps`."""
    given: dict[str, Any] = {"batch": cfg.prompts, "usual": usual, "passes": "data_epochs"}
    return plan_steps(cfg, st, task.dataset, task.unseen, **given)


def check_rewards(cfg: options.Reward, st: Strategy, task: Task) -> None:
    """Try the rewards on two prompts. ValueError for rewards that cannot judge them."""
    prompts: list[Any]
    prompts, _ = data.take(task.dataset, 2, st.config.seed)
    collect.check_reward(st, task.score, prompts, tokenizer=task.tokenizer, timeout=cfg.reward_timeout)


def judge(
    cfg: options.Reinforcement,
    st: Strategy,
    task: Task,
    rollout: Rollout,
    prompts: list[data.Prompt],
    *,
    step: int,
) -> reward.Judged:
    """The rewards of responses, the same on every rank.

    A reward function is told that `step` of the config's steps are done.
    """
    now = reward.trainer_state(step, cfg.steps or 0, prompts=cfg.prompts, size=task.dataset.size)
    how = {"timeout": cfg.reward_timeout, "state": now, "seed": st.config.seed}
    return collect.gather_and_judge(st, task.score, rollout, prompts, task.tokenizer, **how)


def normalized_reward(
    cfg: options.Shaping, task: Task, judged: reward.Judged, prompts: Sequence[data.Prompt]
) -> Tensor:
    """The rewards [N, G] to learn from, their parts normalised where the options ask for it."""
    if not cfg.reward_norm:
        return judged.reward
    return reward.normalized(task.score, judged, prompts, over=cfg.reward_norm)


def shaped_reward(cfg: options.Reinforcement, reward: Tensor, rollout: Rollout) -> Tensor:
    """The rewards [N, G] clipped, less the penalty of long responses."""
    if cfg.reward_clip:
        reward = reward_shaping.clip(reward, cfg.reward_clip)
    if cfg.overlong:
        length = rollout.mask.sum(-1).view_as(reward)
        limits = {"max_new": cfg.max_new, "buffer": cfg.overlong}
        reward = reward + reward_shaping.overlong_penalty(length, **limits)
    return reward


def evaluate(
    cfg: options.Reinforcement, st: Strategy, run: Run, task: Task, engine: Engine, *, step: int
) -> dict[str, float]:
    """The mean rewards of greedy answers to unseen prompts, after `step` steps.

    Nothing from a dead engine: the step is written, and the next rollout ends the run.
    """
    greedy = Sampling(temperature=0, max_new=cfg.max_new)
    with run.phase("evaluate"):
        prompts, keys = data.take(task.unseen, cfg.eval_prompts, st.config.seed)
        try:
            rollout = collect.gather_and_generate(engine, st, prompts, keys, n=1, sampling=greedy)
        except EngineDead:
            return {}
        judged = judge(cfg, st, task, rollout, prompts, step=step)
    return reward.means(judged, "eval")
