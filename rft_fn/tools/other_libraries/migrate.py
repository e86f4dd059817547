"""The command line: `python -m rft_fn.migrate SYSTEM FILE` prints our command, --table all options."""

import argparse
import sys

from rft_fn.check import printable
from rft_fn.tools import other_libraries as migrate
from rft_fn.tools.other_libraries.rows import Trainer


def table(title: str, trainer: Trainer) -> str:
    """A table in Markdown: each option of a trainer, and ours."""
    lines = [f"| {title} | rft_fn | |", "|---|---|---|"]
    for name, row in trainer.rows.items():
        ours = "none"
        if row.ours:
            ours = f"`{row.ours.replace('{x}', 'X').replace('{{', '{').replace('}}', '}')}`"
        lines.append(f"| `{name}` | {ours} | {row.note} |")
    return "\n".join(lines)


def show(found: migrate.Translation) -> str:
    """The command, then notes and what has no counterpart as comments, so that a shell can run it."""
    lines = [" \\\n  ".join(found.command), ""]
    lines += [f"# {note}" for note in found.notes]
    lines += [f"# not translated: {name}: {why}" for name, why in found.without.items()]
    lines += [f"# not known: {name}" for name in found.unknown]
    return "\n".join(lines).rstrip()


def parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    made = argparse.ArgumentParser(prog="python -m rft_fn.migrate", description=migrate.__doc__)
    made.add_argument("system", choices=sorted(migrate.SYSTEMS), help="where the config is from")
    made.add_argument("file", nargs="?", help="a .yaml, a .json, or a shell script with the options")
    kinds = "; ".join(f"{kind}: {what}" for kind, what in migrate.KINDS.items())
    made.add_argument("--trainer", choices=migrate.KINDS, help=f"{kinds}; if left out, as the file tells")
    made.add_argument("--table", action="store_true", help="print all options that are known of the system")
    return made


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 2 for a file that cannot be read or translated."""
    args = parser().parse_args(arguments)
    system = migrate.SYSTEMS[args.system]
    if args.table:
        kinds = list(system.trainers)
        if args.trainer in kinds:
            kinds = [args.trainer]
        print("\n\n".join(table(f"{system.title}, {x}", system.trainers[x]) for x in kinds))
        return 0
    if args.file is None:
        parser().error("expected a file, or --table")
    try:
        config = migrate.read(args.file)
        found = migrate.translate(system, config.options, config.programs, args.trainer)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    print(printable(show(found)))
    return 0
