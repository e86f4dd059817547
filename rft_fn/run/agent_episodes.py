"""The agents of a run: programs that play its episodes through an endpoint, and their rewards."""

import shlex
from collections.abc import Sequence
from typing import Any

import torch

from rft_fn import collect
from rft_fn.collect import agents
from rft_fn.collect.agents import Agents, Endpoint
from rft_fn.run import options
from rft_fn.run.cli import without
from rft_fn.run.setup import Setup
from rft_fn.types import Sampling

__all__ = ["check_agent", "play_agents"]


def check_agent(cfg: options.Agents) -> None:
    """Raise ValueError for a command that cannot be read, and for what only an agent has without one."""
    if not cfg.agent:
        names = ("agent_timeout", "agent_memory", "agents_at_once", "agent_failed")
        without(cfg, *names, prefix="", instead="give --agent")
        return
    try:
        words = shlex.split(cfg.agent)
    except ValueError as error:
        raise ValueError(f"agent: expected a command, got {cfg.agent!r}: {error}") from None
    if not words:
        raise ValueError(f"agent: expected a command, got {cfg.agent!r}")


def play_agents(
    env: Setup,
    endpoint: Endpoint,
    prompts: Sequence[Any],
    keys: Sequence[int],
    *,
    n: int,
    sampling: Sampling,
    step: int,
) -> collect.Played:
    """Return n episodes of the agent for each prompt, the same on every rank.

    Where the run has rewards they are those of what the policy said in an episode's last row.
    """
    assert env.samples is not None, "nothing is sampled"
    cfg = env.cfg
    played = agents.play_agents(
        env.samples.engine,
        env.st,
        endpoint,
        Agents(
            tuple(shlex.split(cfg.agent)),
            seconds=cfg.agent_timeout,
            memory=cfg.agent_memory,
            at_once=cfg.agents_at_once,
            failed=cfg.agent_failed,
        ),
        prompts,
        keys,
        n=n,
        sampling=sampling,
        max_turns=cfg.max_turns,
        max_tokens=cfg.max_tokens,
        pad=env.task.tokenizer.pad_token_id,
        rewarded=env.task.score is None,
        warn=env.st.print,
    )
    if env.task.score is None:
        return played
    judged = env.judge(played.first, played.prompts, step)
    failed = played.numbers["agent_failed"].view(judged.reward.shape) > 0
    return played._replace(reward=torch.where(failed, cfg.agent_failed, judged.reward))
