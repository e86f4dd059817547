"""Sources of rows by their texts on the command line.

They are built-in tasks, those of reasoning-gym, files, folders, and data sets of the hub:
NAME[:PART][@SPLIT][=SHARE]

NAME is a built-in task, or `reasoning_gym`, whose PART is a task of that package with its options, or else a
file, a pattern of files or a folder that is here, or else a name of the hub (`owner/name`, or only `name`).
PART is the level of a task, the config of a data set, or the list of a json file that has several. Whatever
exists here under the whole text is that.
"""

import glob
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rft_fn import hub
from rft_fn.data import file_formats, reasoning_gym
from rft_fn.data.table import InvalidRow, Table
from rft_fn.data.tasks import TASKS

__all__ = ["Source", "chosen_split", "evaluation_split", "parse", "read_rows", "tables", "training_split"]

_TESTS = ("test", "validation")  # the splits that an evaluation may use, in this order

T = TypeVar("T")

Tables = Mapping[str, Table]
"""The rows of a source by split; without splits they are under ""."""


class Source(NamedTuple):
    """A source, parsed from its text."""

    text: str  # without its share
    name: str
    part: str | None  # a task's level, a data set's config, the list of a json file
    split: str | None
    share: Fraction  # relative to the shares of the other sources

    @property
    def is_task(self) -> bool:
        """Whether it is a built-in task. A file of that name is given as ./NAME."""
        return self.name in TASKS

    @property
    def is_endless(self) -> bool:
        """Whether its rows are made, without end: of a built-in task, or of one of reasoning-gym."""
        return self.is_task or self.name == reasoning_gym.SOURCE


def parse(text: str) -> Source:
    """Parse the text of a source. ValueError for a share that is not above 0, and for no name."""
    whole, share = _cut_share(text)
    word, _, task = whole.partition(":")
    if word == reasoning_gym.SOURCE:
        if not task:
            raise ValueError(f"data: expected {word}:TASK, as {word}:leg_counting, got {text!r}")
        return Source(whole, word, task, None, share)
    name, split = _cut(whole, "@")
    name, part = _cut(name, ":")
    if not name.strip():
        raise ValueError(f"data: expected the name of a task, a file, a folder or a data set, got {text!r}")
    return Source(whole, name, part, split, share)


def _cut_share(text: str) -> tuple[str, Fraction]:
    """Return (the text before "=SHARE", the share); (all of the text, 1) where it ends in no number."""
    head, mark, tail = text.rpartition("=")
    if not mark or Path(text).exists():
        return text, Fraction(1)
    try:
        share = Fraction(tail)
    except (ValueError, ZeroDivisionError):
        return text, Fraction(1)
    if share <= 0:
        raise ValueError(f"data: expected a share above 0, as {head}=0.5, got {text}")
    return head, share


def _cut(text: str, mark: str) -> tuple[str, str | None]:
    """Return (the text before the last `mark`, the text after it). No cut inside a path."""
    head, there, tail = text.rpartition(mark)
    if not there or "/" in tail or Path(text).exists():
        return text, None
    return head, tail or None


# -------------------------------------------------------------------------------------------------- reading


def tables(source: Source) -> Tables:
    """Return the rows of a source other than a task, by split.

    "" is the split of a source without any. ValueError, in one line, for a source that does not exist or
    cannot be read.
    """
    try:
        by_split = _tables(source)
    except InvalidRow:
        raise
    except Exception as error:  # whatever a reader raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"data: could not read {source.text!r}: {lines[0]}") from error
    by_split = {split: rows for split, rows in by_split.items() if len(rows)}
    if not by_split:
        raise ValueError(f"data: expected at least one row, got none in {source.text!r}")
    return by_split


def _tables(source: Source) -> Tables:
    # anything on this machine comes before the hub
    path = Path(source.name).expanduser()
    if path.is_dir():
        return _saved(path) or _layout(str(path), source)
    if path.is_file():
        return {"": file_formats.read_files([path], source.part)}
    if glob.has_magic(source.name):
        files = sorted(glob.glob(str(path), recursive=True))
        if not files:
            raise ValueError("no file has such a name")
        return {"": file_formats.read_files([Path(file) for file in files], source.part)}

    if path.exists():
        raise ValueError(
            "expected a file or a folder, got a pipe or a device; write its rows to a file first"
        )

    # a name that can only be a file is not looked for on the hub
    if file_formats.suffix_of(path) or source.name.startswith((".", "/", "~")) or source.name.count("/") > 1:
        raise ValueError(f"no such file{hub.did_you_mean(source.name)}")
    return _on_hub(source)


def _saved(folder: Path) -> Tables | None:
    """Return the tables of a folder that `save_to_disk` wrote, else None."""
    import datasets

    if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
        return None
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        return _by_split(saved)
    return {"": file_formats.undecoded(saved)}


def _by_split(tables: Mapping[Any, Table]) -> Tables:
    """Return the tables of a DatasetDict, by plain names."""
    return {str(split): file_formats.undecoded(rows) for split, rows in tables.items()}


def _layout(folder: str, source: Source) -> Tables:
    """Return the tables of a folder that is laid out as on the hub.

    Its configs are in README.md, its files named by split. Files of known formats are read by our readers,
    unless the config has options for the library's.
    """
    import datasets

    file_formats.quiet_datasets()
    config = _with_config(lambda: datasets.load_dataset_builder(folder, source.part), source).config

    # the same config without options for the library's readers
    usual = type(config)(
        name=config.name,
        version=config.version,
        data_dir=config.data_dir,
        data_files=config.data_files,
        description=config.description,
    )
    paths: dict[str, list[Path]] = {}
    ours = True
    for split, listed in (config.data_files or {}).items():
        paths[str(split)] = [Path(file) for file in listed]
        ours = ours and all(file_formats.suffix_of(path) for path in paths[str(split)])
    if paths and ours and config == usual:
        return {split: file_formats.read_files(listed) for split, listed in paths.items()}
    return _by_split(datasets.load_dataset(folder, source.part))


def _on_hub(source: Source) -> Tables:
    """Return the tables of a data set of the hub, or of its cached copy where there is no hub."""
    import datasets
    import datasets.config

    file_formats.quiet_datasets()
    near = hub.did_you_mean(source.name, known=list(TASKS))

    def load() -> Tables:
        return _by_split(datasets.load_dataset(source.name, source.part))

    # `datasets` asks an unreachable hub again and again, unless it is told to be offline
    why = hub.unreachable()
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or bool(why)
    try:
        return _with_config(load, source)
    except (ConnectionError, FileNotFoundError) as error:
        if not why:
            raise ValueError(f"{str(error).splitlines()[0]}{near}") from error
        raise ValueError(f"it is neither a file nor in the hub's cache, and {why}{near}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _with_config(load: Callable[[], T], source: Source) -> T:
    """load(), with a short error for a missing or unknown config. The error lists the configs there are."""
    try:
        return load()
    except ValueError as error:
        listed = re.search(r"(?:Config name is missing|BuilderConfig).*?\[(.*?)\]", str(error), re.S)
        if listed is None:
            raise
        names = re.findall(r"'(.*?)'", listed[1])
        got = "none" if source.part is None else repr(source.part)
        raise ValueError(
            f"expected one of its configs {', '.join(names)}, as {source.name}:{names[0]}, got {got}"
        ) from None


# --------------------------------------------------------------------------------------------------- splits


def training_split(tables: Tables, source: Source) -> str:
    """Return the split to train on: the named one, train, or the only one. ValueError for several."""
    if source.split is not None:
        if source.split in tables:
            return source.split
        has = ", ".join(name for name in tables if name) or "no splits"
        raise ValueError(f"data: {source.text}: expected one of its splits, got {source.split}; it has {has}")
    for name in ("", "train"):
        if name in tables:
            return name
    if len(tables) > 1:
        raise ValueError(
            f"data: {source.text}: expected a split train, got {', '.join(tables)}; name one, as "
            f"{source.text}@{next(iter(tables))}"
        )
    return next(iter(tables))


def evaluation_split(tables: Tables, *, taken: str = "") -> str | None:
    """Return the split to evaluate on, other than `taken`: test, else validation, else None."""
    return next((name for name in _TESTS if name in tables and name != taken), None)


def chosen_split(tables: Tables, source: Source, split: str) -> str:
    """Return the split to read for "train" or "test". ValueError where no split fits, or several do."""
    if split == "train" or source.split is not None or "" in tables:
        return training_split(tables, source)
    if split in tables:
        return split
    name = evaluation_split(tables) if split == "test" else None
    if name is None:
        raise ValueError(
            f"data: {source.text}: expected a split {split}, got {', '.join(tables)}; name one, as "
            f"{source.text}@{next(iter(tables))}"
        )
    return name


def read_rows(source: str, *, split: str = "train") -> Table:
    """Return the rows of a source that is named as on a command line.

    Files, a folder, or a data set of the hub. Values have the types of the file: jsonl has JSON's types, csv
    has text, and no text becomes a date. Lines of jsonl and csv are read when they are asked for, and a
    broken one raises ValueError with its number then. Of a source with splits it reads `split`, unless the
    text names another.

    ValueError for a file that does not exist, cannot be read or has no rows.
    """
    parsed = parse(source)
    by_split = tables(parsed)
    return by_split[chosen_split(by_split, parsed, split)]
