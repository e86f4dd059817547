"""Dynamic sampling: draw again until the batch is full of groups that have something to teach."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import packing, reward_shaping, tree
from rft_fn.reward import Judged, concat, select
from rft_fn.types import Media, Rollout

__all__ = ["Filled", "fill_groups"]

Draw = Callable[[int], tuple[Sequence[Any], Sequence[int]]]  # round -> (prompts, keys)
Collect = Callable[[Sequence[Any], Sequence[int]], tuple[Rollout, Judged]]


class Filled(NamedTuple):
    """A batch of n groups, and what it took."""

    prompts: list[Any]  # n
    rollout: Rollout  # of n groups, numbered 0 to n - 1
    judged: Judged
    rounds: int  # times drawn
    drawn: int  # groups drawn
    varied: int  # of them, groups whose rewards differ

    def metrics(self) -> dict[str, float]:
        """What to log: rounds, and the share of drawn groups whose rewards differ."""
        return {"sampling/rounds": float(self.rounds), "sampling/varied": self.varied / max(self.drawn, 1)}


class _Batch(NamedTuple):
    prompts: list[Any]
    rollout: Rollout
    judged: Judged


def _wide(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[1])) if x.dim() == 2 else x


def _concat(parts: Sequence[_Batch]) -> _Batch:
    """The groups of all parts in order, padded to the longest; `_select` numbers them."""
    size = max(p.rollout.tokens.shape[1] for p in parts)
    plain = [tree.map(lambda x: _wide(x, size), tree.replace(p.rollout, media=None)) for p in parts]
    rollout = tree.map(lambda *x: torch.cat(x), *plain)
    counts = [len(p.rollout.tokens) for p in parts]
    rollout = tree.replace(rollout, media=Media.concat([p.rollout.media for p in parts], counts))
    judged = concat([p.judged for p in parts])
    return _Batch([x for p in parts for x in p.prompts], rollout, judged)


def _select(batch: _Batch, groups: Sequence[int]) -> _Batch:
    """Those groups, in that order, numbered from 0."""
    size = batch.judged.reward.shape[1]
    index = torch.tensor(list(groups), dtype=torch.long)
    rows = (index[:, None] * size + torch.arange(size)).flatten()
    rollout = packing.take(batch.rollout, rows)
    number = torch.arange(len(groups)).repeat_interleave(size).to(rollout.group)
    rollout = tree.replace(rollout, group=number)
    judged = select(batch.judged, groups)
    return _Batch([batch.prompts[i] for i in groups], rollout, judged)


def fill_groups(collect: Collect, draw: Draw, n: int, *, rounds: int = 1) -> Filled:
    """n groups whose rewards differ, from as many rounds of drawing and sampling as it takes, at most
    `rounds`.

    draw(round) -> (prompts, keys); collect(prompts, keys) -> (Rollout, Judged), the global batch with its
    groups in order. The first n groups with variance are taken in the order in which they were drawn; if the
    bound is reached before there are n, the first of the others fill the batch (their advantages are 0, so
    only the shapes need them). DAPO's dynamic sampling, arXiv 2503.14476. `rounds` = 1 takes what comes. A
    function of its draws alone, so a resumed run does the same. ValueError unless rounds >= 1, and for draws
    of fewer than n prompts in all.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected >= 1, got {rounds}")
    parts: list[_Batch] = []
    varied = 0
    for i in range(rounds):
        prompts, keys = draw(i)
        parts.append(_Batch(list(prompts), *collect(prompts, keys)))
        varied += int(reward_shaping.varied(parts[-1].judged.reward).sum())
        if varied >= n:
            break
    drawn = sum(len(p.prompts) for p in parts)
    if drawn < n:
        raise ValueError(f"draw: expected {n} prompts or more in {rounds} rounds, got {drawn}")
    if len(parts) == 1 and drawn == n:
        return Filled(*parts[0], 1, drawn, varied)
    batch = _concat(parts)
    teaches = reward_shaping.varied(batch.judged.reward).tolist()
    order = sorted(range(drawn), key=lambda g: (not teaches[g], g))[:n]
    return Filled(*_select(batch, order), len(parts), drawn, varied)
