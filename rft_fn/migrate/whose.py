"""Whose config a file is, of which kind of trainer, and whether its program is one that is read."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from rft_fn.migrate import tables
from rft_fn.migrate.foreign_files import Config
from rft_fn.migrate.libraries import LIBRARIES
from rft_fn.migrate.rows import Library

__all__ = ["check_program", "kind_of", "program_of_path", "system"]


def system(config: Config) -> str:
    """Return the library of a config: by the package of its program, else by names of its options.

    ValueError for a config that tells none.
    """
    package = config.started.partition(".")[0]
    for name, library in LIBRARIES.items():
        if package in library.packages:
            return name

    for name, told in tables.plain("foreign")["names"].items():
        if (
            len(found := [x for x in told if any(o == x or o.startswith(f"{x}.") for o in config.options)])
            > 1
        ):
            raise ValueError(
                f"system: expected a config of one of {', '.join(LIBRARIES)}, got one of {name} "
                f"({', '.join(found[:4])})"
            )

    # a program of one library only, and the options that most are known of
    known = {}
    for name, library in LIBRARIES.items():
        rows = {option for trainer in library.trainers.values() for option in trainer.rows}
        tells = tuple(x for trainer in library.trainers.values() for x in trainer.tells)
        count = sum(option in rows or option.startswith(tells or ("\0",)) for option in config.options)
        programs = {x for trainer in library.trainers.values() for x in trainer.programs}
        known[name] = count + 3 * len(programs & set(config.programs))
    best = max(known, key=lambda name: known[name])
    if not known[best]:
        raise ValueError(
            f"system: expected options of one of {', '.join(LIBRARIES)}, got none that they have: "
            f"{', '.join(list(config.options)[:4])}"
        )
    return best


def check_program(library: Library, config: Config) -> None:
    """Raise ValueError for a program of the library's packages that is not in the list of known ones."""
    parts = re.sub(r"\.py$", "", config.started).replace("/", ".").split(".")
    at = max((k for k, x in enumerate(parts) if x in library.packages), default=None)
    module = ".".join(parts[at:]) if at is not None else parts[-1]
    programs = {x for trainer in library.trainers.values() for x in trainer.programs} | set(library.others)
    if at is not None and at + 1 < len(parts):
        known = (
            any(fnmatchcase(module, x) for x in library.modules) if library.modules else parts[-1] in programs
        )
        understood = known or parts[-1] in library.others
    else:
        named = any("." in x for x in config.options) and library.modules  # by hydra: a program of their form
        understood = parts[-1] in programs or parts[-1] in ("", *library.packages) or not named
    if not understood:
        own = ", ".join(
            dict.fromkeys(x.rpartition(".")[2].lstrip("*") for x in library.modules)
        ) or ", ".join(sorted(programs))
        raise ValueError(
            f"program: expected one of {own} of {library.title}, got {config.started}; --trainer "
            f"{'|'.join(library.trainers)} reads it as one"
        )


def kind_of(library: Library, options: Mapping[str, Any], programs: Sequence[str], named: str | None) -> str:
    """Return the kind of a config's trainer: as named, by its programs, or by options that no other has.

    Raises ValueError if the library has no such trainer, or if neither programs nor options tell one.
    """
    kinds = ", ".join(library.trainers)
    if named is not None:
        if named not in library.trainers:
            raise ValueError(f"trainer: expected one of {kinds} for {library.title}, got {named}")
        return named
    for name in programs:
        if name in library.others:
            raise ValueError(f"trainer: expected one of {kinds}, got {name}; {library.others[name]}")
    found = [kind for kind, x in library.trainers.items() if set(programs) & set(x.programs)]
    if len(library.trainers) == 1:
        return kinds
    if not found:
        found = _told(library, options)
    if len(found) != 1:
        raise ValueError(
            f"trainer: expected options of one of {kinds}, or --trainer to name it, got those of "
            f"{', '.join(found) or 'none'}"
        )
    return found[0]


def _told(library: Library, options: Mapping[str, Any]) -> list[str]:
    """Return the kinds of trainer that the options tell, the fewest; [] for none."""
    found = [kind for kind in library.trainers if _is_told(library, kind, options)]
    return found if len(found) == 1 else _most(library, found or list(library.trainers), options)


def _most(library: Library, kinds: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the kinds of trainer that know most of the telling options; [] for none."""
    rows = {kind: set(library.trainers[kind].rows) for kind in kinds}
    telling = set(options) - set.intersection(*rows.values())
    known = {kind: len(telling & rows[kind]) for kind in kinds}
    most = max(known.values())
    return [kind for kind in kinds if known[kind] == most] if most else []


def _is_told(library: Library, kind: str, options: Mapping[str, Any]) -> bool:
    """Return whether there is an option that only this trainer has."""
    others = {name for other, x in library.trainers.items() if other != kind for name in x.rows}
    trainer = library.trainers[kind]
    if set(options) & (set(trainer.rows) - others):
        return True
    return any(f"{name}={value}".startswith(trainer.tells) for name, value in options.items())


def program_of_path(library: Library, config: Config) -> Sequence[str]:
    """Return the program that the path of a file names, unless its content names another trainer."""
    kinds = {x: kind for kind, trainer in library.trainers.items() for x in trainer.programs}
    named = {x for x in config.path if x in kinds or x in library.others}
    if len(named) != 1:
        return []
    program = named.pop()
    told = _told(library, config.options)
    other = len(told) == 1 and told[0] != kinds.get(program)
    return [] if other or ("loss_type" in config.options and len(told) == 1) else [program]
