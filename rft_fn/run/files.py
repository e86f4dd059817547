"""Small files of a run: written whole by one rename, and cut back to a step."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_fn import border

__all__ = ["append_row", "defaults_of", "differences", "filled", "jsonable", "keep_until", "write_whole"]


def jsonable(x: Any) -> Any:
    """Return a value as JSON can hold it: dataclasses as dicts, tuples as lists."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: jsonable(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, tuple):
        return list(x)
    return x


def defaults_of(config: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass as JSON can hold them, without the fields that have none."""
    found = {}
    for f in dataclasses.fields(config):
        if f.default is not dataclasses.MISSING:
            found[f.name] = jsonable(f.default)
        elif f.default_factory is not dataclasses.MISSING:
            found[f.name] = jsonable(f.default_factory())
    return found


def filled(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested config with the defaults of the options that it does not have."""
    found = {**defaults, **stored}
    for name, x in defaults.items():
        if isinstance(x, Mapping) and isinstance(found[name], Mapping):
            found[name] = filled(found[name], x)
    return found


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file by one rename.

    Its readers find the old content or the new one, also after a full disk.
    """
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with tmp.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        raise _named(error, path) from error


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file.

    OSError with its name, also for a full disk.
    """
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def keep_until(path: Path, step: int) -> None:
    """Cut a file back to the rows before `step`, without a last line that a kill cut short."""
    if not path.exists():
        return
    lines = path.read_text().split("\n")
    kept = [line + "\n" for line, row in zip(lines, border.json_rows(path)) if row["step"] < step]
    write_whole(path, "".join(kept))


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return {"part.name": (old, new)} of the options that differ between two nested configs."""
    out: dict[str, tuple[Any, Any]] = {}
    for name in sorted(set(old) | set(new)):
        a = old.get(name)
        b = new.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out |= differences(a, b, f"{prefix}{name}.")
        elif a != b:
            out[prefix + name] = (a, b)
    return out
