"""What samples the rollouts of a run: its engine, called when a step needs it or ahead of that."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rft_fn import collect, optim, strategy
from rft_fn import engine as engine_lib
from rft_fn.check import printable
from rft_fn.collect import ahead
from rft_fn.run import options
from rft_fn.run.engine import Push, checked, start_engine
from rft_fn.run.task import Task
from rft_fn.types import Engine, Strategy, TrainState

__all__ = ["start_sampler"]


def start_sampler(
    cfg: options.Reinforcement, st: Strategy, task: Task, saved: Sequence[dict[str, Any]] = ()
) -> tuple[collect.Ahead, Push]:
    """(what samples the rollouts, the function that sends it weights): `start_engine`, with `ahead`.

    `saved` are the rollouts that a checkpoint has kept. With `ahead` the engine has a process of its own,
    this process keeps the threads that it leaves, and its thread builds it again where it dies: each rank
    alone, with the weights that it had, which the trainer no longer has. With `canary` it has to pass that
    again.
    """
    if not cfg.ahead:
        inner, push = start_engine(cfg, st, task)
        return collect.Ahead(inner, st, saved=saved), push
    config, threads = ahead.apart(engine_lib.config_of(st.config), torch.get_num_threads())
    torch.set_num_threads(threads)
    build = partial(engine_lib.get_engine, config, cfg.model, task.tokenizer)
    check = None
    if cfg.canary:
        check = partial(_check, cfg, st, task)
    calls = collect.InOrder(build, rebuilds=cfg.rebuilds, check=check)
    inner, push = start_engine(replace(cfg, rebuilds=0), st, task, build=calls.engine)
    return collect.Ahead(inner, st, calls=calls, saved=saved), push


def _check(
    cfg: options.Reinforcement, st: Strategy, task: Task, engine: Engine, weights: collect.Weights
) -> None:
    """The canary of this rank's engine alone; a copy of the trained weights stands for the trainer."""

    def export(state: TrainState, /) -> collect.Weights:
        return weights

    alone = strategy.get_fake_strategy()._replace(export=export, config=st.config)
    state = TrainState(params={}, opt=None, step=weights.version, tx=optim.chain())
    line = checked(cfg, alone, task, state, engine, version=weights.version)
    print(printable(line), file=sys.stderr, flush=True)
