"""A curriculum: the shares of several sources follow how often their prompts are answered well.

The share of source k is proportional to

    weight_k max(p_k (1 - p_k), floor)

with p_k the running mean of its rewards and weight_k the share that it was given. p (1 - p) is the variance
of a reward that is 1 with probability p, so prompts come from where the rewards of a group differ most:
neither from levels that are solved, nor from those that are never solved (arXiv 2504.03380). The floor keeps
every source in the draw, so that its mean stays known.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn import rng, tree
from rft_fn.data.dataset import Dataset
from rft_fn.data.dataset import draw as draw_part

__all__ = ["Curriculum", "draw", "init", "metrics", "observe", "shares"]


@tree.struct
class Curriculum:
    """The state of a curriculum over K sources."""

    success: Tensor  # [K] f64, the running mean of each source's rewards, which are clipped to [0, 1]
    owed: Tensor  # [K] f64, the prompts that each source should have had beyond those that it had; sums to 0
    drawn: Tensor  # [K] i64, the prompts that were drawn from each source


def init(dataset: Dataset) -> Curriculum:
    """Begin with half of the prompts solved in every source. ValueError for a single source."""
    count = len(dataset.parts)
    if count < 2:
        raise ValueError(f"curriculum: expected two sources or more, got one, {dataset.name}")
    half = torch.full((count,), 0.5, dtype=torch.float64)
    return Curriculum(success=half, owed=torch.zeros_like(half), drawn=torch.zeros(count, dtype=torch.int64))


def shares(state: Curriculum, dataset: Dataset, *, floor: float) -> Tensor:
    """Return [K] f64: the share of each source in the next draw. They sum to 1."""
    if not 0 < floor <= 0.25:
        raise ValueError(f"floor: expected above 0 and at most 0.25, the largest p (1 - p), got {floor}")
    assert dataset.mixture is not None
    weight = torch.tensor(dataset.mixture.weights, dtype=torch.float64)
    share = weight * (state.success * (1 - state.success)).clamp(min=floor)
    return share / share.sum()


def draw(
    state: Curriculum, dataset: Dataset, n: int, step: int, seed: int, *, floor: float
) -> tuple[list[Any], list[int], Curriculum]:
    """Return (n prompts, a key for each, the state after them).

    Each of n places goes to the source that is owed most, the first of equal ones. A source hands out its
    rows in its own order, from where it stopped. It depends on nothing but the arguments, and is the same on
    every rank. ValueError unless n >= 1 and step >= 0.
    """
    if n < 1:
        raise ValueError(f"prompts: expected to take at least 1, got {n}")

    # how many prompts each source gives
    owed = (state.owed + n * shares(state, dataset, floor=floor)).tolist()
    count = [0] * len(owed)
    for _ in range(n):
        k = owed.index(max(owed))
        owed[k] -= 1
        count[k] += 1

    # its next rows, by their indices in the mixture
    assert dataset.mixture is not None
    prompts, keys = [], []
    for k, part in enumerate(dataset.parts):
        if not count[k]:
            continue
        start = int(state.drawn[k])
        own = rng.fold_in(seed, "source", k) if part.size is not None else seed
        rows, _ = draw_part(part, count[k], step, own, start=start)
        for nth, row in enumerate(rows, start):
            prompts.append(dataset.prompt(dataset.mixture.place(k, row.index)))
            # by nth, so that a row that comes again is sampled anew
            keys.append(rng.fold_in(seed, "curriculum", k, nth))
    after = tree.replace(
        state, owed=torch.tensor(owed, dtype=torch.float64), drawn=state.drawn + torch.tensor(count)
    )
    return prompts, keys, after


def observe(
    state: Curriculum, dataset: Dataset, prompts: Sequence[Any], reward: Tensor, *, window: int
) -> Curriculum:
    """Return the state after the rewards [N, G] of prompts that were drawn together.

    With m the mean of a source's rewards, clipped to [0, 1], over its c prompts:

        p <- p + (1 - (1 - 1 / window)^c) (m - p)

    which is what c prompts of mean m do to an exponential mean, one after the other. ValueError unless
    window >= 1, and for rewards that are not one row for each prompt.
    """
    if window < 1:
        raise ValueError(f"window: expected at least 1 prompt, got {window}")
    if len(reward) != len(prompts):
        raise ValueError(f"reward: expected [N, G] with N = {len(prompts)}, got {list(reward.shape)}")
    assert dataset.mixture is not None

    # the mean reward of each prompt, and the source that it came from
    mean = reward.double().clamp(0, 1).mean(-1)
    source = torch.tensor([dataset.mixture.source(p.index)[0] for p in prompts])

    success = state.success.clone()
    for k in source.unique().tolist():
        mine = mean[source == k]
        rate = 1 - (1 - 1 / window) ** len(mine)
        success[k] += rate * (mine.mean() - success[k])
    return tree.replace(state, success=success)


def metrics(state: Curriculum, dataset: Dataset, *, floor: float) -> dict[str, float]:
    """Return share/SOURCE of the next draw and success/SOURCE of the draws before, of every source."""
    share = shares(state, dataset, floor=floor)
    values = {}
    for k, part in enumerate(dataset.parts):
        values[f"share/{part.name}"] = float(share[k])
        values[f"success/{part.name}"] = float(state.success[k])
    return values
