"""The engine of a run and the sampler on it: checked when built, and rebuilt when dead.

Keys name what is drawn, so a rollout that a new engine repeats has the same tokens, and the run goes on as if
nothing had happened.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rft_fn import collect, data, dist, optim, strategy, sync
from rft_fn import engine as engine_lib
from rft_fn.collect import asynchronous
from rft_fn.engine import BadRequest, EngineDead, lifetime
from rft_fn.run.reward_task import Task
from rft_fn.run.run_folder import Run
from rft_fn.text import printable
from rft_fn.types import Engine, Rollout, Sampling, Strategy, TrainState
from rft_fn.types.engine import Delivered, EngineStatus, record

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


class _Kept:
    """An engine, what it is built from, and the weights that it was last sent."""

    def __init__(self, build: Callable[[], Engine], load: Callable[..., None], st: Strategy, rebuilds: int):
        self.build = build
        self.load_weights = load
        self.st = st
        self.left = rebuilds
        self.inner = build()
        self.fresh = True  # it has not had any weights since it was built
        self.pushed: tuple[TrainState, int] | None = None
        self.lost = ""  # why the last engine died, once no new one is built

    # ---------- what can fail

    def push(self, state: TrainState, *, version: int) -> None:
        self.pushed = (state, version)
        first = self.fresh
        error = self._try(self._send)
        while error and self._rebuild(error):
            error = self._try(self._send)
        if error and first:
            self._raise_lost()

    def generate(
        self, prompts: Sequence[Any], keys: Sequence[int], *, n: int = 1, sampling: Sampling, **more: Any
    ) -> Rollout:
        found: list[Rollout] = []

        def answer() -> None:
            found[:] = [self.inner.generate(prompts, keys, n=n, sampling=sampling, **more)]

        # a new engine has the same weights, and the same keys draw the same tokens
        if self.lost:
            self._raise_lost()
        error = self._try(answer)
        while error:
            if not self._rebuild(error):
                self._raise_lost()
            error = self._try(self._send) or self._try(answer)
        return found[0]

    def _send(self) -> None:
        """Send the weights of the last push, with a canary where the engine is new on some rank."""
        assert self.pushed is not None
        state, version = self.pushed
        fresh = bool(self._any(self.fresh))
        self.load_weights(state, self.inner, version=version, fresh=fresh)
        self.fresh = False

    def _try(self, act: Callable[[], None]) -> str:
        """Return the failure of an engine on any rank, empty where there is none; raise other errors.

        All ranks agree, because the next thing that any of them does needs the others.
        """
        line = ""
        refused: BadRequest | None = None
        try:
            act()
        except (sync.ManifestError, sync.CanaryError):
            raise
        except BadRequest as error:  # perhaps of this rank only
            refused = error
        except Exception as error:
            if self.inner.status()["alive"]:
                raise
            line = " ".join(f"{type(error).__name__}: {error}".split()) or "unknown"
        if self._any(bool(line)) and not line:
            line = "the engine of another rank failed"
        if refused is not None:
            raise refused
        return line

    def _any(self, x: bool) -> float:
        return float(self.st.gather(torch.tensor([float(x)])).max())

    def _rebuild(self, why: str) -> bool:
        """Build an engine in place of one that died; False where that was done too often."""
        if not self.left:
            self.lost = why
            return False
        self.left -= 1
        self.st.print(f"engine: it died ({why}); building another, {self.left} more after that")
        failed = ""
        if not self.inner.status()["alive"]:
            with suppress(Exception):  # what is left of an engine that failed
                self.inner.close()
            try:
                self.inner = self.build()
                self.fresh = True
            except Exception as error:  # its servers may all be gone
                failed = " ".join(f"{type(error).__name__}: {error}".split()) or "unknown"
        if self._any(bool(failed)):
            self.lost = failed or "another rank could not build one"
            return False
        return True

    def _raise_lost(self) -> None:
        raise EngineDead(
            f"engine {self.inner.status()['engine']}: expected one that stays alive, got one that died again "
            f"({self.lost}); --rebuilds says how often another is built"
        )

    # ---------- what is handed on

    def score(self, rollout: Rollout, **options: Any) -> Tensor:
        return self.inner.score(rollout, **options)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        return self.inner.load(weights, version=version)

    def sleep(self) -> None:
        with suppress(EngineDead):
            self.inner.sleep()

    def wake(self) -> None:
        with suppress(EngineDead):
            self.inner.wake()

    def status(self) -> EngineStatus:
        return self.inner.status()

    def close(self) -> None:
        self.inner.close()


def checked(cfg: Any, st: Strategy, task: Task, state: TrainState, engine: Engine, *, version: int) -> str:
    """Send the engine its weights by `sync.canary`, with a few prompts of the task.

    Returns a line about it.
    """
    prompts: list[Any]
    prompts, _ = data.take(task.dataset, CANARY_PROMPTS, st.config.seed)
    probe = sync.canary(st, state, engine, cfg.model, prompts, version=version, max_gap=cfg.max_gap)
    return (
        f"canary: engine and trainer differ by {probe.noisy:.1e} nats per token with noise on the weights, "
        f"{probe.floor:.1e} without ({probe.seconds:.1f} s)"
    )


def start_engine(
    cfg: Any, st: Strategy, task: Task, *, build: Callable[[], Engine] | None = None
) -> tuple[Engine, Push]:
    """Return (the engine of a run, the function that sends it weights), by the options of the run.

    An engine that dies in `generate` or in a push is built again, at most `rebuilds` times in a run, and gets
    the weights of the last push. With `canary` every new one must pass `sync.canary`; its line on the screen
    gives the numbers. All ranks call both functions alike. `build` builds the engine of the options unless it
    is given. EngineDead from `generate` when no engine stays alive.
    """

    def build_engine() -> Engine:
        return engine_lib.get_engine(engine_lib.config_of(cfg.strategy), cfg.model, task.tokenizer)

    def load(state: TrainState, engine: Engine, *, version: int, fresh: bool) -> None:
        if not (fresh and cfg.canary):
            sync.push(st, state, engine, version=version)
            return
        st.print(checked(cfg, st, task, state, engine, version=version))

    kept = _Kept(build or build_engine, load, st, cfg.rebuilds)
    return record(Engine, kept), kept.push


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


def start_sampler(cfg: Any, st: Strategy, task: Task) -> tuple[collect.AsyncSampler, Push]:
    """Return (what samples the rollouts, the function that sends it weights).

    As `start_engine`, with `ahead`. With `ahead` the
    engine has a separate process, this process keeps the threads that it leaves, and its thread builds it
    again where it dies: every rank independently, with the weights that it had, which the trainer no longer
    has. With `canary` it must pass that again.
    """
    if not cfg.ahead:
        inner, push = start_engine(cfg, st, task)
        return collect.AsyncSampler(inner, st), push
    config, threads = asynchronous.split_threads(engine_lib.config_of(st.config), torch.get_num_threads())
    torch.set_num_threads(threads)
    build = partial(engine_lib.get_engine, config, cfg.model, task.tokenizer)
    check = partial(_check, cfg, st, task) if cfg.canary else None
    calls = collect.EngineWorker(build, rebuilds=cfg.rebuilds, check=check)
    inner, push = start_engine(replace(cfg, rebuilds=0), st, task, build=calls.engine)
    return collect.AsyncSampler(inner, st, calls=calls), push


def _check(cfg: Any, st: Strategy, task: Task, engine: Engine, weights: collect.Weights) -> None:
    """Run the canary on this rank's engine only, with a copy of the trained weights as the trainer."""

    def export(state: TrainState, /) -> collect.Weights:
        return weights

    alone = strategy.get_fake_strategy()._replace(export=export, config=st.config)
    state = TrainState(params={}, opt=None, step=weights.version, tx=optim.chain())
    line = checked(cfg, alone, task, state, engine, version=weights.version)
    print(printable(line), file=sys.stderr, flush=True)
