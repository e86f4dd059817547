"""The command line of ours that does what a config of another system says: `python -m rft_fn.migrate`."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rft_fn.tools.other_libraries import (
    lightrft,
    openrlhf,
    openrlhf_examples,
    trl,
    trl_examples,
    verl,
    verl_examples,
)
from rft_fn.tools.other_libraries.reading import Config, read
from rft_fn.tools.other_libraries.rows import Row, System
from rft_fn.tools.other_libraries.telling import KINDS, kind_of

__all__ = ["KINDS", "SYSTEMS", "Config", "Translation", "read", "translate"]

SYSTEMS: dict[str, System] = {
    "trl": System("TRL", {**trl_examples.TRAINERS, "rl": trl.RL}, trl.OTHERS),
    "verl": System("verl", {"sft": verl_examples.SFT, "rl": verl.RL}),
    "openrlhf": System("OpenRLHF", {**openrlhf_examples.TRAINERS, "rl": openrlhf.RL}, openrlhf.OTHERS),
    "lightrft": System("LightRFT", {"rl": lightrft.RL}),
}


class Translation(NamedTuple):
    """A config in our words."""

    command: list[str]  # "python train_scripts/grpo.py", and each of its arguments
    notes: list[str]  # what differs in a way that matters
    without: dict[str, str]  # the options without a counterpart, and why
    unknown: list[str]  # names that are not in the table


def translate(
    system: System, options: Mapping[str, Any], programs: Sequence[str] = (), kind: str | None = None
) -> Translation:
    """Our command for the options of another system, where they are not set with their own defaults.

    `kind` is that of the trainer, one of KINDS; None: what the programs or the options tell. ValueError where
    they tell none.
    """
    trainer = system.trainers[kind_of(system, options, programs, kind)]
    whole = {**trainer.defaults, **options}
    arguments, used, notes = trainer.combine(whole)
    without: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in whole.items():
        row = trainer.rows.get(name)
        section = next((why for head, why in trainer.sections.items() if name.startswith(head)), None)
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

    # what nobody can do without, and what few configs name
    arguments = _once(arguments)
    script = trainer.script(whole)
    wanted = {"--data": "add a file or a hub name; without it the rows are those of a built-in task"}
    if script in ("grpo", "ppo"):
        wanted["--reward"] = "add FILE.py:FN, or one of docs/rewards.md"
    for name, what in wanted.items():
        if not any(text.startswith(f"{name} ") for text in arguments):
            notes = [*notes, f"{name}: {what}"]
    command = [f"python train_scripts/{script}.py", *arguments]
    return Translation(command, notes, without, unknown)


def _arguments(row: Row, value: Any) -> str | None:
    """Our arguments for a value; None where there are none."""
    text = str(value)
    if row.values is not None:
        found = row.values.get(text.lower(), row.values.get("*"))
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
