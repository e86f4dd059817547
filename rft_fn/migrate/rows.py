"""Rows that say what an option of another library is here."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rft_fn.tools.printer import word

__all__ = ["GROUPS", "Combined", "Flag", "Library", "Row", "Trainer", "hinted", "integer", "number", "word"]


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


# groups of kinds of trainer
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
    harmless: Mapping[str, list[str]] = {}  # why -> patterns of NAME or of NAME=VALUE
    releases: Mapping[str, Any] = {}  # defaults by release, and names that came or went


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
