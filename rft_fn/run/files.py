"""Small files of a run: written whole by one rename, and cut back to a step."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["append_row", "differences", "jsonable", "keep_until", "write_whole"]


def jsonable(x: Any) -> Any:
    """A value as JSON can hold it: dataclasses as dicts, tuples as lists."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: jsonable(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, tuple):
        return list(x)
    return x


def write_whole(path: Path, text: str) -> None:
    """Write a file by one rename: its readers find the old text or the new one, also after a full disk."""
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with tmp.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        raise _named(error, path) from error


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file. OSError with its name, also for a full disk."""
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def keep_until(path: Path, step: int) -> None:
    """Cut a file of rows back to those before `step`, without a last line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] < step:
            kept.append(line + "\n")
    write_whole(path, "".join(kept))


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """{"part.name": (old, new)} of the options that differ between two nested configs."""
    out: dict[str, tuple[Any, Any]] = {}
    for name in sorted(set(old) | set(new)):
        a = old.get(name)
        b = new.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out |= differences(a, b, f"{prefix}{name}.")
        elif a != b:
            out[prefix + name] = (a, b)
    return out
