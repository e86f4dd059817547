"""Configs of other libraries in our words: a table a library, read by one engine.

`tables` reads tables/*.toml; the head of trl.toml says how a row is written. From them come the answers to an
unknown option (here), `rft migrate` (`translation`), the pages of docs/coming_from (`translation.table`), and
the answers to attributes that other libraries have (`names`). What needs arithmetic is a function that a
table names: a file a library, with `objectives`, `corrections` and `rewards`.
"""

import re
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from rft_fn.migrate import tables
from rft_fn.migrate.rows import hinted

__all__ = ["answer", "check"]


def answer(written: str, name: str, own: Collection[str]) -> str | None:
    """Return one line that leads from an option of another library to ours; None for an unknown one.

    `written` is the option as it was given, `name` the same without dashes in front and with underscores.
    `own` are the options of the script.
    """
    hints = {title: hinted(name, rows[name]) for title, rows in tables.options().items() if name in rows}
    hints = {title: hint for title, hint in hints.items() if hint is not None}
    if not hints:
        return None
    known = f"{written} of {', '.join(hints)}"

    # the first meaning that this script has an option for
    for hint in hints.values():
        if isinstance(hint, str):
            return f"{known}: {hint}"
        for option, remark, needs in hint:
            if option in own and (not needs or needs in own):
                remark = f" ({remark})" if remark else ""
                return f"{known} is --{option.replace('_', '-')} here{remark}"
    return f"{known} has no counterpart in this script"


def check(args: Sequence[str], own: Collection[str]) -> None:
    """Refuse, in one line, options that other libraries have and the script has not.

    Raises ValueError for such options. `own` are the names of the script's options, with underscores.
    """
    lines = []
    for arg in args:
        found = re.match(r"(--|\+{0,2})([A-Za-z][\w.-]*)(=|$)", arg)
        if found is None:
            continue

        # verl's options have no dashes in front: dotted names with a value
        dashes, written, value = found[1], found[2], found[3]
        dotted = "." in written and bool(value)
        name = written.replace("-", "_")
        if (dashes != "--" and not dotted) or name in own:
            continue
        line = answer(dashes + written, name, own) or answer(dashes + written, name.removeprefix("no_"), own)
        if line:
            lines.append(line)
    if lines:
        raise ValueError(f"{'; '.join(lines)}; --help lists the options")


def __getattr__(name: str) -> Any:
    """Return what translates a file, which is imported when it is first used."""
    if name in ("main", "read", "translate"):
        return getattr(import_module(f"{__name__}.translation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
