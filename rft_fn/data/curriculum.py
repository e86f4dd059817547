"""A curriculum: the shares of sources, or of single prompts, follow how often they are answered well.

The share of source k, or of prompt k, is proportional to

    weight_k max(p_k (1 - p_k), floor)

with p_k the running mean of its rewards and weight_k the share that it was given; prompts have equal parts of
that of their source. p (1 - p) is the variance of a reward that is 1 with probability p, so prompts come from
where the rewards of a group differ most: neither from levels that are solved, nor from those that are never
solved (arXiv 2504.03380). The floor keeps all in the draw, so that their means stay known.

`by_source` and `by_prompt` are the functions of a run, over an explicit state.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import rng, tree
from rft_fn.data.dataset import Dataset
from rft_fn.data.dataset import draw as draw_part

__all__ = [
    "Curriculum", "PromptCurriculum", "Rule", "by_prompt", "by_source", "check_rows", "draw", "init",
    "metrics", "observe", "shares",
]  # fmt: skip


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


# ---------- the functions of a run: by sources, or by single prompts


class Rule(NamedTuple):
    """How a run draws its prompts: functions over a state that a checkpoint holds."""

    init: Callable[[], Any]
    draw: Callable[
        [Any, int, int], tuple[list[Any], list[int], Any]
    ]  # (state, n, step) -> prompts, keys, state
    observe: Callable[[Any, Sequence[Any], Tensor], Any]  # (state, prompts, rewards [N, G]) -> state
    metrics: Callable[[Any], dict[str, float]]


def by_source(dataset: Dataset, *, seed: int, window: int, floor: float) -> Rule:
    """Return the rule by sources: `init`, `draw`, `observe` and `metrics` of this module."""
    return Rule(
        init=partial(init, dataset),
        draw=lambda state, n, step: draw(state, dataset, n, step, seed, floor=floor),
        observe=lambda state, prompts, reward: observe(state, dataset, prompts, reward, window=window),
        metrics=lambda state: metrics(state, dataset, floor=floor),
    )


@tree.struct
class PromptCurriculum:
    """The state of a curriculum over the M rows of a data set, source after source."""

    success: Tensor  # [M] f64, the running mean of each row's rewards, which are clipped to [0, 1]
    drawn: Tensor  # [M] i64, how many times each row was drawn


def check_rows(dataset: Dataset, n: int) -> None:
    """Raise ValueError for data without end, and for fewer than n rows: a draw has no row twice."""
    for part in dataset.parts or (dataset,):
        if part.size is None:
            raise ValueError(
                f"curriculum_by: expected source with rows that never come again, {part.name}, got prompt; a "
                "file has rows that do"
            )
    size = sum(part.size or 0 for part in dataset.parts or (dataset,))
    if n > size:
        raise ValueError(f"prompts: expected at most the {size} rows of {dataset.name}, got {n}")


def by_prompt(dataset: Dataset, *, seed: int, window: int, floor: float) -> Rule:
    """Return the rule by single prompts, of data with rows that come again.

    A draw takes n rows one after the other, each with a probability proportional to its share among those
    that are left: the n first of exponential clocks, -log(u) / share (Efraimidis and Spirakis 2006), with u
    drawn from the seed and the number of rows drawn before. p begins at 0.5, so that rows that were never
    drawn come soon; each visit moves it by 1 / window to the mean of the group's rewards. ValueError as of
    `check_rows`.
    """
    check_rows(dataset, 1)
    parts = dataset.parts or (dataset,)
    sizes = [part.size or 0 for part in parts]
    first = [sum(sizes[:k]) for k in range(len(sizes))]
    given = dataset.mixture.weights if dataset.mixture is not None else (1,)
    weight = torch.cat([torch.full((n,), w / n, dtype=torch.float64) for w, n in zip(given, sizes) if n])

    def start() -> PromptCurriculum:
        half = torch.full((sum(sizes),), 0.5, dtype=torch.float64)
        return PromptCurriculum(success=half, drawn=torch.zeros(sum(sizes), dtype=torch.int64))

    def share(state: PromptCurriculum) -> Tensor:
        if len(state.success) != len(weight):
            raise ValueError(f"data: expected the {len(state.success)} rows so far, got {len(weight)}")
        x = weight * (state.success * (1 - state.success)).clamp(min=floor)
        return x / x.sum()

    def row_of(prompt: Any) -> int:
        if dataset.mixture is None:
            return prompt.index
        k, j = dataset.mixture.source(prompt.index)
        return first[k] + j

    def prompt_of(row: int) -> Any:
        if dataset.mixture is None:
            return dataset.prompt(row)
        k = max(k for k, begin in enumerate(first) if begin <= row and sizes[k])
        return dataset.prompt(dataset.mixture.place(k, row - first[k]))

    def draw_rows(
        state: PromptCurriculum, n: int, step: int
    ) -> tuple[list[Any], list[int], PromptCurriculum]:
        check_rows(dataset, n)
        key = rng.fold_in(seed, "clocks", int(state.drawn.sum()))
        u = torch.rand(len(weight), generator=rng.generator(key), dtype=torch.float64)
        rows = (u.log() / share(state)).topk(n).indices
        keys = [rng.fold_in(seed, "visit", i, int(state.drawn[i])) for i in rows.tolist()]
        drawn = state.drawn.index_add(0, rows, torch.ones_like(rows))
        return [prompt_of(i) for i in rows.tolist()], keys, tree.replace(state, drawn=drawn)

    def note(state: PromptCurriculum, prompts: Sequence[Any], reward: Tensor) -> PromptCurriculum:
        mean = reward.double().clamp(0, 1).mean(-1)
        rows = torch.tensor([row_of(p) for p in prompts])
        return tree.replace(
            state, success=state.success.index_add(0, rows, (mean - state.success[rows]) / window)
        )

    def summary(state: PromptCurriculum) -> dict[str, float]:
        x, seen = share(state), state.drawn > 0
        return {
            "curriculum/seen": float(seen.double().mean()),
            "curriculum/success": float(state.success[seen].mean()) if seen.any() else 0.5,
            "curriculum/effective": float(1 / x.square().sum() / len(x)),
        }

    return Rule(start, draw_rows, note, summary)
