"""Dynamic sampling: draw prompts again until enough of their groups have rewards that differ."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from einops import rearrange, repeat

from rft_fn import reward_shaping, tree
from rft_fn import rollout as rollouts
from rft_fn.reward import Judged, select
from rft_fn.reward import concat as concat_judged
from rft_fn.types import Rollout

__all__ = ["Collect", "Draw", "VariedGroups", "judged_groups", "sample_varied_groups"]


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
