"""The command line: `python -m rft_fn.migrate SYSTEM FILE` prints our command, --table all options."""

import argparse
import sys

from rft_fn import migrate
from rft_fn.migrate.row import System


def table(system: System) -> str:
    """A table in Markdown: each option, and ours."""
    lines = [f"| {system.title} | rft_fn | |", "|---|---|---|"]
    for name, row in system.rows.items():
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
    made.add_argument("--table", action="store_true", help="print all options that are known of the system")
    return made


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 2 for a file that cannot be read."""
    args = parser().parse_args(arguments)
    system = migrate.SYSTEMS[args.system]
    if args.table:
        print(table(system))
        return 0
    if args.file is None:
        parser().error("expected a file, or --table")
    try:
        options = migrate.read(args.file)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(show(migrate.translate(system, options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
