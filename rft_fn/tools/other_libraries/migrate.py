"""Reads a config of another library and prints our command line for it: `python -m rft_fn.migrate`."""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn.check import printable
from rft_fn.tools.other_libraries import LIBRARIES
from rft_fn.tools.other_libraries.rows import Library, Row, Trainer

__all__ = ["KINDS", "Config", "Translation", "main", "read", "table", "translate"]


# ---------- the options in a file of another system: YAML, JSON, or a shell script


_MODULE = re.compile(r"(?:trl|verl|openrlhf|lightrft)(?:\.\w+)+")
_MOST = 10**6  # characters that aliases of YAML may add to a text
_ASSIGNED = re.compile(r"\+{0,2}([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)


class Config(NamedTuple):
    """What a file says."""

    options: dict[str, Any]  # by name; the names of nested options have dots
    programs: list[str]  # files and modules that a shell script starts, without folders, packages and .py


def read(path: str) -> Config:
    """Return the options of a file, and the programs that it starts.

    .yaml, .yml and .json hold a mapping. Any other file is a shell script: `--name value`, `--name=value`
    and `name=value` are options, anywhere in it. Raises ValueError for a file that is not there, cannot be
    read, or holds no option.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: expected a file, and there is none")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a text, which cannot be read: {error}") from None
    programs: list[str] = []
    if file.suffix in (".yaml", ".yml", ".json"):
        options = _flat(_parsed(file, text))
    else:
        words = _words(file, text)
        options = _of_shell(words)
        programs = _programs(words)
    if not options:
        raise ValueError(f"{path}: expected options, and there are none")
    return Config(options, programs)


def _parsed(file: Path, text: str) -> Mapping[str, Any]:
    """Return the mapping in a text of JSON or YAML."""
    import yaml

    try:
        found = json.loads(text) if file.suffix == ".json" else _of_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: expected {file.suffix[1:]}, which cannot be read: {reason}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: expected a mapping of options, got {type(found).__name__}")
    return found


def _of_yaml(text: str) -> Any:
    """Return the data in a text of YAML; raise ValueError if its aliases mean far more than the text."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        size = _written_out(node, {})
        if size > len(text) + _MOST:
            raise ValueError(f"its aliases stand for {size} characters, more than {_MOST}")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _written_out(node: Any, known: dict[int, int]) -> int:
    """Count the characters of a YAML node, aliases written out; raise ValueError for one in itself."""
    if id(node) not in known:
        known[id(node)] = -1  # until all that is in it was counted
        inside = [x for pair in node.value for x in pair] if node.id == "mapping" else node.value
        if node.id == "scalar":
            known[id(node)] = len(inside) + 1
        else:
            known[id(node)] = 1 + sum(_written_out(x, known) for x in inside)
    if known[id(node)] < 0:
        raise ValueError("an alias stands inside of what it names")
    return known[id(node)]


def _flat(options: Mapping[str, Any], head: str = "") -> dict[str, Any]:
    """Return nested options by names with dots; a mapping without entries is no option."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and not str(name).endswith("kwargs"):
            found |= _flat(value, f"{head}{name}.")
        else:
            found[f"{head}{name}"] = value
    return found


def _words(file: Path, text: str) -> list[str]:
    """Return the words of a shell script."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"{file}: expected a shell script, which cannot be read: {error}") from None


def _programs(words: Sequence[str]) -> list[str]:
    """Return the names of Python's files and modules, and of subcommands of `trl`."""
    found = []
    for before, word in pairwise(["", *words]):
        if word.endswith(".py"):
            found.append(Path(word).stem)
        elif before in ("-m", "--module") or _MODULE.fullmatch(word):
            found.append(word.split(".")[-1])
        elif Path(before).name == "trl":
            found.append(word.replace("-", "_"))
    return found


def _of_shell(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of the commands in a shell script."""
    # an option without a value is true, one with several values has a list
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        assigned = _ASSIGNED.fullmatch(word)
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            _, _, value = word.partition("=")
            found[name] = value or True
            if value:
                name = ""
        elif assigned and ("." in assigned[1] or not name):
            found[assigned[1]] = assigned[2]
            name = ""
        elif name:
            found[name] = _with(found[name], word)
    found.pop("module", None)  # of a launcher
    return found


def _with(value: Any, word: str) -> Any:
    """Return the value of an option with one more word added."""
    if value is True:
        return word
    if isinstance(value, list):
        return [*value, word]
    return [value, word]


# ---------- the command line of ours that does what a config of another system says


KINDS = {
    "sft": "supervised fine-tuning",
    "dpo": "preference pairs",
    "rm": "a reward model",
    "rl": "GRPO, PPO and others that sample",
}


class Translation(NamedTuple):
    """A config in our words."""

    command: list[str]  # "python train_scripts/grpo.py", and its arguments
    notes: list[str]  # what differs in a way that matters
    without: dict[str, str]  # the options without a counterpart, and why
    unknown: list[str]  # names that are not in the table


# ------------------------------------------------------------------------------ translating


def translate(
    library: Library, options: Mapping[str, Any], programs: Sequence[str] = (), kind: str | None = None
) -> Translation:
    """Return our command for the options of another library; an unset one has that library's default.

    `kind` is the kind of the trainer, one of KINDS; with None, the programs or the options tell it. Raises
    ValueError if they tell none.
    """
    trainer = library.trainers[_kind(library, options, programs, kind)]
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

    # the last of the arguments that set one option; the usual three first
    last = {text.split()[0]: text for text in arguments if text}
    first = [last.pop(name) for name in ("--model", "--data", "--reward") if name in last]
    arguments = [*first, *last.values()]

    # what nobody can do without, and what few configs name
    script = trainer.script(whole)
    wanted = {"--data": "add a file or a hub name; without it the rows are those of a built-in task"}
    if script in ("grpo", "ppo"):
        wanted["--reward"] = "add FILE.py:FN, or one of docs/rewards.md"
    for name, what in wanted.items():
        if not any(text.startswith(f"{name} ") for text in arguments):
            notes = [*notes, f"{name}: {what}"]
    return Translation([f"python train_scripts/{script}.py", *arguments], notes, without, unknown)


def _arguments(row: Row, value: Any) -> str | None:
    """Return our arguments for a value; None where there are none."""
    if row.values is not None:
        found = row.values.get(str(value).lower(), row.values.get("*"))
        if found is not None or "{x}" not in row.ours:
            return found
    elif not row.ours:
        return None
    items = [str(value)]
    if isinstance(value, Mapping):
        items = [f"{key}={x}" for key, x in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = [str(x) for x in value]

    # a variable of the shell stays one
    words = (f'"{item}"' if "$" in item else shlex.quote(item) for item in items)
    return row.ours.format(x=row.separator.join(words))


def _kind(library: Library, options: Mapping[str, Any], programs: Sequence[str], named: str | None) -> str:
    """Return the kind of a config's trainer: as named, by its programs, or by options that no other has.

    Raises ValueError if the library has no such trainer, or if neither programs nor options tell one.
    """
    kinds = ", ".join(library.trainers)
    if named is not None:
        if named not in library.trainers:
            raise ValueError(f"trainer: expected one of {kinds} for {library.title}, got {named}")
        return named
    if len(library.trainers) == 1:
        return kinds
    for name in programs:
        if name in library.others:
            raise ValueError(f"trainer: expected one of {kinds}, got {name}; {library.others[name]}")
    found = [kind for kind, x in library.trainers.items() if set(programs) & set(x.programs)]
    if not found:
        found = [kind for kind in library.trainers if _is_told(library, kind, options)]
    if len(found) != 1:
        raise ValueError(
            f"trainer: expected options of one of {kinds}, or --trainer to name it, got those of "
            f"{', '.join(found) or 'none'}"
        )
    return found[0]


def _is_told(library: Library, kind: str, options: Mapping[str, Any]) -> bool:
    """Return whether there is an option that only this trainer has."""
    others = {name for other, x in library.trainers.items() if other != kind for name in x.rows}
    trainer = library.trainers[kind]
    if set(options) & (set(trainer.rows) - others):
        return True
    return any(f"{name}={value}".startswith(trainer.tells) for name, value in options.items())


# ------------------------------------------------------------------------------ the command


def table(title: str, trainer: Trainer) -> str:
    """Return a table in Markdown: each option of a trainer, and ours."""
    lines = [f"| {title} | rft_fn | |", "|---|---|---|"]
    for name, row in trainer.rows.items():
        shown = row.ours.replace("{x}", "X").replace("{{", "{").replace("}}", "}")
        lines.append(f"| `{name}` | {f'`{shown}`' if shown else 'none'} | {row.note} |")
    return "\n".join(lines)


def show(found: Translation) -> str:
    """Return the command, then notes and what has no counterpart as comments, so that a shell can run it."""
    lines = [" \\\n  ".join(found.command), ""]
    lines += [f"# {note}" for note in found.notes]
    lines += [f"# not translated: {name}: {why}" for name, why in found.without.items()]
    lines += [f"# not known: {name}" for name in found.unknown]
    return "\n".join(lines).rstrip()


def parser() -> argparse.ArgumentParser:
    """Return the arguments of the command line."""
    made = argparse.ArgumentParser(prog="python -m rft_fn.migrate", description=__doc__)
    made.add_argument("system", choices=sorted(LIBRARIES), help="where the config is from")
    made.add_argument("file", nargs="?", help="a .yaml, a .json, or a shell script with the options")
    kinds = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    made.add_argument("--trainer", choices=KINDS, help=f"{kinds}; if left out, as the file tells")
    made.add_argument("--table", action="store_true", help="print all options that are known of the system")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for a file that cannot be read or translated."""
    args = parser().parse_args(arguments)
    library = LIBRARIES[args.system]
    if args.table:
        kinds = [args.trainer] if args.trainer in library.trainers else list(library.trainers)
        print("\n\n".join(table(f"{library.title}, {x}", library.trainers[x]) for x in kinds))
        return 0
    if args.file is None:
        parser().error("expected a file, or --table")
    try:
        config = read(args.file)
        found = translate(library, config.options, config.programs, args.trainer)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    print(printable(show(found)))
    return 0
