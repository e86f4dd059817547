"""The prompts of a step, as a pure function of the step.

There is no loader, no cursor and no state to lose: `draw(dataset, n, step, seed)` is the same on every rank
and in every resumed run.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rft_fn import rng
from rft_fn.data import tasks
from rft_fn.data.dataset import Dataset, ItemT, Mixture
from rft_fn.data.rows import Endless, Row
from rft_fn.data.wrong_answers import mixture_of

__all__ = ["Answer", "draw", "take", "task_rows"]


# ---------- the prompts of a step, as a pure function of the step


# The rows of a generator between one round of a step and the next, so that no row is drawn in two rounds.
_ROUND = 1 << 40
_STARTS = 1 << 39  # where the rows of a generator begin for one seed or another


def draw(
    dataset: Dataset[ItemT], n: int, step: int, seed: int, *, round: int = 0, start: int | None = None
) -> tuple[list[ItemT], list[int]]:
    """(n prompts, a key for each) of a step.

    It is a function of the arguments alone. It draws the places `start` to `start + n` of an endless sequence
    of prompts: the rows of a generator in order, or the data set over and over, each pass in an order drawn
    from (seed, pass). The rows of a generator begin with its first for the seed that it was loaded with, and
    for any other seed at a row drawn from that, so that two seeds draw other rows. `start` is step * n unless
    it is given. So with the same n at every step each pass draws each row once, and a generator none twice. A
    caller whose n changes from step to step keeps the number of prompts drawn before in its state, and gives
    that as `start`: otherwise rows repeat, and others are skipped.

    The key of a prompt is fold_in(seed, step, index): a prompt that comes again is sampled anew, in a later
    step or, where a pass ends within one, in the same. `round` > 0 gives more prompts for the same step, for
    dynamic sampling: places in a sequence of that round, with another order and other keys. Two rounds share
    no row of a generator. ValueError unless n >= 1 and step, round, start >= 0.
    """
    _check_count(n)
    for name, x in (("step", step), ("round", round), ("start", start or 0)):
        if x < 0:
            raise ValueError(f"{name}: expected >= 0, got {x}")

    # the rows at these places; a later round has another order
    if start is None:
        start = step * n
    order = seed
    if round:
        order = rng.fold_in(seed, "round", round)
    index = _rows_at(dataset, range(start, start + n), seed, order, round)
    prompts = [dataset.prompt(i) for i in index]

    # a row that comes twice in a step has another key the second time
    keys = []
    times = Counter()
    for i, p in zip(index, prompts):
        key = rng.fold_in(order, step, p.index)
        if times[i]:
            key = rng.fold_in(key, "again", times[i])
        keys.append(key)
        times[i] += 1
    return prompts, keys


def take(dataset: Dataset[ItemT], n: int, seed: int) -> tuple[list[ItemT], list[int]]:
    """(the first n prompts in order, a key for each), for evaluation.

    All of a finite data set if it has fewer. Of a mixture the first of each part, by the shares until a part
    has no more. The first of a generator are those that `draw` begins with for that seed: other rows for
    another seed than the one that it was loaded with. ValueError unless n >= 1.
    """
    _check_count(n)
    if dataset.mixture is not None:
        places = dataset.mixture.first(n, [part.size for part in dataset.parts])
        index = []
        for k, j in map(dataset.mixture.source, places):
            index.append(dataset.mixture.place(k, j + first_row(dataset.parts[k], seed)))
    elif dataset.size is None:
        begin = first_row(dataset, seed)
        index = range(begin, begin + n)
    else:
        index = range(min(n, dataset.size))
    keys = [rng.fold_in(seed, "take", i) for i in range(len(index))]
    return [dataset.prompt(i) for i in index], keys


def first_row(dataset: Dataset, seed: int) -> int:
    """Return the row that a generator begins with for a seed; 0 of other data sets."""
    if dataset.size is not None or dataset.mixture is not None or seed == dataset.seed:
        return 0
    return rng.fold_in(seed, "rows") % _STARTS


def _check_count(n: int) -> None:
    if n < 1:
        raise ValueError(f"prompts: expected to take at least 1, got {n}")


def _rows_at(dataset: Dataset, places: Sequence[int], seed: int, order: int, round: int) -> list[int]:
    """The row at each of these places of the endless sequence.

    `seed` chooses the rows of a generator, `order` the order of others.
    """
    if dataset.mixture is not None:
        return _mixed_rows(dataset, dataset.mixture, places, seed, order, round)
    if dataset.size is None:
        begin = first_row(dataset, seed) + round * _ROUND
        return [begin + place for place in places]

    # each pass over the rows has its own order
    orders: dict[int, Tensor] = {}
    rows = []
    for place in places:
        epoch, at = divmod(place, dataset.size)
        if epoch not in orders:
            orders[epoch] = _order(dataset.size, order, epoch)
        rows.append(int(orders[epoch][at]))
    return rows


def _mixed_rows(
    dataset: Dataset, mixture: Mixture, places: Sequence[int], seed: int, order: int, round: int
) -> list[int]:
    """The rows at these places of a mixture, each part in its own order."""
    found = [mixture.source(place) for place in places]
    rows = []
    for k, part in enumerate(dataset.parts):
        mine = [j for source, j in found if source == k]
        rows.append(iter(_rows_at(part, mine, seed, rng.fold_in(order, "source", k), round)))
    return [mixture.place(k, next(rows[k])) for k, _ in found]


def _order(size: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(size, generator=rng.generator(rng.fold_in(seed, "order", epoch)))


# ---------- rows of built-in tasks with responses to learn from, right ones and wrong ones


class Answer(Protocol):
    """Makes the responses to one problem."""

    def __call__(
        self,
        task: tasks.Task,
        row: tasks.TaskRow,
        random_: random.Random,
        mixture: Mapping[str, float] | None,
        /,
    ) -> Row:
        """The columns of a row beside those of the task. `mixture` is that of `wrong_answer`."""
        ...


def task_rows(
    task: str, answer: Answer, *, purpose: str, level: int, seed: int, negatives: Sequence[str]
) -> Endless:
    """The rows of a built-in task without end, with the terse question as `prompt` and those of `answer`.

    All is drawn by (seed, purpose, task, level, index). `negatives` are the kinds of wrong answers, as
    `mixture_of` reads them; none is the usual mixture. ValueError for a task or a kind that does not exist.
    """
    found = tasks.get_task(task)
    mixture = None
    if negatives:
        mixture = mixture_of(negatives)

    def row(index: int) -> Row:
        made = found.generate(seed, index, level)
        random_ = random.Random(rng.fold_in(seed, purpose, task, level, index))
        return {**made, "prompt": made["short"], **answer(found, made, random_, mixture)}

    return Endless(task, row, seed)
