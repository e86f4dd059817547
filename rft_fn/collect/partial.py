"""Partial rollouts: a response longer than a step's budget waits, and is continued in the next step.

So no step waits for its longest responses. A group is learned from when all of its responses are finished;
until then it waits, and that is all the state there is. Each token keeps the log-prob of the weights that
sampled it, which is what corrections need, and its version in `versions`; `version` is that of the oldest.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.engine.global_batch import has_media, with_media, without_media
from rft_fn.rollout import Prefix, concat, extend, prefixes, take
from rft_fn.strategy import get_fake_strategy
from rft_fn.types import Rollout, Sampling, Strategy

__all__ = ["Begin", "Finished", "Waiting", "sample_partial"]

Draw = Callable[[int], tuple[Sequence[Any], Sequence[int]]]
"""Draws (prompts, a key for each) of a step; pure."""


Begin = Callable[[Any, Sequence[int]], None]
"""Hears of a whole response: (its prompt, its tokens)."""

GenerateAll = Callable[..., Rollout]
"""Samples the rollout of the global batch, as `gather_and_generate` does on an engine and a strategy."""


@tree.struct
class Waiting:
    """Groups that are not finished, M of n rows each: the state of partial rollouts.

    Checkpoints have this name and the module's: renamed, older ones would not resume.
    """

    rollout: Rollout  # B = M n rows, groups numbered from 0
    born: Tensor  # [M, 2] i64, the step that drew the prompt of each group, and its place in that draw


class Finished(NamedTuple):
    """The groups that a step learns from, and the groups that it leaves."""

    prompts: list[Any]  # M
    rollout: Rollout  # of M groups, numbered from 0
    waiting: Waiting | None  # for the next step; None where nothing waits


def sample_partial(
    generate: GenerateAll,
    draw: Draw,
    step: int,
    *,
    n: int,
    sampling: Sampling,
    budget: int,
    waiting: Waiting | None = None,
    strategy: Strategy | None = None,
    begin: Begin | None = None,
) -> Finished:
    """Return the groups that are finished after each of their responses grew by at most `budget` tokens.

    Groups that wait are continued first, and come first; then the prompts of `draw(step)` begin, n responses
    each. If no group is finished after that, all grow again, so that there is something to learn from. With
    weights that do not change, a response is the one that would have been sampled at once: it continues its
    own key's stream. Groups wait without their media, which come back with the prompts; `strategy` tells the
    ranks which of them each reads, without it each reads all. `begin` hears of each response that is whole,
    as (prompt, tokens), while others are sampled. ValueError unless budget >= 1.
    """
    if budget < 1:
        raise ValueError(f"partial: expected a budget >= 1, got {budget}")
    prompts, keys = draw(step)
    limits = [min(budget, sampling.max_new)] * (len(prompts) * n)
    told = _telling(generate, begin, sampling, [(p, []) for p in prompts for _ in range(n)])
    fresh = without_media(told(prompts, keys, n=n, sampling=sampling, max_new=limits))
    places = torch.arange(len(prompts))
    born = torch.stack([torch.full_like(places, step), places], -1)
    groups = Waiting(rollout=fresh, born=born)

    # a step's draw is needed again for the keys and the prompts of groups that wait
    if waiting is not None:
        older = _grown(generate, draw, waiting, n, sampling, budget, begin)
        counts = [len(older.born), len(born)]
        groups = Waiting(
            rollout=concat([older.rollout, fresh], prompts=counts), born=torch.cat([older.born, born])
        )
    while not bool(_finished(groups, n, sampling).any()):
        groups = _grown(generate, draw, groups, n, sampling, budget, begin)

    ready = _finished(groups, n, sampling)
    done = _chosen(groups, ready, n)
    rest = None if bool(ready.all()) else _chosen(groups, ~ready, n)
    prompts, _ = _drawn(draw, done.born)
    return Finished(prompts, with_media(strategy or get_fake_strategy(), done.rollout, prompts), rest)


def _open(groups: Waiting, sampling: Sampling) -> Tensor:
    """Return [B] bool: the rows that may still grow."""
    return groups.rollout.truncated & (groups.rollout.mask.sum(-1) < sampling.max_new)


def _finished(groups: Waiting, n: int, sampling: Sampling) -> Tensor:
    """Return [M] bool: the groups without a row that may grow."""
    return ~_open(groups, sampling).view(-1, n).any(-1)


def _chosen(groups: Waiting, which: Tensor, n: int) -> Waiting:
    """Select groups, numbered from 0."""
    rollout = take(groups.rollout, which.repeat_interleave(n))
    number = torch.arange(int(which.sum())).repeat_interleave(n)
    return Waiting(rollout=tree.replace(rollout, group=number), born=groups.born[which])


def _telling(
    generate: GenerateAll, begin: Begin | None, sampling: Sampling, before: Sequence[tuple[Any, list[int]]]
) -> GenerateAll:
    """Return `generate` as it tells of whole rows; as it is, where nobody hears, for one that cannot."""
    return generate if begin is None else partial(generate, on_row=partial(_tell, begin, sampling, before))


def _tell(
    begin: Begin,
    sampling: Sampling,
    before: Sequence[tuple[Any, list[int]]],
    b: int,
    new: Sequence[int],
    ended: bool,
) -> None:
    """Tell of row b if it is whole; `before` has the prompt and the earlier tokens of each row."""
    prompt, tokens = before[b][0], [*before[b][1], *new]
    if ended or len(tokens) >= sampling.max_new:
        begin(prompt, tokens)


def _grown(
    generate: GenerateAll,
    draw: Draw,
    groups: Waiting,
    n: int,
    sampling: Sampling,
    budget: int,
    begin: Begin | None,
) -> Waiting:
    """Grow the unfinished rows of the groups."""
    rows = _open(groups, sampling).nonzero().flatten().tolist()
    short = take(groups.rollout, rows)
    spent = short.mask.sum(-1).tolist()
    prompts, keys = _drawn(draw, groups.born)
    begun = prefixes(short)
    for i, b in enumerate(rows):
        if has_media(prompts[b // n]):
            begun[i] = Prefix(begun[i], short.mask[i, : len(begun[i])].tolist(), prompts[b // n])
    sampled = [row[own].tolist() for row, own in zip(short.tokens, short.mask)]
    told = _telling(generate, begin, sampling, [(prompts[b // n], x) for b, x in zip(rows, sampled)])
    more = told(
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


def _drawn(draw: Draw, born: Tensor) -> tuple[list[Any], list[int]]:
    """Return the prompt and the key of each group."""
    drawn = {step: draw(step) for step in set(born[:, 0].tolist())}
    prompts = [drawn[step][0][place] for step, place in born.tolist()]
    return prompts, [drawn[step][1][place] for step, place in born.tolist()]
