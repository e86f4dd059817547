"""What a text on the command line names: a built-in task, files, a folder, or a data set of the hub.

    NAME[:PART][@SPLIT][=SHARE]

NAME is a built-in task, or else a file, a pattern of files or a folder that is here, or else a name of the
hub (`owner/name`, or `name` alone). PART is the level of a task, the config of a data set, or the list of a
json file that has several. Whatever exists here under the whole text is that.
"""

import glob
import logging
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn import hub
from rft_fn.data import files
from rft_fn.data.rows import Row, Unfit
from rft_fn.data.tasks import TASKS

__all__ = ["Source", "chosen_split", "evaluation_split", "parse", "read_rows", "tables", "training_split"]

_TESTS = ("test", "validation")  # the splits that an evaluation may use, in this order


class Source(NamedTuple):
    """A source, as its text says."""

    text: str  # without its share
    name: str
    part: str | None  # a task's level, a data set's config, the list of a json file
    split: str | None
    share: Fraction  # relative to the shares of the other sources

    @property
    def is_task(self) -> bool:
        """Whether it is a built-in task; a file of that name is given as ./NAME."""
        return self.name in TASKS


def parse(text: str) -> Source:
    """The source that a text names. ValueError for a share that is not above 0."""
    whole, share = _cut_share(text)
    name, split = _cut(whole, "@")
    name, part = _cut(name, ":")
    return Source(whole, name, part, split, share)


def _cut_share(text: str) -> tuple[str, Fraction]:
    """(the text before "=SHARE", the share); all of the text, and 1, where it ends in no number."""
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
    """(what stands before the last `mark`, what stands behind it), unless that is inside of a path."""
    head, found, tail = text.rpartition(mark)
    if not found or "/" in tail or Path(text).exists():
        return text, None
    return head, tail or None


# -------------------------------------------------------------------------------------------------- reading


def tables(source: Source) -> Mapping[str, Sequence[Row]]:
    """The rows of a source that is no task, by split; one without splits has its rows under "".

    ValueError, in one line, for what is not there and for what cannot be read.
    """
    try:
        found = _tables(source)
    except Unfit:
        raise
    except Exception as error:  # whatever a reader raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"data: could not read {source.text!r}: {reason}") from error
    found = {split: rows for split, rows in found.items() if len(rows)}
    if not found:
        raise ValueError(f"data: expected at least one row, got none in {source.text!r}")
    return found


def _tables(source: Source) -> Mapping[str, Sequence[Row]]:
    path = Path(source.name).expanduser()
    if path.is_dir():
        return _saved(path) or _layout(str(path), source)
    if path.is_file():
        return {"": files.read_files([path], source.part)}
    if glob.has_magic(source.name):
        found = sorted(glob.glob(str(path), recursive=True))
        if not found:
            raise ValueError("no file has such a name")
        return {"": files.read_files([Path(file) for file in found], source.part)}
    if files.kind(path) or source.name.startswith((".", "/", "~")) or source.name.count("/") > 1:
        raise ValueError(f"no such file{hub.did_you_mean(source.name)}")
    return _on_hub(source)


def _saved(folder: Path) -> Mapping[str, Sequence[Row]] | None:
    """The tables of a folder that `save_to_disk` of `datasets` has written; None for another folder."""
    import datasets

    if (folder / "dataset_dict.json").is_file():
        return dict(datasets.load_from_disk(str(folder)))  # type: ignore[arg-type]
    if (folder / "state.json").is_file():
        return {"": datasets.load_from_disk(str(folder))}  # type: ignore[dict-item]
    return None


def _layout(folder: str, source: Source) -> Mapping[str, Sequence[Row]]:
    """The tables of a folder that is laid out as on the hub: its configs in README.md, its files by split.

    Files of our kinds are read by our readers, unless the config has options for the library's.
    """
    import datasets

    _quiet()
    config = _named_config(lambda: datasets.load_dataset_builder(folder, source.part), source).config
    usual = type(config)(
        name=config.name,
        version=config.version,
        data_dir=config.data_dir,
        data_files=config.data_files,
        description=config.description,
    )
    paths = {
        str(split): [Path(file) for file in listed] for split, listed in (config.data_files or {}).items()
    }
    ours = all(files.kind(path) for listed in paths.values() for path in listed)
    if paths and ours and config == usual:
        return {split: files.read_files(listed) for split, listed in paths.items()}
    return dict(datasets.load_dataset(folder, source.part))


def _on_hub(source: Source) -> Mapping[str, Sequence[Row]]:
    """The tables of a data set of the hub; without a hub those of the copy that was fetched before."""
    import datasets

    _quiet()
    near = hub.did_you_mean(source.name, known=list(TASKS))

    def load() -> Mapping[str, Sequence[Row]]:
        return dict(datasets.load_dataset(source.name, source.part))

    why = hub.unreachable()
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or bool(why)  # otherwise it asks again and again
    try:
        return _named_config(load, source)
    except (ConnectionError, FileNotFoundError) as error:
        if not why:
            raise ValueError(f"{str(error).splitlines()[0]}{near}") from error
        raise ValueError(f"it is neither a file nor in the hub's cache, and {why}{near}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _named_config(load: Any, source: Source) -> Any:
    """load(), with one line where a data set has several configs, and none or none of them is named."""
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


def _quiet() -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what it logs is raised too


# --------------------------------------------------------------------------------------------------- splits


def training_split(found: Mapping[str, Any], source: Source) -> str:
    """The split to train on: the one that the text names, else train, else the only one."""
    if source.split is not None:
        return _known(found, source)
    for name in ("", "train"):
        if name in found:
            return name
    if len(found) > 1:
        raise ValueError(
            f"data: {source.text}: expected a split train, got {', '.join(found)}; name one, as "
            f"{source.text}@{next(iter(found))}"
        )
    return next(iter(found))


def evaluation_split(found: Mapping[str, Any], *, taken: str = "") -> str | None:
    """The split to evaluate on, other than the one that is taken: test, else validation, else None."""
    return next((name for name in _TESTS if name in found and name != taken), None)


def _known(found: Mapping[str, Any], source: Source) -> str:
    if source.split not in found:
        has = ", ".join(name for name in found if name) or "no splits"
        raise ValueError(f"data: {source.text}: expected one of its splits, got {source.split}; it has {has}")
    return str(source.split)


def chosen_split(found: Mapping[str, Any], source: Source, split: str) -> str:
    """The split of a source when "train" or "test" is asked for; all rows of one without splits.

    ValueError where there is none, or more than one that could be meant.
    """
    if split == "train" or source.split is not None or "" in found:
        return training_split(found, source)
    if split in found:
        return split
    name = evaluation_split(found) if split == "test" else None
    if name is None:
        raise ValueError(
            f"data: {source.text}: expected a split {split}, got {', '.join(found)}; name one, as "
            f"{source.text}@{next(iter(found))}"
        )
    return name


def read_rows(source: str, *, split: str = "train") -> Sequence[Row]:
    """The rows of files, a folder, or a data set of the hub, named as on a command line.

    Values are as they stand in the file: those of jsonl have JSON's types, and nothing is taken for a date;
    those of csv are text. Lines of jsonl and csv are read when they are asked for, and a broken one raises
    ValueError with its number then. Of a source with splits it is `split`, unless its text names one.

    ValueError for a file that is not there, cannot be read or has no rows.
    """
    parsed = parse(source)
    found = tables(parsed)
    return found[chosen_split(found, parsed, split)]
