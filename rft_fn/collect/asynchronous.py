"""Sample the rollouts of later steps while the trainer learns from earlier ones.

At step k, with weights of version k, the rollouts of the steps up to k + ahead are begun. So the rollout of
step k is of version max(0, k - ahead), and a run is a function of its seed and `ahead`: nothing depends on
which side was faster. In flight, a rollout under way goes on with the weights of each step that ends: its
tokens are of versions max(0, k - ahead) to k, and of which is a matter of time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from uuid import uuid4

from rft_fn import dist
from rft_fn.collect.engine_worker import EngineWorker, Turns, Weights, name_of
from rft_fn.engine import EngineConfig, EngineDead
from rft_fn.engine.global_batch import (
    check_prompts,
    gather_and_generate,
    shard_prompts,
    with_media,
    without_media,
)
from rft_fn.engine.requests import Request
from rft_fn.types import Engine, Rollout, Sampling, Strategy
from rft_fn.types.engine import Drafts, OnRow

__all__ = [
    "AsyncSampler",
    "SampledAhead",
    "Saved",
    "due",
    "sample_ahead",
    "split_threads",
    "turns",
    "version_of",
]  # fmt: skip


_WAIT = 30.0  # seconds for an answer of the store

Saved: TypeAlias = Sequence[Mapping[str, Any]]
"""Rollouts that a checkpoint keeps: {"name", "rollout"} of each, or {"name", "weights", ...} to draw it."""


def due(step: int, ahead: int, total: int) -> range:
    """Return the steps whose rollouts have started when `step` begins, of `total` steps."""
    return range(step, min(step + ahead + 1, total))


def version_of(step: int, ahead: int) -> int:
    """Return the version of the weights that sample the rollout of a step."""
    return max(0, step - ahead)


def split_threads(config: EngineConfig, threads: int) -> tuple[EngineConfig, int]:
    """Return (the config of an engine that samples during training, the trainer's share of `threads`).

    The engine has its own process, never sleeps, and takes half of the threads unless it was given a
    number. ValueError for an engine of several processes: its ranks would have to meet while they train.
    """
    if config.tp_size != 1:
        raise ValueError(
            f"ahead, engine_tp_size: expected one process for each engine that samples ahead, got "
            f"{config.tp_size}"
        )
    share = config.threads or max(1, threads // 2)
    return replace(config, process=True, sleep=False, threads=share), max(1, threads - share)


def turns(strategy: Strategy) -> tuple[Turns, str]:
    """Return (the turns of ranks that ask the same servers, a name of their weights). All ranks call it."""
    store = dist.store_client(_WAIT)
    assert store is not None  # several ranks have one
    return Turns(store, strategy.rank, strategy.world), dist.all_gather_object(uuid4().hex[:8])[0]


@dataclass
class _Begun:
    """A rollout that this process has begun."""

    request: Request
    weights: Weights | None  # that sample it; None once they have
    rollout: Rollout | None = None  # once it is sampled
    given: bool = False  # to the step under way


class AsyncSampler:
    """Samples the rollouts of later steps while the trainer learns from earlier ones.

    `engine` is for everything else: evaluation, scores and weight sync, each after the calls before it. With
    `calls` rollouts can be begun early, and a load copies the weights and returns at once; without, the
    rollout of a step is sampled when it is needed.

    What a checkpoint has kept is an argument, `saved`, as `save` returned it. The sampler itself knows only
    what it has begun.
    """

    def __init__(self, engine: Engine, strategy: Strategy, *, calls: EngineWorker | None = None):
        """Take an `engine` that calls `calls.engine()`, or is that."""
        self.engine = engine
        self.strategy = strategy
        self._calls = calls
        self._begun: dict[str, _Begun] = {}
        self._lost = False  # the engine, for good
        self._drafts = Drafts()  # that were told of

    def begin(
        self,
        prompts: Sequence[Any],
        keys: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        saved: Saved = (),
        on_row: OnRow | None = None,
    ) -> Saved:
        """Start a rollout with the newest weights, unless it has started or is saved.

        A lost one is drawn with the weights that were saved for it. Every rank samples its part of the
        prompts, in order. Returns what of `saved` is needed until the rollout is used.
        """
        name = name_of(keys, n, sampling)
        own = [x for x in saved if x["name"] == name]
        for earlier in [x for x, begun in self._begun.items() if begun.given]:
            del self._begun[earlier]
        calls = self._calls
        if calls is None or any("rollout" in x for x in own):
            return own
        if name in self._begun:
            return ()

        request = Request(prompts, keys, n, sampling, on_row=on_row)
        check_prompts(self.engine, request)

        # the newest weights come back after the older ones
        newest = calls.newest
        older = Weights.restored(own[0]) if own and not calls.in_flight else None
        self._begun[name] = _Begun(request, None if calls.in_flight else older or newest)
        if older is not None:
            older.load(calls.engine())
        mine = shard_prompts(self.strategy, len(prompts))
        if mine.start < mine.stop:
            calls.begin(request.part(mine))
        if older is not None and newest is not None:
            newest.load(calls.engine())
        return ()

    def generate(
        self,
        prompts: Sequence[Any],
        keys: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        saved: Saved = (),
        on_row: OnRow | None = None,
    ) -> Rollout:
        """Return the rollout that was started or saved with these keys, or sample one. All ranks call it.

        `on_row` hears of rows of one that is sampled now, as in `Generate`.
        """
        name = name_of(keys, n, sampling)
        begun = self._begun.get(name)
        if begun is not None and not begun.given:
            rollout = with_media(self.strategy, self._finished(begun), prompts)
            begun.given = True
            return rollout
        for entry in saved:
            if entry["name"] == name and "rollout" in entry:
                return with_media(self.strategy, entry["rollout"], prompts)
        return self._sampled(Request(prompts, keys, n, sampling, on_row=on_row))

    def _finished(self, begun: _Begun) -> Rollout:
        """Wait for a rollout that was begun."""
        if begun.rollout is None:
            begun.rollout = self._sampled(begun.request._replace(on_row=None))  # who began it told of rows
            begun.weights = None
        return begun.rollout

    def _sampled(self, request: Request) -> Rollout:
        """Sample a rollout, or wait for one that was begun."""
        try:
            return gather_and_generate(
                self.engine,
                self.strategy,
                request.prompts,
                request.keys,
                n=request.n,
                sampling=request.sampling,
                on_row=request.on_row,
            )
        except EngineDead:
            self._lost = True
            raise

    def save(self, saved: Saved = ()) -> Saved:
        """Finish the rollouts under way, and return them for a checkpoint with `saved`. All ranks call it.

        A resumed run cannot draw them again, without the weights that they are drawn with. For a rollout that
        is lost with its engine these weights are saved, unless the checkpoint has them anyway; and as the
        engine was lost in the middle of a step, what that step has used is saved too. Media are left out, and
        come back with the prompts.
        """
        with suppress(EngineDead):
            for begun in self._begun.values():
                self._finished(begun)
        rollouts = {x["name"]: x for x in saved if "rollout" in x}
        weights = {x["name"]: x for x in saved if "weights" in x and x["name"] not in self._begun}
        newest = self._calls and self._calls.newest
        for name, begun in self._begun.items():
            if begun.rollout is not None:
                if self._lost or not begun.given:
                    rollouts[name] = {"name": name, "rollout": without_media(begun.rollout)}
            elif begun.weights and newest and begun.weights.version != newest.version:
                weights[name] = {"name": name, **begun.weights.saved()}
        return [kind[name] for kind in (rollouts, weights) for name in sorted(kind)]

    def busy(self) -> float:
        """Return the seconds that the engine has worked since the last call; 0 without `calls`."""
        if self._calls is None:
            return 0.0
        seconds = self._calls.seconds
        self._calls.seconds = 0.0
        return seconds

    def accepted(self) -> dict[str, float]:
        """Return the share of drafted tokens that were accepted since the last call, and tokens per step.

        Nothing where this rank's engine has drafted none.
        """
        before, now = self._drafts, self.engine.status().get("drafts", Drafts())
        if now.tokens < before.tokens:  # an engine that was built again counts anew
            before = Drafts()
        self._drafts = now
        steps, tokens, accepted = (b - a for a, b in zip(before, now))
        if not tokens:
            return {}
        return {"rollout/accepted": accepted / tokens, "rollout/tokens_per_step": 1 + accepted / steps}

    def close(self) -> None:
        """End the engine, whatever it is doing."""
        self.engine.close()


Draw = Callable[[int], tuple[Sequence[Any], Sequence[int]]]  # a step -> (its prompts, their keys)


class SampledAhead(Iterable[tuple[Sequence[Any], Rollout]]):
    """The prompts and the rollout of each step, while later ones are sampled.

    The weights of a step, evaluations and scores go to `engine`, which does one after the other.
    """

    def __init__(self, sampler: AsyncSampler, draw: Draw, total: int, ahead: int, n: int, sampling: Sampling):
        self.engine = sampler.engine
        self.sampler = sampler
        self.draw = draw
        self.total = total
        self.ahead = ahead
        self.n = n
        self.sampling = sampling

    def __iter__(self):
        for step in range(self.total):
            for later in due(step, self.ahead, self.total):
                self.sampler.begin(*self.draw(later), n=self.n, sampling=self.sampling)
            prompts, keys = self.draw(step)
            yield prompts, self.sampler.generate(prompts, keys, n=self.n, sampling=self.sampling)


def sample_ahead(
    engine: Engine,
    strategy: Strategy,
    draw: Draw,
    *,
    total: int,
    n: int,
    sampling: Sampling,
    ahead: int = 1,
) -> SampledAhead:
    """Sample the rollouts of `total` steps in a thread, up to `ahead` steps before they are learned from.

        samples = sample_ahead(engine, st, draw, total=100, n=8, sampling=sampling)
        for prompts, rollout in samples:
            ...
            samples.engine.load(st.export(state), version=state.step)

    `draw(step)` gives (prompts, keys), the same whenever it is asked. The rollout of step k is of version
    max(0, k - ahead), where each step loads its weights. From here on only `samples.engine` may be called: it
    takes turns with the rollouts. To overlap with training the engine has its own process,
    EngineConfig(process=True), or servers; on several ranks a process and servers of its own for each,
    EngineConfig(process=True, servers=servers[st.rank :: st.world]). All ranks iterate alike. ValueError for
    `ahead` below 0.
    """
    if ahead < 0:
        raise ValueError(f"ahead: expected >= 0 steps, got {ahead}")
    worker = EngineWorker(lambda: engine)
    sampler = AsyncSampler(worker.engine(), strategy, calls=worker)
    return SampledAhead(sampler, draw, total, ahead, n, sampling)
