"""What a script shows at the end and writes beside it: progress, a table, results."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_fn.run.files import jsonable, write_whole

__all__ = ["check_results", "table", "track", "write_results"]


def track(items: Sequence[Any], note: str, *, rank: int = 0) -> Iterable[Any]:
    """The items, with a progress bar on rank 0 where there is a terminal."""
    if rank or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track as rich_track

    return rich_track(items, note, console=Console(stderr=True))


def table(values: Mapping[str, float], *, title: str, rank: int = 0) -> None:
    """Names and numbers for the person at the terminal, on rank 0."""
    if rank:
        return
    width = max(map(len, values))
    print(title)
    for name, value in values.items():
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        print(f"  {name:<{width}}  {text}")


def check_results(path: str | Path) -> None:
    """ValueError unless `write_results` can write to `path`; call it before the evaluation."""
    path = Path(path)
    if path.suffix == ".jsonl" or path.is_dir():
        raise ValueError(
            f"out: expected a file such as {path.with_suffix('.json').name} for the numbers (responses go to "
            f"the .jsonl beside it), got {path}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: {path.parent} cannot be made: {error.strerror}; choose another") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"out: {path.parent} cannot be written; choose another")


def write_results(path: str | Path, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """`result` as a .json, and `rows` as the .jsonl beside it."""
    check_results(path)
    path = Path(path)
    write_whole(path, json.dumps({k: jsonable(v) for k, v in result.items()}, indent=1) + "\n")
    write_whole(path.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows))
