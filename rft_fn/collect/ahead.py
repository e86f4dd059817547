"""Asynchronous rollouts: those of coming steps are sampled while the trainer learns from earlier ones.

At step k, with weights of version k, the rollouts of the steps up to k + ahead are begun. So the rollout of
step k is of version max(0, k - ahead), and a run is a function of its seed and `ahead`: nothing depends on
which of the two sides was faster.

One thread calls the engine, one call after the other in the order in which they were asked for. It never
meets another rank: rollouts are gathered, and weights are put together, by the thread that trains.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from rft_fn.collect.generate import check_prompts, gather_and_generate
from rft_fn.collect.in_order import InOrder, Weights, name_of
from rft_fn.collect.media import with_media, without_media
from rft_fn.collect.part import part_of_rank
from rft_fn.engine import EngineConfig, EngineDead
from rft_fn.types import Engine, Rollout, Sampling, Strategy

__all__ = ["Ahead", "apart", "due", "version_of"]


# ---------- the schedule


def due(step: int, ahead: int, total: int) -> range:
    """The steps whose rollouts are begun by the start of `step`, of `total` steps."""
    return range(step, min(step + ahead + 1, total))


def version_of(step: int, ahead: int) -> int:
    """The version of the weights that sample the rollout of a step."""
    return max(0, step - ahead)


def apart(config: EngineConfig, threads: int) -> tuple[EngineConfig, int]:
    """(the config of an engine that samples during training, how many of `threads` the trainer keeps).

    The engine has a process of its own, never sleeps, and takes half of the threads unless it was given a
    number. ValueError for an engine of several processes: its ranks would have to meet while they train.
    """
    if config.tp_size != 1:
        raise ValueError(
            f"ahead, engine_tp_size: expected one process for each engine that samples ahead, got "
            f"{config.tp_size}"
        )
    share = config.threads or max(1, threads // 2)
    alone = replace(config, process=True, sleep=False, threads=share)
    return alone, max(1, threads - share)


# ---------- the rollouts


class _Begun(NamedTuple):
    """The arguments of a rollout that is under way."""

    prompts: Sequence[Any]
    keys: Sequence[int]
    n: int
    sampling: Sampling
    weights: Weights | None  # that sample it


class Ahead:
    """Samples the rollouts of coming steps while earlier ones are learned from.

    `engine` is for everything else: evaluation, scores and weight sync, each after what was asked for before.
    With `calls` rollouts can be begun early, and a load copies the weights and returns at once; without, the
    rollout of a step is sampled when it is asked for.
    """

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        *,
        calls: InOrder | None = None,
        saved: Sequence[dict[str, Any]] = (),
    ):
        """`engine` calls `calls.engine()`, or is that; `saved` is `save()` of a checkpoint."""
        self.engine = engine
        self.strategy = strategy
        self._calls = calls
        self._begun: dict[str, _Begun] = {}
        self._done: dict[str, Rollout] = {x["name"]: x["rollout"] for x in saved if "rollout" in x}
        self._older = {x["name"]: Weights.restored(x) for x in saved if "weights" in x}  # of rollouts lost
        self._asked: set[str] = set()  # of those begun or saved, what this process has asked for
        self._used: dict[str, Rollout] = {}  # of those, what the step under way was given
        self._dead = False  # the engine is lost for good

    def begin(self, prompts: Sequence[Any], keys: Sequence[int], *, n: int, sampling: Sampling) -> None:
        """Begin a rollout with the weights that were loaded last, unless it was begun or saved before.

        One that was lost is drawn with the weights that were saved for it. Every rank samples its part of the
        prompts, in order.
        """
        name = name_of(keys, n, sampling)
        self._asked.add(name)
        self._used.clear()
        calls = self._calls
        if calls is None or name in self._begun or name in self._done:
            return

        check_prompts(self.engine, prompts, keys, n=n, sampling=sampling)

        # the weights that were loaded last come back behind the older ones
        newest = calls.newest
        older = self._older.pop(name, None)
        self._begun[name] = _Begun(prompts, keys, n, sampling, older or newest)
        if older is not None:
            older.load(calls.engine())
        mine = part_of_rank(self.strategy, len(prompts))
        if mine.start < mine.stop:
            calls.begin(prompts[mine], keys[mine], n=n, sampling=sampling)
        if older is not None and newest is not None:
            newest.load(calls.engine())

    def generate(self, prompts: Sequence[Any], keys: Sequence[int], *, n: int, sampling: Sampling) -> Rollout:
        """`gather_and_generate`: the rollout that was begun with these keys, or else a new one.

        All ranks call it.
        """
        name = name_of(keys, n, sampling)
        if name in self._done:
            rollout = with_media(self.strategy, self._done.pop(name), prompts)
        else:
            rollout = self._sampled(prompts, keys, n, sampling)
        if name in self._asked:
            self._asked.remove(name)
            self._used[name] = rollout
        return rollout

    def _sampled(self, prompts: Sequence[Any], keys: Sequence[int], n: int, sampling: Sampling) -> Rollout:
        """A rollout of the engine; one that is lost with it counts as begun."""
        try:
            rollout = gather_and_generate(self.engine, self.strategy, prompts, keys, n=n, sampling=sampling)
        except EngineDead:
            self._dead = True
            raise
        self._begun.pop(name_of(keys, n, sampling), None)
        return rollout

    def save(self) -> list[dict[str, Any]]:
        """The rollouts under way, for a checkpoint: waits until they are done. All ranks call it.

        They cannot be drawn again by a resumed run, which has no longer the weights that they are drawn with.
        For one that is lost with its engine these weights are saved, unless they are those of the checkpoint;
        and as the engine was lost in the middle of a step, what that step has used is saved too. Media are
        left out, and come back with the prompts.
        """
        with suppress(EngineDead):
            for name, begun in list(self._begun.items()):
                self._done[name] = self._sampled(begun.prompts, begun.keys, begun.n, begun.sampling)
        kept = self._asked & set(self._done)  # a run with other options does not ask for all that it found
        done = {name: self._done[name] for name in kept}
        if self._dead:
            done |= self._used
        saved = [{"name": name, "rollout": without_media(done[name])} for name in sorted(done)]
        return saved + self._lost()

    def _lost(self) -> list[dict[str, Any]]:
        """The rollouts that are still under way, each with the older weights that sample it."""
        found: list[dict[str, Any]] = []
        for name, begun in sorted(self._begun.items()):
            newest = self._calls and self._calls.newest
            if begun.weights and newest and begun.weights.version != newest.version:
                found.append({"name": name, **begun.weights.saved()})
        return found

    def busy(self) -> float:
        """Seconds that the engine has worked since the last call of this function; 0 without `calls`."""
        if self._calls is None:
            return 0.0
        seconds = self._calls.seconds
        self._calls.seconds = 0.0
        return seconds

    def close(self) -> None:
        """End the engine, whatever it is doing."""
        self.engine.close()
