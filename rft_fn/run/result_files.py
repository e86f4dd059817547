"""The results of a script: a table for the terminal, and files of numbers and rows."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_fn.run.files import jsonable, write_whole
from rft_fn.text import printable

if TYPE_CHECKING:
    pass

__all__ = ["check_results", "table", "write_results"]


def table(values: Mapping[str, float], *, title: str, rank: int = 0) -> None:
    """Print names and numbers in two columns, on rank 0."""
    if rank:
        return
    width = max(map(len, values))
    print(printable(title))
    for name, value in values.items():
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        print(printable(f"  {name:<{width}}  {text}"))


def check_results(path: str | Path) -> None:
    """Raise ValueError for a path that `write_results` cannot write to.

    Call it before the evaluation.
    """
    path = Path(path)
    if path.suffix == ".jsonl" or path.is_dir():
        raise ValueError(
            f"out: expected a file such as {path.with_suffix('.json').name} for the numbers (responses go to "
            f"the .jsonl beside it), got {path}"
        )
    if path.with_suffix(".jsonl").exists() and not path.exists():
        raise ValueError(
            f"out: expected a name that no file beside it has, got {path}, where the responses would be "
            f"written over {path.with_suffix('.jsonl').name}; choose another"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: {path.parent} cannot be made: {error.strerror}; choose another") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"out: {path.parent} cannot be written; choose another")


def write_results(path: str | Path, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `result` as a .json file, and `rows` as the .jsonl file of the same name."""
    check_results(path)
    path = Path(path)
    write_whole(path, json.dumps({k: jsonable(v) for k, v in result.items()}, indent=1) + "\n")
    write_whole(path.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows))
