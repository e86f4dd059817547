"""Rows that say what an option of another library is here."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rft_fn.tools.printer import word

__all__ = [
    "Combined",
    "Flag",
    "Library",
    "Row",
    "Table",
    "Trainer",
    "by_kind",
    "choice",
    "commas",
    "flag",
    "hinted",
    "integer",
    "lacks",
    "named",
    "nothing",
    "number",
    "only",
    "rows_of",
    "same",
    "several",
    "switch",
    "word",
]


class Flag(NamedTuple):
    """An option of our scripts that has the meaning of theirs."""

    option: str  # with underscores
    remark: str = ""  # where the unit or the meaning differs; a flag in it is one that the script has too
    needs: str = ""  # another option of the scripts in which it means this


# the first that a script has counts; a text for an option that no script has
Hint = Flag | tuple[Flag, ...] | str


class Row(NamedTuple):
    """What an option of another library is here."""

    ours: str  # our arguments, {x} is the value; empty where there is no counterpart
    note: str = ""  # what differs, or why there is none
    values: Mapping[str, str] | None = None  # our arguments for each value, "*" for all others
    separator: str = " "  # between the items of a list
    remark: str = ""  # of the command line's hint, which leads to the first flag in `ours`
    hint: Hint | None = None  # of the command line, where it is another one; "" for none
    kinds: "Mapping[str, Row] | None" = None  # of each kind of trainer, where they differ
    each: bool = False  # whether `values` are of each item of a list, and {x} of `ours` all that they give


# a kind of trainer or a group of them, and the beginning of the names that follow -> names of options, with
# spaces between the names of a row -> ours; rows of the kind "" are for hints only: a trainer combines these
# options with others, or has none
Table = Mapping[str, Mapping[str, Row]]
GROUPS = {"all": ("rl", "sft", "dpo", "rm"), "examples": ("sft", "dpo", "rm"), "pairs": ("dpo", "rm")}


class Combined(NamedTuple):
    """Our arguments for options that only have a meaning together."""

    arguments: list[str]
    used: set[str]  # their options
    notes: list[str]


class Trainer(NamedTuple):
    """A kind of training in another library, by the names of its options."""

    rows: Mapping[str, Row]
    defaults: Mapping[str, Any]  # of its options, where ours differ
    combine: Callable[[Mapping[str, Any]], Combined]
    script: Callable[[Mapping[str, Any]], str]  # the name of ours, without .py
    programs: tuple[str, ...]  # files and modules that start it, without .py
    tells: tuple[str, ...] = ()  # beginnings of NAME=VALUE that no other trainer has, besides its rows
    numbers: tuple[str, ...] = ()  # options that `combine` reads as numbers


class Library(NamedTuple):
    """Another library, and its kinds of training: rl, sft, dpo, rm."""

    title: str
    trainers: Mapping[str, Trainer]
    others: Mapping[str, str] = {}  # programs that train in a way that has no script -> what comes closest
    packages: tuple[str, ...] = ()  # whose modules are its programs
    modules: tuple[str, ...] = ()  # patterns of the modules of its packages that are read; no other one is
    implied: Mapping[str, Mapping[str, Any]] = {}  # options that a program has by default, where it differs
    told: Mapping[str, str] = {}  # an option that only one program has -> that program


def named(table: Table, kind: str | None = None) -> Iterator[tuple[str, Row]]:
    """Yield each name of a table with its row; of one kind of trainer, or of all and those for hints."""
    for section, rows in table.items():
        group, _, head = section.partition(" ")
        if kind is None or kind in GROUPS.get(group, (group,)):
            for names, row in rows.items():
                for name in names.split():
                    yield head + name, row


def rows_of(table: Table, kind: str) -> dict[str, Row]:
    """Return the rows of one kind of trainer, by name."""
    found: dict[str, Row] = {}
    for name, row in named(table, kind):
        for group, of_group in (row.kinds or {kind: row}).items():
            if kind in GROUPS.get(group, (group,)):
                found[name] = of_group
    return found


_FLAG = re.compile(r"--([a-z][a-z0-9.-]+)")


def hinted(name: str, row: Row) -> tuple[Flag, ...] | str | None:
    """Return our options of an option's meaning, or a text; None where its name and ours are the same."""
    if row.hint is not None:
        return (row.hint,) if isinstance(row.hint, Flag) else row.hint or None
    flags = []
    for x in (row.kinds or {"": row}).values():
        options = [x.rpartition(".")[2].removeprefix("no-").replace("-", "_") for x in _FLAG.findall(x.ours)]
        if name in options:
            return None
        if options:
            flags.append(Flag(options[0], x.remark))
    return tuple(dict.fromkeys(flags)) or None


def number(options: Mapping[str, Any], *names: str, default: float = 0.0) -> float:
    """Return the first option of these names that is a number."""
    for name in names:
        try:
            found = float(str(options[name]))
        except (KeyError, ValueError):
            continue
        if math.isfinite(found):
            return found
    return default


def integer(options: Mapping[str, Any], *names: str, default: int = 0) -> int:
    """Return the first option of these names that is a number, without a fraction."""
    found = number(options, *names, default=default)
    return int(found) if abs(found) < 1e15 else default


def same(ours: str, note: str = "", *, remark: str = "", hint: Hint | None = None) -> Row:
    """Return the value itself, as the value of `ours`."""
    return Row(f"{ours} {{x}}", note, remark=remark, hint=hint)


def commas(ours: str, remark: str = "") -> Row:
    """Return the items of a list with commas between them, as the value of `ours`."""
    return Row(f"{ours} {{x}}", separator=",", remark=remark)


def flag(ours: str, note: str = "") -> Row:
    """Return `ours` where the value is true, nothing where it is false."""
    return Row(ours, note, {"true": ours, "false": ""})


def switch(ours: str, note: str = "") -> Row:
    """Return --name or --no-name; of `strategy.name`, --strategy.name or --strategy.no-name."""
    head, dot, name = ours.rpartition(".")
    return Row(f"--{ours}", note, {"true": f"--{ours}", "false": f"--{head}{dot}no-{name}"})


def choice(note: str = "", /, *, remark: str = "", hint: Hint | None = None, **values: str) -> Row:
    """Return our arguments for each value; an empty text where ours do it by default."""
    shown = ", ".join(f"{value}: {ours or 'the default'}" for value, ours in values.items())
    return Row(shown, note, {value.lower(): ours for value, ours in values.items()}, remark=remark, hint=hint)


def several(ours: str, note: str = "", /, *, hint: Hint | None = None, **values: str) -> Row:
    """Return the words of ours for the items of a list, as values of one option; an empty one is left out."""
    return Row(f"{ours} {{x}}", note, {k.lower(): v for k, v in values.items()}, hint=hint, each=True)


def nothing(why: str, hint: Hint | None = None) -> Row:
    """Return a row without a counterpart in a trainer."""
    return Row("", why, hint=hint)


def lacks(why: str, *off: str, hint: Hint | None = None) -> Row:
    """Return a row without a counterpart for any value but those of `off`, which changes what is learned."""
    return Row("", why, dict.fromkeys(off, ""), hint=hint)


def only(hint: Hint) -> Row:
    """Return a row for the command line's hint."""
    return Row("", hint=hint)


def by_kind(hint: Hint | None = None, **kinds: Row) -> Row:
    """Return a row that differs by the kind of trainer, or by a group of them."""
    return Row("", hint=hint, kinds=kinds)
