"""Reads tables/*.toml: what an option of another library is here.

The head of trl.toml has the form of a row. A table that is not of this form is refused with the place in it:
an unknown key, a row twice, a `like` of nothing. That the options on our side exist is a test's, as the
scripts have them.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from rft_fn.migrate.rows import GROUPS, Flag, Hint, Row

__all__ = ["options", "plain", "read", "rows_of", "rows_with_kinds", "table"]

FOLDER = Path(__file__).parent / "tables"
KINDS = ("rl", "sft", "dpo", "rm")
_LIBRARY = {
    "title": str, "packages": list, "modules": list, "numbers": list, "trainers": dict, "like": dict,
    "rows": dict, "others": dict, "implied": dict, "told": dict, "harmless": dict, "releases": dict,
    "maps": dict,
}  # fmt: skip
_TRAINER = {
    "script": str, "combine": str, "programs": list, "tells": list, "numbers": list, "defaults": dict,
    "with": list, "with_undotted": list,
}  # fmt: skip
_ROW = {
    "to": str, "write": str, "on": str, "switch": str, "words": str, "values": dict, "none": str,
    "unless": list, "note": str, "separator": str, "remark": str,
}  # fmt: skip
_SHAPES = ("to", "write", "on", "switch", "words", "values", "none")  # what a row is; the rest is about it
_FLAG = {"flag": str, "remark": str, "needs": str}
_RELEASES = {"changed": dict, "gone": dict, "first": dict}


@cache
def table(name: str) -> Mapping[str, Any]:
    """Return the table of a library as its file has it."""
    return read((FOLDER / f"{name}.toml").read_text(), name)


@cache
def plain(name: str) -> dict[str, Any]:
    """Return a TOML file without rows, as it is; the module that reads it documents its keys."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def read(text: str, name: str) -> dict[str, Any]:
    """Return the table in a text; ValueError for what a table of a library cannot have."""
    found = tomllib.loads(text)
    _check(found, _LIBRARY, name)
    for kind, trainer in found.get("trainers", {}).items():
        _check(trainer, _TRAINER, f"{name}, trainers.{kind}")
    _check(found.get("releases", {}), _RELEASES, f"{name}, releases")
    list(rows_with_kinds(found, name))
    return found


def _check(given: Any, known: Mapping[str, type], where: str) -> None:
    """Raise ValueError for a key that is not known, or a value of another type."""
    if not isinstance(given, Mapping):
        _refuse(where, "a table", given)
    for key, x in given.items():
        if key not in known:
            _refuse(where, f"keys among {', '.join(known)}", key)
        if not isinstance(x, known[key]):
            _refuse(f"{where}.{key}", known[key].__name__, x)


def _refuse(where: str, wanted: str, got: Any) -> NoReturn:
    raise ValueError(f"{where}: expected {wanted}, got {got!r}")


# ------------------------------------------------------------------------------ rows


def rows_with_kinds(found: Mapping[str, Any], where: str) -> Iterator[tuple[str, tuple[str, ...], Row]]:
    """Yield (name, the kinds of trainer of its section, its row); no kinds for a row of hints."""
    twice = set()
    for section, rows in found.get("rows", {}).items():
        group, _, head = section.partition(" ")
        if group not in (*KINDS, *GROUPS, "hints"):
            _refuse(f"{where}, rows", f"sections among {', '.join((*KINDS, *GROUPS, 'hints'))}", group)
        kinds = () if group == "hints" else GROUPS.get(group, (group,))
        for names, given in rows.items():
            row = _row(given, found, f"{where}, {names}")
            for name in (head + name for name in names.split()):
                for kind in kinds or ("hints",):
                    if (name, kind) in twice:
                        _refuse(f"{where}, {name}", "one row", f"two of {kind}")
                    twice.add((name, kind))
                yield name, kinds, row


def _row(given: Any, found: Mapping[str, Any], where: str) -> Row:
    """Return a row of a table: a text is an option of ours that takes the value as it is."""
    if isinstance(given, str):
        given = {"to": given}
    if not isinstance(given, Mapping):
        _refuse(where, "an option of ours or a row", given)
    hint = _hint(given["hint"], where) if "hint" in given else None
    more = {key: x for key, x in given.items() if key != "hint"}
    if "like" in more:
        named = {**plain("shared")["like"], **found.get("like", {})}
        if len(given) > 1 or given["like"] not in named:
            _refuse(where, f"`like` alone, of {', '.join(named)}", given)
        return _row(named[given["like"]], found, where)
    if more.keys() & {*KINDS, *GROUPS}:
        if unknown := more.keys() - {*KINDS, *GROUPS}:
            _refuse(where, "kinds of trainer and a hint", sorted(unknown)[0])
        kinds = {kind: _row(x, found, f"{where}, {kind}") for kind, x in more.items()}
        return Row("", hint=hint, kinds=kinds)
    _check(more, _ROW, where)
    shapes = [key for key in _SHAPES if key in more]
    if len(shapes) > 1 and shapes != ["write", "values"] and shapes != ["words", "values"]:
        _refuse(where, "one of to, write, on, switch, words and none", shapes)
    if not shapes and hint is None:
        _refuse(where, f"one of {', '.join(_SHAPES)} and a hint", sorted(more))
    if any(not more[key].startswith("--") for key in ("to", "write", "on", "switch", "words") if key in more):
        _refuse(where, "options as --NAME", more[shapes[0]])
    ours, values = _ours(more)
    return Row(
        ours,
        more.get("note", more.get("none", "")),
        values,
        more.get("separator", " "),
        more.get("remark", ""),
        hint,
        each="words" in more,
    )


def _ours(given: Mapping[str, Any]) -> tuple[str, Mapping[str, str] | None]:
    """Return the arguments that a row translates to, and a mapping by value if it has one."""
    values = {name.lower(): ours for name, ours in given["values"].items()} if "values" in given else None
    if "to" in given or "words" in given:
        return f"{given.get('to') or given['words']} {{x}}", values
    if "on" in given:
        return given["on"], {"true": given["on"], "false": ""}
    if "switch" in given:
        head, dot, name = given["switch"].removeprefix("--").rpartition(".")
        return given["switch"], {"true": given["switch"], "false": f"--{head}{dot}no-{name}"}
    if "none" in given:
        return "", dict.fromkeys(given["unless"], "") if "unless" in given else None
    if "write" not in given and values is not None:
        shown = (f"{value}: {ours or 'the default'}" for value, ours in given["values"].items())
        return ", ".join(shown), values
    return given.get("write", ""), values


def _hint(given: Any, where: str) -> Hint:
    """Return what an unknown option is answered with: our options in this meaning, or a text."""
    if isinstance(given, Mapping) and "like" in given:
        named = plain("shared")["hints"]
        if len(given) > 1 or given["like"] not in named:
            _refuse(f"{where}, hint", f"`like` alone, of {', '.join(named)}", given)
        return _hint(named[given["like"]], where)
    if isinstance(given, list):
        return tuple(_flag(x, where) for x in given)
    return given if isinstance(given, str) and not given.startswith("--") else _flag(given, where)


def _flag(given: Any, where: str) -> Flag:
    """Return an option of ours: --NAME, or with a remark and an option that a script needs beside it."""
    if isinstance(given, str):
        given = {"flag": given}
    _check(given, _FLAG, f"{where}, hint")
    if not str(given.get("flag")).startswith("--"):
        _refuse(f"{where}, hint", "an option as --NAME", given.get("flag"))
    option, needs = (given.get(key, "").removeprefix("--").replace("-", "_") for key in ("flag", "needs"))
    return Flag(option, given.get("remark", ""), needs)


def rows_of(name: str, kind: str, *, dotted: bool = True) -> dict[str, Row]:
    """Return the rows of a table for one kind of trainer, by name; those with dots where they are wanted."""
    found: dict[str, Row] = {}
    for option, kinds, row in rows_with_kinds(table(name), name):
        if kind not in kinds or ("." in option and not dotted):
            continue
        for group, of_group in (row.kinds or {kind: row}).items():
            if kind in GROUPS.get(group, (group,)):
                found[option] = of_group
    return found


@cache
def options() -> dict[str, Mapping[str, Row]]:
    """Return the options of each library that a hint answers, by name with underscores."""

    def of(name: str) -> dict[str, Row]:
        found: dict[str, Row] = {}
        for option, _, row in rows_with_kinds(table(name), name):
            found.setdefault(option, row)
        return found

    both = of("openrlhf_and_lightrft")
    return {
        "TRL": of("trl"),
        "verl": of("verl"),
        "OpenRLHF and LightRFT": {name: row for name, row in both.items() if "." not in name},
        "OpenRLHF": of("openrlhf") | {name: row for name, row in both.items() if "." in name},
        "LightRFT": of("lightrft"),
        "prime-rl": {name: row for name, row in of("prime_rl").items() if "." in name},
    }
