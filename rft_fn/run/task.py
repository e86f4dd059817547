"""A task that a policy learns from rewards: its prompts, and the judging of responses to them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from rft_fn import collect, data, model, reward
from rft_fn import engine as engines
from rft_fn.collect import ahead
from rft_fn.run import options
from rft_fn.run.folder import Run
from rft_fn.run.setup import load_data, plan_steps
from rft_fn.types import Engine, Rollout, Sampling, Strategy

__all__ = ["Task", "check_rewards", "evaluate", "judge", "load_sampler", "load_task", "plan_rollouts"]

R = TypeVar("R", bound=options.Reinforcement)


class Task(NamedTuple):
    """Prompts, and how responses to them are rewarded."""

    tokenizer: Any
    dataset: data.Dataset  # the prompts to train on
    unseen: data.Dataset  # the prompts to evaluate on
    score: Any  # a reward.Score


def load_task(cfg: options.Reinforcement, st: Strategy) -> Task:
    """Load the task that the options name, the same on every rank. ValueError for an invalid one."""
    tokenizer = model.load_tokenizer(cfg.model)
    score: Any = reward.parse(cfg.reward)
    needed = {"max_prompt": cfg.max_prompt, "columns": reward.columns(score)}
    dataset, unseen = load_data(cfg, st, tokenizer, **needed)
    return Task(tokenizer, dataset, unseen, score)


def plan_rollouts(cfg: R, st: Strategy, task: Task, *, usual: int) -> R:
    """Decide the number of steps, each of which draws `prompts` prompts; see `plan_steps`."""
    given: dict[str, Any] = {"batch": cfg.prompts, "usual": usual, "passes": "data_epochs"}
    return plan_steps(cfg, st, task.dataset, task.unseen, **given)


def check_rewards(cfg: options.Reward, st: Strategy, task: Task) -> None:
    """Try the rewards on two prompts. ValueError for rewards that cannot judge them."""
    prompts: list[Any]
    prompts, _ = data.take(task.dataset, 2, st.config.seed)
    collect.check_reward(st, task.score, prompts, timeout=cfg.reward_timeout)


def load_sampler(
    cfg: options.Reinforcement, st: Strategy, task: Task, saved: Sequence[dict[str, Any]] = ()
) -> collect.Ahead:
    """What samples the rollouts; `saved` are those that a checkpoint has kept.

    With `ahead` the engine has a process of its own, and this process keeps the threads that it leaves.
    """
    config = engines.config_of(st.config)
    if cfg.ahead:
        config, threads = ahead.apart(config, torch.get_num_threads())
        torch.set_num_threads(threads)
    build = partial(engines.get_engine, config, cfg.model, task.tokenizer)
    return collect.Ahead(build, st, ahead=cfg.ahead, saved=saved, rebuilds=cfg.rebuilds)


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
    how = {"timeout": cfg.reward_timeout, "state": now}
    return collect.gather_and_judge(st, task.score, rollout, prompts, task.tokenizer, **how)


def evaluate(
    cfg: options.Reinforcement, st: Strategy, run: Run, task: Task, engine: Engine, *, step: int
) -> dict[str, float]:
    """The mean rewards of greedy answers to unseen prompts, after `step` steps."""
    greedy = Sampling(temperature=0, max_new=cfg.max_new)
    with run.phase("evaluate"):
        prompts, keys = data.take(task.unseen, cfg.eval_prompts, st.config.seed)
        rollout = collect.gather_and_generate(engine, st, prompts, keys, n=1, sampling=greedy)
        judged = judge(cfg, st, task, rollout, prompts, step=step)
    return reward.means(judged, "eval")
