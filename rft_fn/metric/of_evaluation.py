"""Numbers of an evaluation: the answer of a majority, and intervals over problems."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rft_fn import check, rng

__all__ = ["bootstrap", "maj_at_k"]

_AT_ONCE = 1 << 22  # resampled values


def maj_at_k(correct: Tensor, answer: Tensor, k: int) -> Tensor:
    """Return the accuracy of the most frequent of k answers, maj@k, [N] float64.

    `answer` [N, G] int64 numbers the answers to a problem: equal answers have equal numbers, and a response
    without one has -1 and no vote. `correct` [N, G] is bool. The mean over the G // k disjoint blocks of k
    samples, which is unbiased; of answers with equally many votes each counts alike, and a block without any
    vote is wrong. ValueError unless 1 <= k <= G. (arXiv 2203.11171.)
    """
    sizes = check.shapes(correct=(correct, "N G"), answer=(answer, "N G"))
    if not 1 <= k <= sizes["G"]:
        raise ValueError(f"k: expected between 1 and the {sizes['G']} samples of each problem, got {k}")
    blocks = sizes["G"] // k
    right = correct[:, : blocks * k].reshape(-1, blocks, k).double()
    given = answer[:, : blocks * k].reshape(-1, blocks, k)
    votes = (given[..., :, None] == given[..., None, :]).sum(-1) * (given >= 0)  # [N, blocks, k]
    most = votes.amax(-1, keepdim=True)
    winner = torch.where((votes == most) & (most > 0), 1 / votes.clamp(min=1).double(), 0)  # 1 for an answer
    return ((winner * right).sum(-1) / winner.sum(-1).clamp(min=1)).mean(-1)


def bootstrap(
    value: Tensor,
    *,
    seed: int,
    level: float = 0.95,
    draws: int = 4000,
    bounds: Sequence[float] = (0.0, 1.0),
) -> tuple[float, float]:
    """Return the interval of a mean over problems, by the percentiles of means of resampled problems.

    `value` [N] is one number for each problem, within `bounds`: the samples of a problem are not resampled,
    since they depend on each other. Where all values are the same number c, resampling gives c alone: the
    interval then has the means under which N times c has a probability of at least (1 - level) / 2, by
    P(not c) >= |mean - c| / (largest distance from c). ValueError for no values, and for some beyond
    `bounds`. (Efron 1979; for language models arXiv 2411.00640.)
    """
    check.shapes(value=(value, "N"))
    low, high = bounds
    x = value.detach().double().cpu()
    if not len(x) or not bool(((x >= low) & (x <= high)).all()):
        raise ValueError(f"value: expected numbers in [{low:g}, {high:g}], got {x.tolist()[:8]}")
    tail = (1 - level) / 2
    first = float(x[0])
    if bool((x == first).all()):
        reach = (1 - tail ** (1 / len(x))) * max(first - low, high - first)
        return max(first - reach, low), min(first + reach, high)
    drawn = rng.generator(seed)
    part = max(_AT_ONCE // len(x), 1)
    means = []
    for at in range(0, draws, part):
        index = torch.randint(len(x), (min(part, draws - at), len(x)), generator=drawn)
        means.append(x[index].mean(-1))
    ends = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return ends[0].item(), ends[1].item()
