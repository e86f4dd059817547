"""Prompts as a pure function of the step: no loader, no cursor, no state to lose.

A `Dataset` is rows and a way to make a prompt of one. `draw(dataset, n, step, seed)` is the same on every
rank and in every resumed run.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rft_fn import rng
from rft_fn.data import tasks

__all__ = [
    "Dataset",
    "Prompt",
    "draw",
    "fill",
    "from_rows",
    "from_task",
    "load",
    "read_rows",
    "render",
    "take",
]

_ROUND = 1 << 40  # rows of a generator between one round of a step and the next: none is drawn twice
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class Prompt(NamedTuple):
    """One prompt: what the engine reads, and what a reward is told."""

    ids: list[int]
    text: str
    columns: Mapping[str, Any]  # the row that it was made of
    index: int  # in its data set


@dataclass(frozen=True)
class Dataset:
    """Prompts by index. `size` None is a generator without end: index i is row i,
    and nothing is ever drawn twice."""

    name: str
    size: int | None
    prompt: Callable[[int], Prompt]


def _read_file(path: Path) -> Sequence[Mapping[str, Any]]:
    import datasets

    if not path.exists():
        raise FileNotFoundError("no such file")
    if not path.stat().st_size:
        return []
    datasets.disable_progress_bars()
    return datasets.load_dataset(_READERS[path.suffix], data_files=str(path), split="train")


def read_rows(source: str, *, split: str = "train") -> Sequence[Mapping[str, Any]]:
    """The rows of a .jsonl, .json, .csv or .parquet file, of a folder that `datasets` saved,
    or of a hub data set.

    ValueError for a file that is not there, cannot be read or has no rows.
    """
    import datasets

    path = Path(source)
    try:
        if path.suffix in _READERS:
            rows = _read_file(path)
        elif path.is_dir():
            rows = datasets.load_from_disk(source)
            rows = rows[split] if isinstance(rows, datasets.DatasetDict) else rows
        else:
            rows = datasets.load_dataset(source, split=split)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"data: could not read {source!r}: {reason}") from error
    if not len(rows):
        raise ValueError(f"data: expected at least one row, got none in {source!r}")
    return rows


def render(tokenizer: Any, question: str, *, system: str | None = None) -> list[int]:
    """The ids of a question as a chat's first turn, by the tokenizer's own template, ready for the
    answer; the bare text where a tokenizer has no template. An empty `system` leaves out a default
    that the template would put in."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode((system + "\n" if system else "") + question))
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": question})
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def fill(template: str, row: Mapping[str, Any], source: str) -> str:
    """`template` with the columns of a row in its {places}. ValueError that lists the
    columns if one is not there."""
    try:
        return template.format_map(row)
    except (KeyError, IndexError, ValueError) as missing:
        raise ValueError(
            f"data: {source!r} has no column {missing} for the template {template!r}; it has "
            f"{', '.join(map(repr, row))}. Name columns as {{question}}, and write {{{{ and }}}} for braces"
        ) from None


def from_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    template: str = "{question}",
    system: str | None = None,
    max_prompt: int = 512,
    name: str = "rows",
) -> Dataset:
    """A data set of rows; `template` makes the question of a row's columns. Prompts
    longer than `max_prompt` are left out.

    ValueError for no rows, a column that is not there, or when no prompt fits.
    """
    if not len(rows):
        raise ValueError(f"data: expected at least one row, got none in {name!r}")
    prompts = []
    for i in range(len(rows)):
        row = dict(rows[i])
        text = fill(template, row, name)
        ids = render(tokenizer, text, system=system)
        if len(ids) <= max_prompt:
            prompts.append(Prompt(ids, text, row, i))
    if not prompts:
        raise ValueError(f"max_prompt: every prompt of {name!r} is longer than {max_prompt} tokens; raise it")
    return Dataset(name, len(prompts), prompts.__getitem__)


def from_task(
    task: str,
    tokenizer: Any,
    *,
    level: int = 1,
    seed: int = 0,
    template: str = "{question}",
    system: str | None = None,
    max_prompt: int = 512,
) -> Dataset:
    """A built-in task as an endless data set; `template` as in `from_rows` ("{short}" is
    the terse form of a question).

    ValueError for a task, a level or a column that does not exist, or a prompt longer than `max_prompt`
    tokens.
    """
    generate = tasks.get_task(task).generate

    def prompt(index: int) -> Prompt:
        row = generate(seed, index, level)
        text = fill(template, row, task)
        ids = render(tokenizer, text, system=system)
        if len(ids) > max_prompt:
            raise ValueError(
                f"max_prompt: prompt {index} of {task} has {len(ids)} tokens, above {max_prompt}; raise it"
            )
        return Prompt(ids, text, row, index)

    prompt(0)  # what is wrong with the arguments is said now
    return Dataset(f"{task}:{level}", None, prompt)


def load(
    source: str,
    tokenizer: Any,
    *,
    template: str = "{question}",
    system: str | None = None,
    max_prompt: int = 512,
    seed: int = 0,
    split: str = "train",
) -> Dataset:
    """The data set that a command line names: "addition" or "addition:2" (a built-in task at a level), a
    file, a folder, a hub name. ValueError, with the remedy, for anything that cannot be drawn from."""
    name, _, level = source.partition(":")
    options: dict[str, Any] = {"template": template, "system": system, "max_prompt": max_prompt}
    if name in tasks.TASKS:
        if level and not level.isdigit():
            raise ValueError(f"data: expected {name}:LEVEL with a number, got {source!r}")
        return from_task(name, tokenizer, level=int(level or 1), seed=seed, **options)
    return from_rows(read_rows(source, split=split), tokenizer, name=source, **options)


def _order(size: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(size, generator=rng.generator(rng.fold_in(seed, "order", epoch))).tolist()


def draw(dataset: Dataset, n: int, step: int, seed: int, *, round: int = 0) -> tuple[list[Prompt], list[int]]:
    """(n prompts, a key for each) of step `step`: a permutation of the data set for
    each pass, drawn from (seed, pass).

    The key of a prompt is fold_in(seed, step, index): a prompt that comes again is sampled anew, in a later
    step or, where a pass ends within one, in the same. `round` > 0 gives more prompts for the same step, by a
    permutation (of a generator: rows) and keys of its own, for dynamic sampling.
    """
    seed = rng.fold_in(seed, "round", round) if round else seed
    at = range(step * n, (step + 1) * n)
    if dataset.size is None:
        index = [i + round * _ROUND for i in at]
    else:
        orders = {epoch: _order(dataset.size, seed, epoch) for epoch in {i // dataset.size for i in at}}
        index = [orders[i // dataset.size][i % dataset.size] for i in at]
    prompts = [dataset.prompt(i) for i in index]
    keys, times = [], Counter()
    for i, p in zip(index, prompts):
        key = rng.fold_in(seed, step, p.index)
        keys.append(rng.fold_in(key, "again", times[i]) if times[i] else key)
        times[i] += 1
    return prompts, keys


def take(dataset: Dataset, n: int, seed: int) -> tuple[list[Prompt], list[int]]:
    """The first n prompts in order, with keys: for evaluation. All of a finite data set if it has fewer."""
    n = n if dataset.size is None else min(n, dataset.size)
    return [dataset.prompt(i) for i in range(n)], [rng.fold_in(seed, "take", i) for i in range(n)]
