"""A run as a simulation of discrete events: a pure function of a setting, rates, lengths and a seed.

The trainer does its phases one after the other; each engine decodes rows that join as others end, and takes
weights and rollouts in the order in which they were sent. All seconds are float64.
"""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rft_fn.collect.asynchronous import due
from rft_fn.tools.plan.lengths import Lengths, draw

__all__ = ["PHASES", "Rates", "Setting", "Timeline", "engine_seconds", "simulate", "with_failures"]

PHASES = ("generate", "gather", "judge", "score", "train", "sync", "other", "save")
"""What the trainer does in a step, in this order; in `generate` it waits for engines."""


@dataclass(frozen=True)
class Setting:
    """What a run is asked to do."""

    steps: int
    prompts: int  # of a step, N
    group: int  # responses to each, G
    max_new: int  # tokens of a response, at most
    prompt_tokens: float = 0.0  # of a prompt
    ahead: int = 0  # steps that sampling runs ahead
    partial: int = 0  # tokens by which a response grows in a step; 0: whole responses
    ranks: int = 1  # processes that train
    engines: int = 1
    servers: bool = False  # engines are servers, that all ranks ask; if not, each rank has one
    rows: int = 64  # that an engine decodes at a time
    budget: int = 1024  # tokens of a pack
    passes: int = 1  # over a rollout
    updates: int = 1  # in all passes
    scores: int = 0  # passes without a gradient: for a reference, for corrections
    share_prompts: bool = True  # prompts are computed once for their group
    learned: float = 1.0  # share of the rows that have a gradient
    save_every: int = 0  # steps between checkpoints; 0: none


@dataclass(frozen=True)
class Rates:
    """Seconds of single things."""

    step: float  # of a decode step of an engine
    row: float  # more for each row in it
    token: float  # of a token in forward and backward
    cache: float = 0.0  # more for each token that the rows of a decode step have in the cache
    prefill: float = 0.0  # of a token of a prompt
    score: float = 0.0  # of a token in forward
    scoring: float = 0.0  # of a pass of scores, beside its tokens
    pack: float = 0.0  # of a pack, beside its tokens
    network: float = 0.0  # that the transfers of a pack take, which products hide
    update: float = 0.0  # of an update, beside its packs
    judge: float = 0.0  # of the rewards of a step
    judge_row: float = 0.0  # more for each response of a rank
    push: float = 0.0  # of weights that leave the trainer
    deliver: float = 0.0  # of their way to each engine, one after the other
    load: float = 0.0  # until an engine has them
    reply: float = 0.0  # of a token that a rank reads from a server
    gather: float = 0.0  # of a place of the padded batch, which every rank holds
    plan: float = 0.0  # of a row in the plan of packs, which every rank makes
    other: float = 0.0  # of a step outside of all that
    other_row: float = 0.0  # more for each response
    save: float = 0.0  # of a checkpoint
    source: str = ""


class Timeline(NamedTuple):
    """What happened when [seconds]. K steps, P phases, E engines, C calls of generate."""

    begin: np.ndarray  # [K, P] of the trainer's phases
    end: np.ndarray  # [K, P]
    sampled: np.ndarray  # [C, E, 2] begin and end of each engine's work on a call
    step_of: np.ndarray  # [C] the step that each call is of
    version: np.ndarray  # [C] of the weights that sample it
    loaded: np.ndarray  # [K + 1, E] when each engine has the weights of a version
    lag: np.ndarray  # [K] versions between sampling and learning, a mean over responses
    tokens: np.ndarray  # [K] tokens of the responses that are learned from
    rows: np.ndarray  # [K] how many these are

    @property
    def wall(self) -> float:
        """Return the seconds of all steps."""
        return float(self.end[-1, -1])

    @property
    def step_seconds(self) -> np.ndarray:
        """Return the seconds of each step [K]."""
        return np.diff(self.end[:, -1], prepend=self.begin[0, 0])

    @property
    def engine_busy(self) -> np.ndarray:
        """Return the seconds that each engine samples [E]."""
        return (self.sampled[..., 1] - self.sampled[..., 0]).sum(0)

    def phase_seconds(self) -> dict[str, float]:
        """Return the mean seconds of a step in each phase of the trainer."""
        return dict(zip(PHASES, (self.end - self.begin).mean(0).tolist()))


def engine_seconds(
    owner: np.ndarray, length: np.ndarray, context: np.ndarray, *, rows: int, engines: int, rates: Rates
) -> np.ndarray:
    """Return the seconds [E] in which engines decode rows [B], each of its `owner`, `length` tokens.

    An engine decodes `rows` at a time; the next one of its rows, in their order, joins as another ends.
    `context` [B] are the tokens that a row begins with. The seconds of a decode step are linear in its rows
    and in their tokens in the cache, so they are summed between two ends at once.
    """
    start = np.zeros(len(length))
    counts = np.bincount(owner, minlength=engines)
    if counts.max() > rows:
        for own in np.split(np.argsort(owner, kind="stable"), counts.cumsum()[:-1]):
            slots = [0.0] * rows
            start[own] = [heapq.heapreplace(slots, slots[0] + tokens) for tokens in length[own]]
    tick = np.concatenate([start, start + length])
    who = np.concatenate([owner, owner])
    order = np.lexsort((tick, who))
    tick, who = tick[order], who[order]
    ones = np.ones(len(length))
    live = np.concatenate([ones, -ones])[order].cumsum()
    offset = np.concatenate([context - start, start - context])[order].cumsum()

    # each event, up to the next one; after its last one an engine has no row
    then = np.append(tick[1:], 0.0)
    steps = np.where(live > 0, then - tick, 0.0)
    read = live * (then * (then + 1) - tick * (tick + 1)) / 2 + offset * (then - tick)
    seconds = steps * (rates.step + rates.row * live) + rates.cache * np.where(live > 0, read, 0.0)
    return np.bincount(who, seconds, engines)


class _Call(NamedTuple):
    """Rows that are sampled together, [B] each."""

    owner: np.ndarray
    length: np.ndarray
    context: np.ndarray
    read: np.ndarray  # tokens that are read before: a prompt once for its group


def _call(x: Setting, prompts: np.ndarray, length: np.ndarray, spent: np.ndarray | None = None) -> _Call:
    """Return the call of rows that are of `prompts`, numbered from 0, and have `spent` tokens already."""
    size = -(-(int(prompts.max()) + 1) // x.engines)
    owner = np.arange(len(length)) % x.engines if x.servers else prompts // size
    context = x.prompt_tokens + (np.zeros(len(length)) if spent is None else spent)
    first = np.append(True, prompts[1:] != prompts[:-1]) if spent is None else np.full(len(length), True)
    return _Call(owner, length, context, context * first)


class _Engines:
    """When each engine is free, and what it did; of one simulation."""

    def __init__(self, x: Setting, rates: Rates):
        self.x = x
        self.rates = rates
        self.free = np.zeros(x.engines)
        self.spans: list[np.ndarray] = []
        self.of: list[tuple[int, int]] = []  # (step, version of the weights) of each call

    def sample(self, call: _Call, now: float, *, step: int, version: int) -> float:
        """Return when the last engine has done a call that is sent now."""
        x, r = self.x, self.rates
        seconds = engine_seconds(
            call.owner, call.length, call.context, rows=x.rows, engines=x.engines, rates=r
        )
        seconds += r.prefill * np.bincount(call.owner, call.read, x.engines)
        begin = self._ready(now)
        self.free = begin + seconds
        self.spans.append(np.stack([begin, self.free], -1))
        self.of.append((step, version))
        return float(self.free.max())

    def load(self, at: float) -> np.ndarray:
        """Return when each engine [E] has weights that leave the trainer at a time, after its calls."""
        self.free = self._ready(at) + self.rates.deliver * self.x.engines + self.rates.load
        return self.free.copy()

    def _ready(self, at: float) -> np.ndarray:
        """Return when each engine [E] can begin what is sent at a time: servers once all of them are free."""
        begin = np.maximum(self.free, at)
        return np.full_like(begin, begin.max()) if self.x.servers else begin


class _Batch(NamedTuple):
    """What a step learns from."""

    at: float  # when its last response has ended
    length: np.ndarray  # [M, G]
    lag: float  # versions since its weights, a mean over groups


class _Whole:
    """Whole responses, by the schedule of `collect.asynchronous`."""

    def __init__(self, x: Setting, lengths: Lengths, engines: _Engines, rng: np.random.Generator):
        self.x, self.lengths, self.engines, self.rng = x, lengths, engines, rng
        self.begun: dict[int, _Batch] = {}  # its lag is the version until it is used

    def collect(self, step: int, now: float) -> _Batch:
        """Begin what is due, and return the batch of a step that begins now."""
        x = self.x
        for later in due(step, x.ahead, x.steps):
            if later not in self.begun:
                length = draw(self.lengths, self.rng, x.prompts, x.group, most=x.max_new)
                call = _call(x, np.repeat(np.arange(x.prompts), x.group), length.ravel())
                at = self.engines.sample(call, now, step=later, version=step)
                self.begun[later] = _Batch(at, length, step)
        found = self.begun[step]
        self.begun[step] = found._replace(length=np.zeros(0))  # done with
        return found._replace(at=max(now, found.at), lag=step - found.lag)


class _Partial:
    """Groups of which some wait, as in `collect.partial`."""

    def __init__(self, x: Setting, lengths: Lengths, engines: _Engines, rng: np.random.Generator):
        self.x, self.lengths, self.engines, self.rng = x, lengths, engines, rng
        self.groups = np.zeros((0, x.group, 2))  # [M, G, (tokens, of them sampled)]
        self.born = np.zeros(0)  # [M] steps

    def collect(self, step: int, now: float) -> _Batch:
        """Grow all groups that wait and new ones, until one is finished."""
        x = self.x
        fresh = draw(self.lengths, self.rng, x.prompts, x.group, most=x.max_new)
        old = len(self.groups)
        groups = np.concatenate([self.groups, np.stack([fresh, 0 * fresh], -1)])
        born = np.concatenate([self.born, np.full(x.prompts, step)])
        parts = [groups[old:], groups[:old]]  # the new ones first
        done = np.zeros(len(groups), dtype=bool)
        while not done.any():
            for part in parts:
                if (call := self._grow(part)) is not None:
                    now = self.engines.sample(call, now, step=step, version=step)
            done = (groups[..., 1] >= groups[..., 0]).all(1)
            parts = [groups]
        self.groups, self.born = groups[~done], born[~done]
        return _Batch(now, groups[done, :, 0], float((step - born[done]).mean()))

    def _grow(self, groups: np.ndarray) -> _Call | None:
        """Return the call in which open rows grow, and count their tokens; None where none is open."""
        of, row = np.nonzero(groups[..., 1] < groups[..., 0])
        if not len(of):
            return None
        spent = groups[of, row, 1]
        more = np.minimum(groups[of, row, 0] - spent, self.x.partial)
        groups[of, row, 1] += more
        return _call(self.x, of, more, spent if spent.any() else None)


def simulate(x: Setting, rates: Rates, lengths: Lengths, *, seed: int = 0) -> Timeline:
    """Simulate the steps of a run.

    With `ahead` engines work beside the trainer; else one waits for the other. ValueError for `ahead` with
    `partial`.
    """
    if x.ahead and x.partial:
        raise ValueError(f"ahead: expected 0 with partial = {x.partial}, got {x.ahead}")
    engines = _Engines(x, rates)
    source = (_Partial if x.partial else _Whole)(x, lengths, engines, np.random.default_rng(seed))
    loaded = [np.zeros(x.engines)]
    edges: list[np.ndarray] = []  # [P + 1] of each step
    batches: list[_Batch] = []
    now = 0.0
    for step in range(x.steps):
        batch = source.collect(step, now)
        seconds = _trainer_seconds(x, rates, batch.length, step)
        times = np.array([now, batch.at, *(batch.at + np.cumsum(seconds))])
        sync = PHASES.index("sync")
        loaded.append(engines.load(times[sync] + rates.push))
        if not x.ahead:  # the trainer waits until they have the weights
            times[sync + 1 :] += loaded[-1].max() - times[sync + 1]
        edges.append(times)
        batches.append(batch)
        now = float(times[-1])
    at = np.stack(edges)
    return Timeline(
        begin=at[:, :-1],
        end=at[:, 1:],
        sampled=np.stack(engines.spans),
        step_of=np.array([step for step, _ in engines.of]),
        version=np.array([version for _, version in engines.of]),
        loaded=np.stack(loaded),
        lag=np.array([batch.lag for batch in batches]),
        tokens=np.array([batch.length.sum() for batch in batches]),
        rows=np.array([batch.length.size for batch in batches]),
    )


def _trainer_seconds(x: Setting, r: Rates, batch: np.ndarray, step: int) -> list[float]:
    """Return the seconds of the phases after `generate`, of a batch of lengths [M, G]."""
    rows, prompts = batch.size, len(batch)
    padded = rows * (x.prompt_tokens + float(batch.max()))
    read = float(batch.sum()) + x.prompt_tokens * (prompts if x.share_prompts else rows)
    replies = r.reply * float(batch.sum()) / x.ranks if x.servers else 0.0
    saves = x.save_every and (step + 1) % x.save_every == 0
    update = _pass_seconds(x, r.token, read * x.learned * x.passes / x.updates, r.pack, r.network) + r.update
    return [
        replies + r.gather * padded + r.plan * rows,
        r.judge + r.judge_row * rows / x.ranks,
        x.scores * (_pass_seconds(x, r.score, read, r.pack / 3, r.network / 4) + r.scoring),
        x.updates * update,
        r.push,
        r.other + r.other_row * rows,
        r.save if saves else 0.0,
    ]


def _pass_seconds(x: Setting, token: float, tokens: float, pack: float, network: float) -> float:
    """Return the seconds of packs of so many tokens, which ranks have equal shares of."""
    packs = math.ceil(tokens / (x.budget * x.ranks))
    return max(packs, 1) * pack + max(token * tokens / x.ranks, packs * network)


def with_failures(
    step_seconds: float, *, steps: int, between: float, restart: float, save_every: int
) -> float:
    """Return the expected seconds of a run that fails every `between` seconds in the mean.

    Failures come at random, exponentially. One costs what was done since the last checkpoint, and `restart`
    seconds: a part of t seconds between two checkpoints takes (exp(t / between) - 1) (between + restart).
    """
    size = min(save_every or steps, steps)
    whole, rest = divmod(steps, size)
    try:
        parts = whole * math.expm1(size * step_seconds / between) + math.expm1(rest * step_seconds / between)
    except OverflowError:
        return math.inf
    return parts * (between + restart)
