"""Our command line for a config of another library: `rft migrate FILE`.

The library is told by the content. A command is parsed by the script that it names before it is printed, and
what the script refuses is left out with a note.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from rft_fn.migrate import accepted, easyr1, releases
from rft_fn.migrate import rows as r
from rft_fn.migrate.foreign_files import Config, read
from rft_fn.migrate.libraries import LIBRARIES
from rft_fn.migrate.rows import Combined, Library, Row, Trainer
from rft_fn.migrate.whose import check_program, kind_of, program_of_path, system
from rft_fn.tools import printer

__all__ = ["KINDS", "Translation", "main", "read", "system", "table", "translate"]


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
    unknown: list[str]  # what may change the objective: names in no table, values that no row has


# ------------------------------------------------------------------------------ translating


def translate(
    library: Library,
    options: Mapping[str, Any],
    programs: Sequence[str] = (),
    kind: str | None = None,
    version: str = "",
) -> Translation:
    """Return our command for the options of another library; an unset one has that library's default.

    `kind` is the kind of the trainer, one of KINDS; with None, the programs or the options tell it. Defaults
    are those of the release `version`, or of the one that the options tell. Raises ValueError if they tell no
    kind, and if most of the options are not known.
    """
    kind, system = kind_of(library, options, programs, kind), _name(library)
    trainer = library.trainers[kind]
    before, versions = {}, []
    if kind == "rl" and options.get("loss_type") != "rloo":
        before, versions = releases.older(system, library.releases, options, version)
    options, notes = _numbers(trainer, _switched_off(trainer, {**options, **before}))
    (arguments, used, more), whole = _combined(trainer, options)
    notes, used = [*versions, *notes, *more], used | {"processes"}
    if "processes" in options:
        notes.append(f"processes: torchrun --nproc-per-node {options['processes']} starts as many as theirs")
    theirs: dict[str, tuple[str, str]] = {}  # what an argument is of, and the note of its row
    without: dict[str, str] = {}
    changes: list[str] = []  # names in no table
    unknown: list[str] = []
    for name, value in whole.items():
        row = trainer.rows.get(name)
        if value in ("", [], {}) or name in used:
            continue
        told, why = f"{name}={value}", _harmless(library, name, value)
        found = _arguments(row, value) if row is not None else None
        if row is not None and found is not None:
            arguments = [*arguments, found]
            theirs[_safe(found) if found else ""] = told, row.note
        elif why is not None:
            without[told] = why
        elif row is None:
            changes.append(told)
        elif row.values is None or row.each:  # a row without a counterpart for any value
            without[told] = row.note
        else:
            unknown.append(f"{told}: {row.note}" if row.note else told)
    _check_share(library, changes, len(options.keys() - before.keys()))
    unknown = [*([", ".join(changes)] if changes else []), *unknown]

    # the last of the arguments that set one option
    last = {text.split()[0]: text for text in arguments if text}
    arguments = [*last.values()]

    # what the script refuses; then what nobody can do without, and what few configs name
    script = trainer.script(whole)
    arguments, engine = _of_engine([_safe(argument) for argument in arguments])
    arguments, refused = accepted.accepted(script, arguments)
    notes += [*engine, *(_refused(script, x, why, *theirs.get(x, ("", ""))) for x, why in refused.items())]
    arguments, missing = _with_places(script, arguments)
    notes = [*missing, *notes]
    return Translation([f"python train_scripts/{script}.py", *arguments], notes, without, unknown)


_FIRST = ("--model", "--data", "--reward")  # what every run names


def _with_places(script: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return arguments with a place for each of _FIRST that they have not, these first, and notes."""
    wanted = {"--model": ("MODEL", "a folder or a hub name"), "--data": ("DATA", "a file or a hub name")}
    if script in ("grpo", "ppo"):
        wanted["--reward"] = "REWARD", "FILE.py:FN, or one of docs/rewards.md"
    first = {name: x for name in _FIRST for x in arguments if x.startswith(f"{name} ")}
    missing = {name: found for name, found in wanted.items() if name not in first}
    placed = [first.get(name) or f"{name} {missing[name][0]}" for name in _FIRST if name in first | missing]
    notes = [f"{name}: the file has none; {place} is {what}" for name, (place, what) in missing.items()]
    return [*placed, *(x for x in arguments if x not in first.values())], notes


def _harmless(library: Library, name: str, value: Any) -> str | None:
    """Return why an option of a library changes no objective; None where that is not known."""
    is_zero = not isinstance(value, bool) and _is_number(value) and float(value) == 0
    told = f"{name}={'0' if is_zero else str(value).lower()}"
    for why, patterns in library.harmless.items():
        if any(fnmatchcase(told if "=" in x else name, x) for x in patterns):
            return why
    return None


def _check_share(library: Library, unknown: Sequence[str], given: int) -> None:
    """Raise ValueError if most of the `given` options are unknown."""
    if len(unknown) > 2 and 2 * len(unknown) > given:
        raise ValueError(
            f"options: expected names of {library.title}, of {given} {len(unknown)} are not known: "
            f"{', '.join(x.partition('=')[0] for x in unknown[:8])}; too much of the run would not be theirs"
        )


def _name(library: Library) -> str:
    return next(name for name, x in LIBRARIES.items() if x is library)


def _safe(argument: str) -> str:
    """Return an argument in which each word is one to a shell, so that a value runs nothing."""
    try:
        first, *words = shlex.split(argument)
    except ValueError:
        first, _, rest = argument.partition(" ")
        words = [rest]
    return printer.command([first, *words])


_OF_VLLM = ("mem-util", "tp-size", "max-model-len", "dtype")


def _of_engine(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Leave out options of vLLM where another engine samples, with a note; also a server without address."""
    kept, notes = list(arguments), []
    server = next((x for x in kept if x.startswith("--strategy.engine-type sglang")), None)
    if server and not any(x.startswith("--strategy.engine-servers") for x in kept):
        kept.remove(server)
        notes.append(
            "engine: sglang samples on servers here: --strategy.engine-type sglang --strategy.engine-servers "
            "http://HOST:PORT, see docs/engines.md; without them transformers samples in the process"
        )
    if "--strategy.engine-type vllm" not in kept:
        own = [x for x in kept if x.startswith(tuple(f"--strategy.engine-{name} " for name in _OF_VLLM))]
        kept = [x for x in kept if x not in own]
        if own:
            notes.append(f"left out: {', '.join(own)}: of vLLM in the process, --strategy.engine-type vllm")
    return kept, notes


def _refused(script: str, argument: str, why: str, theirs: str, note: str) -> str:
    """Return the note about an argument that a script refuses."""
    if not argument:
        return f"{script}.py refuses it: {why}"
    if why.startswith("unrecognized"):
        why = f"{script}.py has no such option" + (f"; {note}" if note else "")
    origin = f", of {theirs}" if theirs else ""
    return f"left out: {argument}{origin}: {why}"


_ODD = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


def _combined(trainer: Trainer, options: Mapping[str, Any]) -> tuple[Combined, dict[str, Any]]:
    """Return what a trainer makes of options together, and the options with its defaults.

    An option of a form that it cannot read, as a list in the place of a name, is left out with a note.
    """
    given = {name: x for name, x in options.items() if not _is_null(x)}
    unlimited = {name for name in _UNLIMITED if name in options and name not in given}
    usual = {name: x for name, x in trainer.defaults.items() if name not in unlimited}
    whole = {**usual, **given}
    try:
        return trainer.combine(whole), whole
    except _ODD:
        whole, notes = dict(usual), []
    for name, x in given.items():
        try:
            trainer.combine({**whole, name: x})
            whole[name] = x
        except _ODD:
            notes.append(f"{name}={x}: not of a form that can be read, so it is left out")
    found = trainer.combine(whole)
    return found._replace(notes=[*notes, *found.notes]), whole


_UNLIMITED = ("max_length",)  # options in which null is a value: no limit


def _switched_off(trainer: Trainer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with --no_NAME as NAME=false, for the switches of transformers."""
    found: dict[str, Any] = {}
    for name, x in options.items():
        short = name.removeprefix("no_")
        off = short != name and x is True and name not in trainer.rows and short in trainer.rows
        found[short if off else name] = "false" if off else x
    return found


def _is_null(x: Any) -> bool:
    return x is None or (isinstance(x, str) and x in ("null", "None", "~"))  # "none" is a scale


def _numbers(trainer: Trainer, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options without texts in the place of numbers, and a note for each of these."""
    kept: dict[str, Any] = {}
    notes = []
    for name, value in options.items():
        items = value if isinstance(value, list) else str(value).split() or [""]
        if name in trainer.numbers and not _is_null(value) and not all(map(_is_number, items)):
            ours = trainer.rows[name].ours.partition(" ")[0] if name in trainer.rows else ""
            into = f"; write its number as {ours}" if ours else ""
            notes.append(f"{name}={value}: not a number that the file tells, so it is left out{into}")
        else:
            kept[name] = value
    return kept, notes


def _is_number(x: Any) -> bool:
    try:
        return abs(float(x)) < float("inf")
    except (TypeError, ValueError):
        return False


def _arguments(row: Row, value: Any) -> str | None:
    """Return our arguments for a value; None where there are none."""
    items = [str(value)]
    if isinstance(value, Mapping):
        items = [f"{key}={x}" for key, x in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = [str(x) for x in value]
    if row.each:
        ours = [(row.values or {}).get(item.lower()) for item in items]
        known = [x for x in ours if x]
        if None in ours and not known:
            return None
        return row.ours.format(x=" ".join(known)) if known else ""
    if row.values is not None:
        found = row.values.get(str(value).lower(), row.values.get("*"))
        if found is not None or "{x}" not in row.ours:
            return found
    elif not row.ours:
        return None

    # a name of a column, in braces
    flag, _, pattern = row.ours.partition(" ")
    if pattern.startswith("'"):
        return f"{flag} {r.word(pattern.strip(chr(39)).format(x=row.separator.join(items)))}"

    # a variable of the shell stays one
    return row.ours.format(x=row.separator.join(r.word(item) for item in items))


# ------------------------------------------------------------------------------ the command


def table(title: str, trainer: Trainer) -> str:
    """Return a table in Markdown: each option of a trainer, and ours."""
    lines = [f"| {title} | rft_fn | |", "|---|---|---|"]
    for name, row in trainer.rows.items():
        shown = row.ours.replace("{x}", "X").replace("{{", "{").replace("}}", "}")
        if row.each:
            shown = shown.replace("X", "|".join(x for x in (row.values or {}).values() if x))
        shown = shown.replace("|", "\\|")
        lines.append(f"| `{name}` | {f'`{shown}`' if shown else 'none'} | {row.note} |")
    return "\n".join(lines)


def show(found: Translation) -> str:
    """Return what may be another objective, the command, then notes, as comments that a shell skips."""
    reasons: dict[str, list[str]] = {}
    for name, why in found.without.items():
        reasons.setdefault(why, []).append(name)
    first = [f"may change the objective, and is not translated: {x}" for x in found.unknown]
    first += [note for note in found.notes if note.startswith("objective:")]
    last = [note for note in found.notes if not note.startswith("objective:")]
    last += [f"not translated: {', '.join(names)}: {why}" for why, names in reasons.items()]
    before, after = ("\n".join(map(printer.comment, lines)) for lines in (first, last))
    return "\n\n".join(part for part in (before, " \\\n  ".join(found.command), after) if part)


def unresolved(config: Config, command: Sequence[str]) -> list[str]:
    """Return a note for each text in a command that no line of the file gives a value."""
    text = " ".join(command)
    return [
        f"line {line}: {x} has no value in the file; write it in the command, or set it before"
        for x, line in config.unknown.items()
        if x in text
    ]


def translated(config: Config, name: str = "", kind: str | None = None, version: str = "") -> Translation:
    """Return our command for a run of a file, with notes on what could not be read."""
    first: list[str] = []
    if name in ("", "verl") and easyr1.is_easyr1(config.options):
        name = "verl"
        missing = next((x.partition(",")[0] for x in config.notes if x.endswith("is not here")), "")
        options, first = easyr1.as_verl(config.options, missing)
        notes = [x for x in config.notes if not missing.endswith("examples/config.yaml") or missing not in x]
        config = config._replace(options=options, notes=notes, programs=config.programs or ["main"])
    library = LIBRARIES[name or system(config)]
    if kind is None:
        check_program(library, config)
    told = [program for option, program in library.told.items() if option in config.options]
    programs = config.programs or told[:1] or program_of_path(library, config)
    options = {**next((library.implied[x] for x in [*programs, *told] if x in library.implied), {})}
    if config.processes > 1:
        options["processes"] = config.processes
    open_, given = _open(config.options)
    found = translate(library, {**options, **given}, programs, kind, version)
    decide = [note for name, note in open_.items() if not _is_place(library, name)]
    open_ = [note for note in open_.values() if note not in decide]
    notes = [*first, *open_, *config.notes, *unresolved(config, found.command)]
    return found._replace(notes=[*notes, *found.notes], unknown=[*decide, *found.unknown])


def _is_place(library: Library, name: str) -> bool:
    """Return whether an option is what a run is called, or where it, its model or its data are."""
    ours = {x.rows[name].ours.partition(" ")[0] for x in library.trainers.values() if name in x.rows}
    named = bool(ours & {"--out", "--run-name", "--project", "--model", "--data", "--eval-data", "--seed"})
    return named or _harmless(library, name, "") is not None


# what a shell would not have, or would run: $1, $(cat x), ${LIST[@]}; a date is harmless
_NEVER = re.compile(r"\$\{?\d|\$\((?!date\b)|`|\$\{[^}]*[^\w}]")


def _open(options: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a note for each option with a value that only a run of the file has, and the others."""
    notes, given = {}, {}
    for name, x in options.items():
        if isinstance(x, str) and _NEVER.search(x):
            what = "an argument of the script" if re.search(r"\$\{?\d", x) else "what a command prints"
            what = "of another place of the config" if re.search(r"\$\{[\w:]*\.", x) else what
            notes[name] = f"{name}={x}: {what}, so it is left out"
        else:
            given[name] = x
    return notes, given


def _all(configs: Sequence[Config], name: str, kind: str | None, version: str = "") -> list[Translation]:
    """Translate each config that trains; ValueError of the last one where none does."""
    found = []
    error: ValueError | None = None
    for config in configs:
        try:
            found.append(translated(config, name, kind, version))
        except ValueError as problem:  # such as a command that prepares data
            error = problem
    if not found and error is not None:
        raise error
    return found


def parser() -> argparse.ArgumentParser:
    """Return the arguments of the command line."""
    made = argparse.ArgumentParser(prog="rft migrate", description=__doc__)
    made.add_argument(
        "words", nargs="*", metavar="FILE", help="a shell or Python script, .yaml, .toml, .json"
    )
    made.add_argument(
        "--system", choices=sorted(LIBRARIES), help="whose it is; if left out, as the file tells"
    )
    kinds = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    made.add_argument("--trainer", choices=KINDS, help=f"{kinds}; if left out, as the file tells")
    made.add_argument(
        "--from-version", default="", metavar="0.15", help="its release; if left out, as the file tells"
    )
    made.add_argument("--table", action="store_true", help="print all options that are known of the system")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for a file that cannot be read or translated."""
    args = parser().parse_args(arguments)
    if args.system is None and args.words and args.words[0] in LIBRARIES:  # SYSTEM FILE
        args.system = args.words.pop(0)
    if args.table and args.system:
        library = LIBRARIES[args.system]
        kinds = [args.trainer] if args.trainer in library.trainers else list(library.trainers)
        print("\n\n".join(table(f"{library.title}, {x}", library.trainers[x]) for x in kinds))
        return 0
    if len(args.words) != 1:
        parser().error("expected one FILE, or --table with --system")
    try:
        found = _all(read(args.words[0]), args.system or "", args.trainer, args.from_version)
    except ValueError as error:
        print(f"error: {printer.line(error)}", file=sys.stderr)
        return 2
    print("\n\n".join(map(show, found)))
    return 0
