"""The engine of a run and the sampler on it: checked when built, and rebuilt when dead.

Keys name what is drawn, so a rollout that a new engine repeats has the same tokens, and the run goes on as if
nothing had happened.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from rft_fn import collect, data, dist, optim, strategy, sync
from rft_fn import engine as engine_lib
from rft_fn.collect import asynchronous
from rft_fn.engine import EngineDead, lifetime
from rft_fn.engine.lifetime import Rebuilds, Supervised
from rft_fn.run import options
from rft_fn.run.reward_task import Task
from rft_fn.run.run_folder import Run
from rft_fn.text import printable
from rft_fn.types import Engine, Strategy, TrainState

__all__ = ["Push", "checked", "saved_if_lost", "start_engine", "start_sampler"]


CANARY_PROMPTS = 4


class Push(Protocol):
    """Sends the trained weights to the engine of a run."""

    def __call__(self, state: TrainState, *, version: int) -> None:
        """Load the weights of `state` as `sync.push` does, into a new engine if the old one fails.

        With the first call and with every new engine comes a canary. Every rank calls it. If engines keep
        failing, the next `generate` raises EngineDead, so that a script can write its step and save.
        """
        ...


class _Pushed:
    """An engine that is built again where it dies, and the weights that it was last sent."""

    def __init__(
        self, build: Callable[[], Engine], check: Callable[..., str] | None, st: Strategy, rebuilds: int
    ):
        self.check = check  # of a new engine, in place of a plain push; its line is printed
        self.st = st
        self.pushed: tuple[TrainState, int] | None = None
        again = Rebuilds(rebuilds, restore=self._push_again, on_any_rank=self._on_any_rank, announce=st.print)
        self.supervised = Supervised(build, rebuilds=again)
        self.engine = self.supervised.engine()

    def push(self, state: TrainState, *, version: int) -> None:
        self.pushed = (state, version)
        first = self.supervised.fresh
        for attempt in self.supervised.attempts(restored=False):
            with attempt:
                fresh = self._on_any_rank(self.supervised.fresh)
                if fresh and self.check is not None:
                    self.st.print(self.check(state, self.engine, version=version))
                else:
                    # a run samples nothing between an update and its push
                    sync.push(self.st, state, self.engine, version=version, lend=True)
                self.supervised.fresh = False
        if first:
            self.supervised.check_lost()

    def _push_again(self) -> None:
        """Send the weights of the last push to an engine that was built again."""
        assert self.pushed is not None
        state, version = self.pushed
        self.push(state, version=version)

    def _on_any_rank(self, x: bool) -> bool:
        return bool(self.st.gather(torch.tensor([float(x)])).max())


def checked(
    st: Strategy,
    task: Task,
    name: str,
    state: TrainState,
    engine: Engine,
    *,
    version: int,
    max_gap: float | None = None,
) -> str:
    """Send the engine of a model its weights by `sync.canary`, with a few prompts of the task.

    Returns a line about it.
    """
    prompts: list[Any]
    prompts, _ = data.take(task.dataset, CANARY_PROMPTS, st.config.seed)
    probe = sync.canary(st, state, engine, name, prompts, version=version, max_gap=max_gap, lend=True)
    return (
        f"canary: engine and trainer differ by {probe.noisy:.1e} nats per token with noise on the weights, "
        f"{probe.floor:.1e} without ({probe.seconds:.1f} s)"
    )


def _engine_config(cfg: options.Rollouts, st: Strategy) -> engine_lib.EngineConfig:
    """Return the engine's options, with the rank of the adapters that it may get alone, and their base.

    A base in low precision is the engine's too where it is asked to take adapters alone, by which
    `opening.check_adapters` lets pass no engine that cannot. Otherwise it gets whole weights.
    """
    policy = options.of(options.Policy, cfg)
    config = engine_lib.config_of(st.config)
    if not policy.quantize:
        return replace(config, lora_rank=policy.lora_rank)
    if config.adapters != "alone":
        return config
    return replace(config, lora_rank=policy.lora_rank, base=policy.quantize)


def start_engine(
    cfg: options.Rollouts,
    st: Strategy,
    task: Task,
    name: str,
    *,
    build: Callable[[], Engine] | None = None,
) -> tuple[Engine, Push]:
    """Return (the engine of a run, the function that sends it weights), for the model of a name.

    An engine that dies in `generate` or in a push is built again, at most `rebuilds` times in a run, and gets
    the weights of the last push. With `canary` every new one must pass `sync.canary`; its line on the screen
    gives the numbers. All ranks call both functions alike. `build` builds the engine of the options unless it
    is given. EngineDead from `generate` when no engine stays alive.
    """

    def build_engine() -> Engine:
        return engine_lib.get_engine(_engine_config(cfg, st), name, task.tokenizer)

    check = partial(checked, st, task, name, max_gap=cfg.max_gap) if cfg.canary else None
    kept = _Pushed(build or build_engine, check, st, cfg.rebuilds)
    return kept.engine, kept.push


@contextmanager
def saved_if_lost(run: Run) -> Iterator[None]:
    """Save the last whole step of a run if the block raises EngineDead, and say so in its line.

    An engine that hangs in native code ends the process; a run of one process saves before that too.
    """
    try:
        with lifetime.saving(partial(_save_alone, run)):
            yield
    except EngineDead as error:
        raise EngineDead(f"{error}{_saved(run)}") from None


def _saved(run: Run) -> str:
    """Save the last whole step, and return the end of a line about it."""
    return f"; {run.save_now()} steps are saved, the same command continues from there"


def _save_alone(run: Run) -> str:
    """Save as `_saved` does if there are no other processes; return the end of a line about it."""
    if dist.world() > 1:
        return "; the same command continues from the last checkpoint"
    return _saved(run)


def start_sampler(
    cfg: options.Rollouts, st: Strategy, task: Task, name: str
) -> tuple[collect.AsyncSampler, Push]:
    """Return (what samples the rollouts, the function that sends it weights), for the model of a name.

    As `start_engine`. With `ahead` the engine has a separate process, this process keeps the threads that it
    leaves, and its thread builds it again where it dies: every rank independently, with the weights that it
    had, which the trainer no longer has. With `canary` it must pass that again. Servers are shared by the
    ranks, and loaded by the first (`Turns`).
    """
    if not cfg.ahead:
        inner, push = start_engine(cfg, st, task, name)
        return collect.AsyncSampler(inner, st), push
    own = replace(_engine_config(cfg, st), in_flight=cfg.in_flight)
    turns = None
    if own.servers and st.world > 1:
        turns, run = asynchronous.turns(st)
        own = replace(own, run=run, follows=st.rank > 0)
    config, threads = asynchronous.split_threads(own, torch.get_num_threads())
    torch.set_num_threads(threads)
    build = partial(engine_lib.get_engine, config, name, task.tokenizer)
    # an engine that only asks servers is the same when it is built again, and a check would load all of them
    check = partial(_check, st, task, name, cfg.max_gap) if cfg.canary and turns is None else None
    calls = collect.EngineWorker(
        build, rebuilds=cfg.rebuilds, check=check, in_flight=cfg.in_flight, turns=turns
    )
    inner, push = start_engine(replace(cfg, rebuilds=0), st, task, name, build=calls.engine)
    return collect.AsyncSampler(inner, st, calls=calls), push


def _check(
    st: Strategy, task: Task, name: str, max_gap: float | None, engine: Engine, weights: collect.Weights
) -> None:
    """Run the canary on this rank's engine only, with a copy of the trained weights as the trainer."""

    def export(state: TrainState, /) -> collect.Weights:
        return weights

    alone = strategy.get_fake_strategy()._replace(export=export, config=st.config)
    state = TrainState(params={}, opt=None, step=weights.version, tx=optim.chain())
    line = checked(alone, task, name, state, engine, version=weights.version, max_gap=max_gap)
    print(printable(line), file=sys.stderr, flush=True)
