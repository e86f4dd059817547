"""Partial rollouts: a response longer than a step's budget waits, and is continued in the next step.

So no step waits for its longest responses. A group is learned from when all of its responses are finished;
until then it waits, and that is all the state there is.

Each token keeps the log-prob of the weights that sampled it, which is what corrections need. `version` stays
one number for a row, that of its oldest tokens: it bounds how stale any of them is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from einops import rearrange, repeat
from torch import Tensor

from rft_fn import reward_shaping, tree
from rft_fn import rollout as rollouts
from rft_fn.collect.gather import has_media, with_media, without_media
from rft_fn.reward import Judged, select
from rft_fn.reward import concat as concat_judged
from rft_fn.rollout import Prefix, concat, extend, prefixes, take
from rft_fn.strategy import get_fake_strategy
from rft_fn.types import Rollout, Sampling, Strategy
from rft_fn.types.engine import Generate

__all__ = [
    "Collect", "Draw", "DrawStep", "Finished", "VariedGroups", "Waiting", "judged_groups",
    "sample_partial", "sample_varied_groups",
]  # fmt: skip


# ---------- partial rollouts


class DrawStep(Protocol):
    """Draws the prompts of a step."""

    def __call__(self, step: int, /) -> tuple[Sequence[Any], Sequence[int]]:
        """(prompts, a key for each): a function of the step alone, so that a prompt is found again by it."""
        ...


@tree.struct
class Waiting:
    """Groups that are not finished, M of n rows each: the state of partial rollouts, for checkpoints."""

    rollout: Rollout  # B = M n rows, groups numbered from 0
    born: Tensor  # [M, 2] i64, the step that drew the prompt of each group, and its place in that draw


class Finished(NamedTuple):
    """The groups that a step learns from, and those that it leaves."""

    prompts: list[Any]  # M
    rollout: Rollout  # of M groups, numbered from 0
    waiting: Waiting | None  # for the next step; None where nothing waits


def sample_partial(
    generate: Generate,
    draw: DrawStep,
    step: int,
    *,
    n: int,
    sampling: Sampling,
    budget: int,
    waiting: Waiting | None = None,
    strategy: Strategy | None = None,
) -> Finished:
    """The groups that are finished after each of their responses grew by at most `budget` tokens.

    Groups that wait are continued first, and come first; then the prompts of `draw(step)` begin, n responses
    each. If no group is finished after that, all grow again, so that there is something to learn from. With
    weights that do not change, a response is the one that would have been sampled at once: it continues its
    own key's stream. Groups wait without their media, which come back with the prompts; `strategy` tells the
    ranks which of them each reads, without it each reads all. ValueError unless budget >= 1.
    """
    if budget < 1:
        raise ValueError(f"partial: expected a budget >= 1, got {budget}")
    prompts, keys = draw(step)
    limits = [min(budget, sampling.max_new)] * (len(prompts) * n)
    fresh = without_media(generate(prompts, keys, n=n, sampling=sampling, max_new=limits))
    places = torch.arange(len(prompts))
    born = torch.stack([torch.full_like(places, step), places], -1)
    groups = Waiting(rollout=fresh, born=born)

    # a step's draw is needed again for the keys and the prompts of groups that wait
    if waiting is not None:
        older = _grown(generate, draw, waiting, n, sampling, budget)
        groups = _joined(older, groups)
    while not bool(_finished(groups, n, sampling).any()):
        groups = _grown(generate, draw, groups, n, sampling, budget)

    ready = _finished(groups, n, sampling)
    done = _chosen(groups, ready, n)
    rest = None
    if not bool(ready.all()):
        rest = _chosen(groups, ~ready, n)
    prompts = _prompts(draw, done.born)
    return Finished(prompts, with_media(strategy or get_fake_strategy(), done.rollout, prompts), rest)


def _open(groups: Waiting, sampling: Sampling) -> Tensor:
    """[B] bool: the rows that may still grow."""
    return groups.rollout.truncated & (groups.rollout.mask.sum(-1) < sampling.max_new)


def _finished(groups: Waiting, n: int, sampling: Sampling) -> Tensor:
    """[M] bool: the groups none of whose rows may grow."""
    return ~_open(groups, sampling).view(-1, n).any(-1)


def _chosen(groups: Waiting, which: Tensor, n: int) -> Waiting:
    """Those groups, numbered from 0."""
    rollout = take(groups.rollout, which.repeat_interleave(n))
    number = torch.arange(int(which.sum())).repeat_interleave(n)
    return Waiting(rollout=tree.replace(rollout, group=number), born=groups.born[which])


def _joined(first: Waiting, second: Waiting) -> Waiting:
    """The groups of both, in that order."""
    counts = [len(first.born), len(second.born)]
    rollout = concat([first.rollout, second.rollout], prompts=counts)
    return Waiting(rollout=rollout, born=torch.cat([first.born, second.born]))


def _grown(
    generate: Generate, draw: DrawStep, groups: Waiting, n: int, sampling: Sampling, budget: int
) -> Waiting:
    """The groups after their unfinished rows have grown."""
    rows = _open(groups, sampling).nonzero().flatten().tolist()
    short = take(groups.rollout, rows)
    spent = short.mask.sum(-1).tolist()
    keys = _keys(draw, groups.born)
    begun = prefixes(short)
    for i, prompt in enumerate(_prompts(draw, groups.born[[b // n for b in rows]])):
        if has_media(prompt):
            begun[i] = Prefix(begun[i], short.mask[i, : len(begun[i])].tolist(), prompt)
    more = generate(
        begun,
        [(keys[b // n], b % n) for b in rows],
        n=1,
        sampling=sampling,
        max_new=[min(budget, sampling.max_new - x) for x in spent],
        start=spent,
    )

    # the longer rows take the places of the shorter ones
    size = len(groups.rollout.tokens)
    place = list(range(size))
    for i, b in enumerate(rows):
        place[b] = size + i
    longer = without_media(extend(short, more))
    both = take(concat([groups.rollout, longer]), place)
    return Waiting(rollout=tree.replace(both, group=groups.rollout.group), born=groups.born)


def _keys(draw: DrawStep, born: Tensor) -> list[int]:
    """The key of each group."""
    drawn = {step: draw(step)[1] for step in set(born[:, 0].tolist())}
    return [drawn[step][place] for step, place in born.tolist()]


def _prompts(draw: DrawStep, born: Tensor) -> list[Any]:
    """The prompt of each group."""
    drawn = {step: draw(step)[0] for step in set(born[:, 0].tolist())}
    return [drawn[step][place] for step, place in born.tolist()]


# ---------- dynamic sampling: draw prompts again until enough of their groups have rewards that differ


class Draw(Protocol):
    """Draws the prompts of a round."""

    def __call__(self, round: int, /) -> tuple[Sequence[Any], Sequence[int]]:
        """(prompts, a key for each) of round 0, 1, ... of this step: a function of its number alone."""
        ...


class Collect(Protocol):
    """Samples and judges responses."""

    def __call__(self, prompts: Sequence[Any], keys: Sequence[int], /) -> tuple[Rollout, Judged]:
        """(rollout, rewards) of the global batch, its groups in the order of the prompts."""
        ...


class VariedGroups(NamedTuple):
    """A batch of n groups, and how many had to be drawn for it."""

    prompts: list[Any]  # n
    rollout: Rollout  # of n groups, numbered 0 to n - 1
    judged: Judged
    rounds: int  # times drawn
    drawn: int  # groups drawn
    varied: int  # of them, groups whose rewards differ

    def metrics(self) -> dict[str, float]:
        """The number of rounds, and the share of drawn groups whose rewards differ."""
        return {"sampling/rounds": float(self.rounds), "sampling/varied": self.varied / max(self.drawn, 1)}


class _Batch(NamedTuple):
    prompts: list[Any]
    rollout: Rollout
    judged: Judged


def judged_groups(prompts: Sequence[Any], rollout: Rollout, judged: Judged) -> VariedGroups:
    """The groups of one round, all of which are taken."""
    varied = int(reward_shaping.varied(judged.reward).sum())
    return VariedGroups(list(prompts), rollout, judged, 1, len(prompts), varied)


def sample_varied_groups(collect: Collect, draw: Draw, n: int, *, rounds: int = 1) -> VariedGroups:
    """n groups whose rewards differ, drawn and sampled in at most `rounds` rounds.

    The first n groups with variance are taken in the order in which they were drawn. If the bound is reached
    before there are n, the first of the others fill the batch: their advantages are 0, so only the shapes
    need them. `rounds=1` takes whatever is drawn. The result is a function of the draws alone, so a resumed
    run has the same. DAPO's dynamic sampling, arXiv 2503.14476.

    ValueError unless rounds >= 1, and for draws of fewer than n prompts in all.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected >= 1, got {rounds}")

    # every rank sees the same rewards, so all of them stop after the same round
    parts: list[_Batch] = []
    varied = 0
    for i in range(rounds):
        prompts, keys = draw(i)
        rollout, judged = collect(prompts, keys)
        parts.append(_Batch(list(prompts), rollout, judged))
        varied += int(reward_shaping.varied(judged.reward).sum())
        if varied >= n:
            break

    drawn = sum(len(p.prompts) for p in parts)
    if drawn < n:
        raise ValueError(f"draw: expected {n} prompts or more in {rounds} rounds, got {drawn}")
    if len(parts) == 1 and drawn == n:
        return VariedGroups(*parts[0], 1, drawn, varied)

    # groups with variance first, each kind in the order of the draws
    batch = _concat(parts)
    differs = reward_shaping.varied(batch.judged.reward).tolist()
    order = [g for g in range(drawn) if differs[g]] + [g for g in range(drawn) if not differs[g]]
    return VariedGroups(*_select(batch, order[:n]), len(parts), drawn, varied)


def _concat(parts: Sequence[_Batch]) -> _Batch:
    """The groups of all parts in order, padded to the longest and numbered on."""
    rollout = rollouts.concat([p.rollout for p in parts], prompts=[len(p.prompts) for p in parts])
    judged = concat_judged([p.judged for p in parts])
    return _Batch([x for p in parts for x in p.prompts], rollout, judged)


def _select(batch: _Batch, groups: Sequence[int]) -> _Batch:
    """Those groups, in that order, numbered from 0."""
    size = batch.judged.reward.shape[1]
    rows_of_group = rearrange(torch.arange(len(batch.rollout.tokens)), "(n g) -> n g", g=size)
    rollout = rollouts.take(batch.rollout, rearrange(rows_of_group[list(groups)], "n g -> (n g)"))
    number = repeat(torch.arange(len(groups)), "n -> (n g)", g=size).to(rollout.group)
    rollout = tree.replace(rollout, group=number)
    return _Batch([batch.prompts[i] for i in groups], rollout, select(batch.judged, groups))
