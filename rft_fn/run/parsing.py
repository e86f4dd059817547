"""From a command line to a config: options by their short names, and what is wrong with them in one line."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any, get_type_hints

from rft_fn.run import elsewhere

__all__ = ["names", "parse", "qualify"]

_RULE = re.compile(r"[╭╮╰╯─-]+")
_KINDS = {"INT": "an integer", "FLOAT": "a number", "STR": "a text"}
_HELP = "--help lists the options"


def qualify(args: Sequence[str], config: type) -> list[str]:
    """args, with --NAME as --PART.NAME for an option that only one dataclass within `config` has."""
    hints = get_type_hints(config)
    owners = {name: [""] for name in hints}
    for part, hint in hints.items():
        for f in dataclasses.fields(hint) if dataclasses.is_dataclass(hint) else ():
            owners.setdefault(f.name, []).append(f"{part}.")

    def whole(match: re.Match[str]) -> str:
        no, name = match[1] or "", match[2]
        if name.replace("-", "_") == "disable_engine_sleep":
            no, name = "no-", "enable-engine-sleep"
        found = owners.get(name.replace("-", "_"), [""])
        part = found[0] if len(found) == 1 else ""
        return f"--{part}{no}{name}"

    return [re.sub(r"^--(no[-_])?([\w-]+)(?==|$)", whole, arg) for arg in args]


def parse(config: type, args: Sequence[str]) -> Any:
    """The config of a command line. ValueError, in one line, for options that are none or have no such value.

    For a value outside of an option's limits the line is the config's own, for an option of another library
    it says what that is here.
    """
    elsewhere.check(args, names(config))
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(config, args=args)
    except SystemExit as end:
        if end.code:
            raise ValueError(_line(_sections(said.getvalue()))) from None
        raise  # --help


def names(config: type) -> set[str]:
    """The options of a config: its fields, and those of its parts, with the part's name and without."""
    found = {"help", "disable_engine_sleep"}
    for name, hint in get_type_hints(config).items():
        found.add(name)
        for f in dataclasses.fields(hint) if dataclasses.is_dataclass(hint) else ():
            found |= {f.name, f"{name}.{f.name}"}
    return found


def _sections(text: str) -> list[list[str]]:
    """The lines within the box that tyro draws around what is wrong, without its title, from rule to rule."""
    sections: list[list[str]] = [[]]
    for line in text.splitlines()[1:]:
        line = line.strip(" │")
        if _RULE.fullmatch(line):
            sections.append([])
        elif line:
            sections[-1].append(line)
    return [section for section in sections if section]


def _line(sections: list[list[str]]) -> str:
    """What is wrong, as this project says it: name: expected X, got Y."""
    said = " ".join(sections[0])
    if found := re.match(r"Error parsing --(\S+): ", said):
        return _no_value(_name(found[1]), said, sections)
    if found := re.match(r"Error parsing \S+: (.*)", said):  # the config's own
        return found[1]
    if found := re.match(r"invalid choice '(.*)' for argument '--(.*)'. Expected one of \((.*?),?\)", said):
        return f"{_name(found[2])}: expected one of {found[3].replace(chr(39), '')}, got {found[1]!r}"
    if found := re.match(r"Missing value for argument '--(.*?)'", said):
        return f"{_name(found[1])}: expected a value, got none"
    if found := re.match(r"Missing from \S+: (.*?) \(required\)", said):
        return f"missing: {found[1]}; {_HELP}"
    like = [line.split()[0] for part in sections[1:] for line in part if line.startswith("--")]
    remedy = f"did you mean {' or '.join(dict.fromkeys(like))}?" if like else _HELP
    return f"{said[:1].lower()}{said[1:].rstrip('.')}; {remedy}"


def _no_value(name: str, said: str, sections: list[list[str]]) -> str:
    """The line for a text that is no value of the option `name`; its kind stands in the help below."""
    kind = next(line.split()[-1] for part in sections[1:] for line in part if line.startswith("--"))
    want = _KINDS.get(kind.removeprefix("{None}|"), kind)
    if kind.startswith("{None}|"):
        want += ", or None"
    got = re.search(r"'([^']*)'", said.split("could be instantiated from ")[-1])
    if got is None:
        return f"{name}: expected {want}"
    return f"{name}: expected {want}, got {got[1]!r}"


def _name(option: str) -> str:
    return option.replace("-", "_")
