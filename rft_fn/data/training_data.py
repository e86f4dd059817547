"""Data sets from the texts of a command line.

Also their mixtures, held-out rows, and the number of steps of a run.
"""

import hashlib
import math
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from rft_fn import rng
from rft_fn.data import reasoning_gym, row_cache, sources
from rft_fn.data.dataset import Dataset, ItemT
from rft_fn.data.mixture import Mixture
from rft_fn.data.pairs import pairs_from_rows, pairs_from_task
from rft_fn.data.points import points_from_rows, points_from_task
from rft_fn.data.prompts import from_rows, from_task
from rft_fn.data.ranked import lists_from_rows, lists_from_task
from rft_fn.data.reasoning_steps import steps_from_rows, steps_from_task
from rft_fn.data.sources import Source, Tables
from rft_fn.data.table import Endless, Part, Table

__all__ = [
    "LISTS", "PAIRS", "POINTS", "PROMPTS", "STEPS", "Kind", "decide_steps", "held_out", "load",
    "load_for_training", "mix", "plan",
]  # fmt: skip


_MANY = 10_000  # rows whose hashes take some time


class Kind(NamedTuple):
    """Which items are made of rows: `PROMPTS`, `PAIRS`, `LISTS`, `POINTS` or `STEPS`."""

    from_rows: Callable[..., Dataset]  # (rows, tokenizer, *, name, **options)
    from_task: Callable[..., Dataset]  # (task, tokenizer, *, level, seed, **options)


PROMPTS = Kind(from_rows, from_task)
PAIRS = Kind(pairs_from_rows, pairs_from_task)
LISTS = Kind(lists_from_rows, lists_from_task)
POINTS = Kind(points_from_rows, points_from_task)
STEPS = Kind(steps_from_rows, steps_from_task)


class _Opened(NamedTuple):
    """A source, and its rows by split; one of rows without end has none."""

    source: Source
    tables: Tables

    def split(self, want: str) -> str:
        """Return the split to read when "train" or "test" is wanted."""
        return sources.chosen_split(self.tables, self.source, want)

    def identity(self, want: str) -> tuple:
        """Return a key that is equal for two texts that name the same rows."""
        if self.source.is_endless:
            return (self.source.text, want)
        return (os.path.realpath(self.source.name), self.source.part, self.split(want))


def _open(texts: str | Sequence[str]) -> list[_Opened]:
    """Open the sources of one text or several. ValueError for none."""
    parsed = [sources.parse(text) for text in ([texts] if isinstance(texts, str) else texts)]
    if not parsed:
        raise ValueError("data: expected at least one source, got none")
    return [_Opened(source, {} if source.is_endless else sources.tables(source)) for source in parsed]


class _Items(NamedTuple):
    """Which items are made of a source, and with which options."""

    kind: Kind
    tokenizer: Any
    options: Mapping[str, Any]

    def of_rows(self, rows: Table | Endless, name: str, note: str = "") -> Dataset:
        return replace(self.kind.from_rows(rows, self.tokenizer, name=name, **self.options), note=note)

    def endless(self, source: Source, seed: int) -> Dataset:
        """Return the data set of a task: a built-in one at the level in its text, or one of reasoning-gym."""
        if not source.is_task:
            rows = reasoning_gym.endless(source.part or "", seed)
            return replace(self.of_rows(rows, rows.name), note=f"{rows.name} with seed {seed}")
        level = source.part or "1"
        if not (level.isascii() and level.isdigit()) or source.split is not None:
            raise ValueError(f"data: expected {source.name}:LEVEL with a number, got {source.text!r}")
        dataset = self.kind.from_task(
            source.name, self.tokenizer, level=int(level), seed=seed, **self.options
        )
        return replace(dataset, note=f"{dataset.name} with seed {seed}")

    def whole(self, x: _Opened, seed: int, split: str) -> Dataset:
        """Return all rows of a source, or of its split."""
        if x.source.is_endless:
            return self.endless(x.source, seed)
        text = x.source.text
        name = x.split(split)
        return self.of_rows(x.tables[name], text, f"split {name} of {text}" if name else text)

    def divided(self, x: _Opened, seed: int, share: float) -> tuple[Dataset, Dataset]:
        """Return (what is trained on, what is evaluated on) of one source."""
        if x.source.is_endless:
            trained = self.endless(x.source, seed)
            unseen = self.endless(x.source, seed + 1)
            return trained, replace(unseen, seed=seed)  # taken with the run's seed, from its first row on

        # the split that is meant for an evaluation, if there is one
        name = x.source.text
        split = sources.training_split(x.tables, x.source)
        rows = x.tables[split]
        test = sources.evaluation_split(x.tables, taken=split)
        if test is not None:
            trained = self.of_rows(rows, name)
            return trained, self.of_rows(x.tables[test], name, f"split {test} of {name}")
        if not share:
            whole = self.of_rows(rows, name)
            return whole, replace(whole, note=f"{name}, which is trained on too (eval_share is 0)")

        # neither a test split nor a file for it: some of the rows are held out
        if len(rows) < 2:
            self.of_rows(rows, name)  # which tells of rows that are no rows
        kept, held = held_out(len(rows), share)
        trained = self.of_rows(Part(rows, kept, name), name)
        note = (
            f"{len(held)} of the {len(rows)} rows of {name}, which are not trained on (eval_share {share:g})"
        )
        return trained, self.of_rows(Part(rows, held, name), name, note)


def load(
    source: str | Sequence[str],
    tokenizer: Any,
    *,
    seed: int = 0,
    split: str = "train",
    kind: Kind = PROMPTS,
    **options: Any,
) -> Dataset:
    """Load the data set of one text or of several, each NAME[:PART][@SPLIT][=SHARE].

    "addition" or "addition:2" (a built-in task at a level), a file, files by a pattern, a folder, a hub name;
    `sources` has the rules. Several are drawn by their shares, see `mix`. `split` is that of sources which
    have splits and a text that names none; the other options are options of `from_rows`. ValueError, with the
    remedy, for anything that cannot be drawn from.
    """
    opened = _open(source)
    items = _Items(kind, tokenizer, options)
    return mix([items.whole(x, seed, split) for x in opened], _shares(opened))


def load_for_training(
    data: str | Sequence[str],
    tokenizer: Any,
    *,
    eval_data: str | Sequence[str] = (),
    eval_share: float = 0.1,
    seed: int = 0,
    kind: Kind = PROMPTS,
    **options: Any,
) -> tuple[Dataset, Dataset]:
    """Return (what is trained on, what is evaluated on).

    Sources and options are as in `load`. Without `eval_data` each source is evaluated on some of its rows: a
    task on the rows of seed + 1, a data set on its split test (else validation), any other on `eval_share` of
    its rows, which are then not trained on. The second data set's `note` names its rows, and tells whether
    they are trained on too: an `eval_data` that is also in `data`, and at `eval_share` 0. ValueError as from
    `load`.
    """
    opened = _open(data)
    items = _Items(kind, tokenizer, options)
    if not eval_data:
        trained, unseen = zip(*(items.divided(x, seed, eval_share) for x in opened))
        return mix(trained, _shares(opened)), mix(unseen, _shares(opened))

    # given sources for the evaluation: all rows of `data` are trained on
    trained = [items.whole(x, seed, "train") for x in opened]
    taken = {x.identity("train") for x in opened}
    others = _open(eval_data)
    unseen = []
    for x in others:
        dataset = replace(items.whole(x, seed + 1, "test"), seed=seed)
        if x.identity("test") in taken:
            dataset = replace(dataset, note=f"{dataset.note}, which is trained on too")
        unseen.append(dataset)
    return mix(trained, _shares(opened)), mix(unseen, _shares(others))


def _shares(opened: Sequence[_Opened]) -> list[Fraction]:
    return [x.source.share for x in opened]


def held_out(count: int, share: float) -> tuple[array, array]:
    """Return (the rows to train on, the rows to hold out).

    They are numbers below `count`, at least one in each. round(share count) rows are held out: those whose
    numbers have the lowest hashes. So runs of other seeds answer the same questions, and when a file grows
    most rows stay on their side. ValueError for fewer than two rows, and unless 0 < share <= 1.
    """
    if count < 2:
        raise ValueError(
            f"eval_share: expected at least 2 rows to hold one out, got {count}; give --eval-data, or "
            "--eval-share 0 to evaluate on what is trained on"
        )
    if not 0 < share <= 1:
        raise ValueError(f"eval_share: expected a share in (0, 1], got {share}")
    size = min(max(round(share * count), 1), count - 1)

    def by_hash() -> list[int]:
        return sorted(range(count), key=lambda i: rng.fold_in(0, "held out", i))

    # a million hashes take seconds
    order = np.asarray(by_hash()) if count < _MANY else row_cache.held(f"held out of {count}", by_hash)
    kept, held = np.sort(order[size:]), np.sort(order[:size])
    return array("q", kept.tobytes()), array("q", held.tobytes())


def mix(datasets: Sequence[Dataset[ItemT]], shares: Sequence[Fraction]) -> Dataset[ItemT]:
    """Mix data sets to one, drawn by their shares; a single one is unchanged.

    Each part is passed over in its own order. A row has the name of its part in
    the column `source`, unless it has such a column; the parts need not have the same columns otherwise.
    ValueError for shares that `Mixture` refuses.
    """
    if len(datasets) == 1:
        return datasets[0]
    mixture = Mixture(shares)
    parts = tuple(datasets)

    def item(i: int) -> ItemT:
        k, j = mixture.source(i)
        made = parts[k].prompt(j)
        return replace(made, index=i, columns={"source": parts[k].name, **made.columns})

    sizes = [part.size for part in parts]
    content = repr((mixture.weights, [(part.name, part.digest) for part in parts]))
    return Dataset(
        name=" + ".join(part.name for part in parts),
        size=None if None in sizes else sum(size or 0 for size in sizes),  # endless as soon as one part is
        prompt=item,
        digest=hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        parts=parts,
        mixture=mixture,
        note="; ".join(part.note for part in parts),
    )


def decide_steps(
    dataset: Dataset,
    batch: int,
    *,
    steps: int | None,
    epochs: float | None,
    usual: int,
    option: str = "epochs",
) -> int:
    """Return the steps of a run, given or by epochs.

    `steps` if it is given; else as many as `epochs` passes over the rows take; else `usual`: ceil(epochs rows
    / batch); a mixture has the rows of all its parts. `option` is the name of the epochs in
    errors. ValueError for epochs of rows that never end, and for more steps than 64 bits can count.
    """
    if epochs is None:
        return usual if steps is None else steps
    if dataset.size is None:
        endless = [part.name for part in dataset.parts or (dataset,) if part.size is None]
        raise ValueError(
            f"{option}: expected rows that end, got {epochs} of {', '.join(endless)}, whose rows never do; "
            "give steps"
        )
    count = math.ceil(Fraction(str(epochs)) * dataset.size / batch)
    if count >= 2**63:
        raise ValueError(
            f"{option}: expected steps that 64 bits can count, got {epochs:g} passes over {dataset.size} rows"
        )
    return count


def plan(
    dataset: Dataset, steps: int, batch: int, unseen: Dataset | None = None, *, what: str = "prompts"
) -> str:
    """Return one line about the data of a run: the rows drawn from each source, and the evaluation's.

    `batch` is prompts (or `what`) per step, of the first round where there are several.
    """
    drawn = steps * batch
    parts = dataset.parts or (dataset,)
    counts = dataset.mixture.counts(drawn) if dataset.mixture is not None else [drawn]
    shown = []
    for n, part in zip(counts, parts):
        passes = "no end" if part.size is None else f"{part.size} rows, {n / part.size:.4g} passes"
        shown.append(f"{n} of {part.name} ({passes})")
    line = f"data: {steps} steps of {batch} {what}, {', '.join(shown)}"
    if unseen is not None:
        line += f"; evaluation: {unseen.note}"
    return line
