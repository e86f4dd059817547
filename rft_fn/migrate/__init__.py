"""The command line of ours that does what a config of another system says: `python -m rft_fn.migrate`."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rft_fn.migrate.lightrft import SYSTEM as LIGHTRFT
from rft_fn.migrate.openrlhf import SYSTEM as OPENRLHF
from rft_fn.migrate.reading import read
from rft_fn.migrate.row import Row, System
from rft_fn.migrate.trl import SYSTEM as TRL
from rft_fn.migrate.verl import SYSTEM as VERL

__all__ = ["SYSTEMS", "Translation", "read", "translate"]

SYSTEMS: dict[str, System] = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "lightrft": LIGHTRFT}


class Translation(NamedTuple):
    """A config in our words."""

    command: list[str]  # "python train_scripts/grpo.py", and each of its arguments
    notes: list[str]  # what differs in a way that matters
    without: dict[str, str]  # the options without a counterpart, and why
    unknown: list[str]  # names that are not in the table


def translate(system: System, options: Mapping[str, Any]) -> Translation:
    """Our command for the options of another system, where they are not set with their own defaults."""
    whole = {**system.defaults, **options}
    arguments, used, notes = system.combine(whole)
    without: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in whole.items():
        row = system.rows.get(name)
        section = next((why for head, why in system.sections.items() if name.startswith(head)), None)
        if value in (None, "", [], {}) or name in used:
            continue
        if row is not None:
            found = _arguments(row, value)
            if found is None:
                without[f"{name}={value}"] = row.note or "ours have no such value"
            else:
                arguments = [*arguments, found]
        elif section is not None:
            without[name] = section
        else:
            unknown.append(name)

    # the reward is what nobody can do without, and what few configs name
    arguments = _once(arguments)
    if not any(text.startswith("--reward ") for text in arguments):
        notes = [*notes, "--reward: add FILE.py:FN, or one of docs/rewards.md"]
    command = [f"python train_scripts/{system.script(whole)}.py", *arguments]
    return Translation(command, notes, without, unknown)


def _arguments(row: Row, value: Any) -> str | None:
    """Our arguments for a value; None where there are none."""
    text = str(value)
    if row.values is not None:
        found = row.values.get(text.lower())
        if found is not None or "{x}" not in row.ours:
            return found
    elif not row.ours:
        return None
    items: list[str] = [text]
    if isinstance(value, Mapping):
        items = [f"{key}={x}" for key, x in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = [str(x) for x in value]
    return row.ours.format(x=row.separator.join(_quoted(item) for item in items))


def _quoted(item: str) -> str:
    """A value as a shell takes it; a variable of the shell stays one."""
    if "$" in item:
        return f'"{item}"'
    return shlex.quote(item)


def _once(arguments: Sequence[str]) -> list[str]:
    """The arguments without the empty ones, the last of those that set one option; the usual three first."""
    found = {text.split()[0]: text for text in arguments if text}
    first = [found.pop(name) for name in ("--model", "--data", "--reward") if name in found]
    return [*first, *found.values()]
