"""Dynamic sampling: prompts are drawn until enough groups have rewards that differ."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange

from rft_fn import reward_shaping, tree
from rft_fn.reward import Judged, select
from rft_fn.reward import concat as concat_judged
from rft_fn.rollout import concat, take
from rft_fn.types import Rollout

__all__ = ["VariedGroups", "judged_groups", "sample_varied_groups"]

Draw = Callable[[int], tuple[Sequence[Any], Sequence[int]]]
"""Draws (prompts, a key for each) by the number of a round; pure."""

Collect = Callable[[Sequence[Any], Sequence[int]], tuple[Rollout, Judged]]
"""Samples and judges: (prompts, keys) -> (rollout, rewards), the groups in the order of the prompts."""


class VariedGroups(NamedTuple):
    """A batch of n groups, and how many had to be drawn for it."""

    prompts: list[Any]  # n
    rollout: Rollout  # of n groups, numbered 0 to n - 1
    judged: Judged
    rounds: int  # times drawn
    drawn: int  # groups drawn
    varied: int  # of them, groups with rewards that differ

    def metrics(self) -> dict[str, float]:
        """Return the number of rounds, and the share of drawn groups with rewards that differ."""
        return {"sampling/rounds": float(self.rounds), "sampling/varied": self.varied / max(self.drawn, 1)}


def judged_groups(prompts: Sequence[Any], rollout: Rollout, judged: Judged) -> VariedGroups:
    """Return all groups of one round, whether or not their rewards differ."""
    varied = int(reward_shaping.varied(judged.reward).sum())
    return VariedGroups(list(prompts), rollout, judged, 1, len(prompts), varied)


def sample_varied_groups(collect: Collect, draw: Draw, n: int, *, rounds: int = 1) -> VariedGroups:
    """Sample n groups with rewards that differ, in at most `rounds` rounds.

    The first n groups with variance are taken in the order in which they were drawn. If the bound is reached
    before there are n, the first of the others fill the batch: their advantages are 0, so only the shapes
    need them. `rounds=1` takes whatever is drawn. The result is a function of the draws only, so a resumed
    run has the same. DAPO's dynamic sampling, arXiv 2503.14476.

    ValueError unless rounds >= 1, and for draws of fewer than n prompts in all.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected >= 1, got {rounds}")

    # every rank sees the same rewards, so all of them stop after the same round
    prompts: list[Any] = []
    counts: list[int] = []
    rollouts: list[Rollout] = []
    scored: list[Judged] = []
    varied = 0
    for i in range(rounds):
        asked, keys = draw(i)
        rollout, judged = collect(asked, keys)
        prompts += asked
        counts.append(len(asked))
        rollouts.append(rollout)
        scored.append(judged)
        varied += int(reward_shaping.varied(judged.reward).sum())
        if varied >= n:
            break

    drawn = len(prompts)
    if drawn < n:
        raise ValueError(f"draw: expected {n} prompts or more in {rounds} rounds, got {drawn}")
    if len(counts) == 1 and drawn == n:
        return VariedGroups(prompts, rollouts[0], scored[0], 1, drawn, varied)

    # groups with variance first, each kind in the order of the draws, numbered from 0
    rollout = concat(rollouts, prompts=counts)
    judged = concat_judged(scored)
    differs = reward_shaping.varied(judged.reward).tolist()
    order = sorted(range(drawn), key=lambda g: not differs[g])[:n]
    size = judged.reward.shape[1]
    rows = rearrange(torch.arange(len(rollout.tokens)), "(n g) -> n g", g=size)[order].flatten()
    number = torch.arange(n).repeat_interleave(size).to(rollout.group)
    return VariedGroups(
        prompts=[prompts[g] for g in order],
        rollout=tree.replace(take(rollout, rows), group=number),
        judged=select(judged, order),
        rounds=len(counts),
        drawn=drawn,
        varied=varied,
    )
