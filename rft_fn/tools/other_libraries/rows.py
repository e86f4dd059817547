"""Rows that say which of our options another system's option is."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = [
    "Combined", "Row", "System", "Trainer", "choice", "commas", "flag", "nothing", "same", "switch",
]  # fmt: skip


class Row(NamedTuple):
    """The counterpart of one option."""

    ours: str  # our arguments, {x} is the value; empty where there is no counterpart
    note: str  # what differs, or why there is none
    values: Mapping[str, str] | None = None  # our arguments for each value, "*" for all others
    separator: str = " "  # between the items of a list


class Combined(NamedTuple):
    """Our arguments for options that only have a meaning together."""

    arguments: list[str]
    used: set[str]  # their options
    notes: list[str]


class Trainer(NamedTuple):
    """One kind of training by another system, by the names of its options."""

    rows: Mapping[str, Row]
    defaults: Mapping[str, Any]  # of its options, where ours differ
    combine: Callable[[Mapping[str, Any]], Combined]
    script: Callable[[Mapping[str, Any]], str]  # the name of ours, without .py
    sections: Mapping[str, str]  # the beginning of a name -> why nothing under it has a counterpart
    programs: tuple[str, ...]  # files and modules that start it, without .py
    tells: tuple[str, ...] = ()  # beginnings of NAME=VALUE that no other trainer has, beside its own rows


class System(NamedTuple):
    """Another system, and its kinds of training: rl, sft, dpo, rm."""

    title: str
    trainers: Mapping[str, Trainer]
    others: Mapping[str, str] = {}  # programs that train in a way that has no script -> what comes closest


def same(ours: str, note: str = "") -> Row:
    """The value itself, as the value of `ours`."""
    return Row(f"{ours} {{x}}", note)


def commas(ours: str) -> Row:
    """The items of a list with commas between them, as the value of `ours`."""
    return Row(f"{ours} {{x}}", "", None, ",")


def flag(ours: str, note: str = "") -> Row:
    """`ours` where the value is true, nothing where it is false."""
    return Row(ours, note, {"true": ours, "false": ""})


def switch(ours: str, note: str = "") -> Row:
    """--name or --no-name; of `strategy.name`, --strategy.name or --strategy.no-name."""
    head, _, name = ours.rpartition(".")
    if head:
        head += "."
    off = f"{head}no-{name}"
    return Row(f"--{ours}", note, {"true": f"--{ours}", "false": f"--{off}"})


def choice(note: str = "", /, **values: str) -> Row:
    """Our arguments for each value; an empty text where ours do it by default."""
    shown = ", ".join(f"{value}: {ours or 'the default'}" for value, ours in values.items())
    return Row(shown, note, {value.lower(): ours for value, ours in values.items()})


def nothing(why: str) -> Row:
    """No counterpart."""
    return Row("", why)
