"""The batches that the steps of a run learn from: a collector over explicit state."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from rft_fn import data, limits
from rft_fn.collect.asynchronous import AsyncSampler, Saved, due
from rft_fn.collect.partial import Begin, sample_partial
from rft_fn.collect.varied_groups import VariedGroups, judged_groups, sample_varied_groups
from rft_fn.data.curriculum import Rule, by_prompt, by_source
from rft_fn.engine.global_batch import gather_and_generate
from rft_fn.reward import Judged
from rft_fn.rollout import without_truncated
from rft_fn.types import Rollout, Sampling, Strategy
from rft_fn.types.engine import OnRow

__all__ = ["EXCLUDES", "Batch", "Collector", "Source", "collector"]

_DRAWS_FIRST = "which draws prompts before the rewards that decide their shares"
EXCLUDES = {
    ("partial", "ahead"): "which samples whole responses",
    ("partial", "rounds"): "which judge whole responses",
    ("curriculum", "ahead"): _DRAWS_FIRST,
    ("curriculum", "partial"): _DRAWS_FIRST,
}
"""Ways to collect that exclude each other, each with the reason."""

State: TypeAlias = Mapping[str, Any]
"""What a checkpoint keeps of collecting: {"ahead": rollouts, "waiting": groups, "curriculum": shares}."""


class Source(NamedTuple):
    """Where prompts come from, and the sampler and judge of their responses."""

    strategy: Strategy
    samples: AsyncSampler
    dataset: data.Dataset
    judge: Callable[[Rollout, Sequence[Any], int], Judged]  # (rollout, prompts, step), the same on every rank
    sampling: Sampling
    seed: int
    steps: int  # of the run: nothing is sampled beyond them
    sampling_block: Callable[[], AbstractContextManager[None]] = nullcontext  # what sampling happens within
    begin: Begin | None = None  # hears of each response as it ends, while others are sampled


class Batch(NamedTuple):
    """The groups of one step: N prompts with G responses each, the same on every rank."""

    prompts: list[Any]  # N
    rollout: Rollout  # B = N G rows
    judged: Judged  # reward [N, G]
    greedy: tuple[Rollout, Judged] | None = None  # one greedy answer to each prompt, where they are asked for
    metrics: Mapping[str, float] = MappingProxyType({})  # how the groups were drawn
    learned: Rollout | None = None  # the rollout with only what is learned from in its mask


class Collector(NamedTuple):
    """Collects the batch of each step: a pair like optax's Transform, and what a checkpoint needs."""

    init: Callable[[], State]
    next: Callable[[State, int], tuple[Batch, State]]  # (state, step) -> (batch, state), on every rank
    save: Callable[[State], State]  # finishes the rollouts under way, and puts them into the state


def collector(
    source: Source,
    *,
    prompts: int,
    group: int,
    ahead: int = 0,
    partial_budget: int = 0,
    rounds: int = 1,
    curriculum: int = 0,
    floor: float = 0.02,
    prompt_shares: bool = False,
    greedy: bool = False,
    mask_truncated: bool = False,
) -> Collector:
    """Return the collector of batches of `prompts` prompts with `group` responses each.

        ahead           steps by which sampling is ahead of learning, by the schedule of `due`
        partial_budget  tokens by which a response grows in a step; groups that are not finished wait for the
                        next one (`sample_partial`). It excludes `ahead`, `rounds` and `curriculum`
        rounds          most rounds of sampling, to fill the batch with groups whose rewards differ
                        (`sample_varied_groups`)
        curriculum      prompts in the mean success of each source of the dataset, which decides its share;
                        `floor` is the least p (1 - p). It excludes `ahead`. With `prompt_shares` each row of
                        the dataset has its own share, by its last `curriculum` visits
        greedy          whether a batch also has a greedy answer to each prompt, as ReMax needs
        mask_truncated  whether nothing is learned from responses that are cut off (DAPO's overlong filter);
                        their rewards count in the advantages of their group

    Keys name what is drawn, so a batch is a function of the state, the step and the weights. ValueError for
    ways that exclude each other.
    """
    ways = {"partial": partial_budget, "ahead": ahead, "rounds": rounds, "curriculum": curriculum}
    limits.exclude(ways, {"partial": 0, "ahead": 0, "rounds": 1, "curriculum": 0}, EXCLUDES)
    batches = _Batches(source, prompts, group, greedy, mask_truncated)
    if partial_budget:
        return _partial_rollouts(batches, partial_budget)
    rule = _rule(source, curriculum, floor, prompt_shares) if curriculum else None
    if rule is not None:
        return _by_success(batches, rounds, rule)
    return _by_step(batches, rounds, ahead)


class _Batches(NamedTuple):
    """What the batches of a run have in common, however their groups are collected."""

    source: Source
    prompts: int  # N
    group: int  # G
    greedy: bool
    mask_truncated: bool

    def init(self) -> State:
        """Return the state before the first step: nothing sampled, nothing waiting."""
        return {"ahead": [], "waiting": None, "curriculum": None}

    def draw(self, step: int, i: int = 0) -> tuple[list[Any], list[int]]:
        """Return the prompts of round i of a step, and a key for each."""
        return data.draw(self.source.dataset, self.prompts, step, self.source.seed, round=i)

    def answer(
        self,
        step: int,
        asked: Sequence[Any],
        keys: Sequence[int],
        *,
        n: int | None = None,
        sampling: Sampling | None = None,
        saved: Saved = (),
    ) -> tuple[Rollout, Judged]:
        """Return n responses to each prompt, by default G by the run's sampling, and their rewards [N, n].

        They are taken from `saved` where it has them.
        """
        n, sampling = n or self.group, sampling or self.source.sampling
        with self.source.sampling_block():
            rollout = self.source.samples.generate(
                asked,
                keys,
                n=n,
                sampling=sampling,
                saved=saved,
                on_row=self.on_row(asked, n),
            )
        return rollout, self.source.judge(rollout, asked, step)

    def on_row(self, asked: Sequence[Any], n: int) -> OnRow | None:
        """Return what hears of the rows of n whole responses to each prompt."""
        begin = self.source.begin
        return None if begin is None else lambda b, tokens, ended: begin(asked[b // n], tokens)

    def batch(self, groups: VariedGroups, step: int, metrics: Mapping[str, float] | None = None) -> Batch:
        """Return the batch of these groups, with what the options add to it."""
        answers = None
        if self.greedy:  # for which keys do not matter
            keys = range(len(groups.prompts))
            likeliest = Sampling(temperature=0, max_new=self.source.sampling.max_new)
            answers = self.answer(step, groups.prompts, keys, n=1, sampling=likeliest)
        learned = without_truncated(groups.rollout) if self.mask_truncated else groups.rollout
        found = groups.metrics() | dict(metrics or {})
        return Batch(groups.prompts, groups.rollout, groups.judged, answers, found, learned)

    def save(self, state: State) -> State:
        """Finish the rollouts under way, and return the state with them."""
        return {**state, "ahead": self.source.samples.save(state["ahead"])}


def _by_step(batches: _Batches, rounds: int, ahead: int) -> Collector:
    """Collect by the step's own prompts, whose responses may have been sampled `ahead` steps before."""
    samples = batches.source.samples

    def next_batch(state: State, step: int) -> tuple[Batch, State]:
        saved = state["ahead"]
        kept: list[Mapping[str, Any]] = []  # of it, for later steps
        for later in due(step, ahead, batches.source.steps) if ahead else ():
            asked, keys = batches.draw(later)
            own = samples.begin(
                asked,
                keys,
                n=batches.group,
                sampling=batches.source.sampling,
                saved=saved,
                on_row=batches.on_row(asked, batches.group),
            )
            kept += own if later > step else ()
        answer = partial(batches.answer, step, saved=saved)
        groups = sample_varied_groups(answer, partial(batches.draw, step), batches.prompts, rounds=rounds)
        return batches.batch(groups, step), {**state, "ahead": kept}

    return Collector(batches.init, next_batch, batches.save)


def _partial_rollouts(batches: _Batches, budget: int) -> Collector:
    """Collect the groups that are finished after each response grew by `budget` tokens; others wait."""
    source = batches.source

    def next_batch(state: State, step: int) -> tuple[Batch, State]:
        with source.sampling_block():
            asked, rollout, waiting = sample_partial(
                partial(gather_and_generate, source.samples.engine, source.strategy),
                batches.draw,
                step,
                n=batches.group,
                sampling=source.sampling,
                budget=budget,
                waiting=state["waiting"],
                strategy=source.strategy,
                begin=source.begin,
            )
        groups = judged_groups(asked, rollout, source.judge(rollout, asked, step))
        return batches.batch(groups, step), {**state, "ahead": [], "waiting": waiting}

    return Collector(batches.init, next_batch, batches.save)


def _by_success(batches: _Batches, rounds: int, rule: Rule) -> Collector:
    """Collect by prompts whose shares of the batch are a rule of their success so far."""

    def init() -> State:
        return {**batches.init(), "curriculum": rule.init()}

    def next_batch(state: State, step: int) -> tuple[Batch, State]:
        shares = _Shares(batches, step, rule, state["curriculum"])
        groups = sample_varied_groups(shares.answer, shares.draw, batches.prompts, rounds=rounds)
        batch = batches.batch(groups, step, rule.metrics(shares.levels))
        return batch, {**state, "ahead": [], "curriculum": shares.levels}

    return Collector(init, next_batch, batches.save)


@dataclass
class _Shares:
    """The shares of prompts within a step, which the rewards of each of its rounds change."""

    batches: _Batches
    step: int
    rule: Rule
    levels: Any

    def draw(self, i: int) -> tuple[list[Any], list[int]]:
        """Return the prompts of the next round, and a key for each."""
        asked, keys, self.levels = self.rule.draw(self.levels, self.batches.prompts, self.step)
        return asked, keys

    def answer(self, asked: Sequence[Any], keys: Sequence[int]) -> tuple[Rollout, Judged]:
        """Return the responses and their rewards, which count in the shares from now on."""
        rollout, judged = self.batches.answer(self.step, asked, keys)
        self.levels = self.rule.observe(self.levels, asked, judged.reward)
        return rollout, judged


def _rule(source: Source, window: int, floor: float, prompt_shares: bool) -> Rule | None:
    """Return the rule of the shares; None, said once, where there is one source to choose from."""
    if not prompt_shares and len(source.dataset.parts) <= 1:
        source.strategy.print(f"curriculum: off, for there is one source of data, {source.dataset.name}")
        return None
    rule_of = by_prompt if prompt_shares else by_source
    return rule_of(source.dataset, seed=source.seed, window=window, floor=floor)
