"""What --help prints: what most runs set on one screen, all options, or those of a subject."""

import ast
import dataclasses
import difflib
import inspect
import io
import re
import shutil
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

__all__ = ["asked", "text"]


class Row(NamedTuple):
    """An option as --help shows it."""

    subject: str  # the heading over it
    name: str  # lr, strategy.fsdp
    flag: str  # --lr FLOAT
    help: str  # what it does
    default: str  # behind that: (default: 0.1), (required), or nothing


def asked(args: Sequence[str]) -> str | None:
    """Return the word behind --help, "" without one; None for arguments that do not ask for help."""
    for i, arg in enumerate(args):
        flag, equals, word = arg.partition("=")
        if flag in ("-h", "--help"):
            behind = "".join(args[i + 1 : i + 2])
            return word if equals or behind.startswith("-") else behind
    return None


def text(
    config: type, *, prog: str | None = None, more: Sequence[tuple[str, str]] = (), word: str = ""
) -> str:
    """Return what `--help WORD` prints, at most as wide as the terminal.

    Without a word that is one screen: what the script is, a command, and the options that most runs use.
    "all" is every option, and the first word of a heading those below it. Options of which none comes first,
    as those of a command, are all shown.

    `prog` is the program, by default the file of this process, and `more` are flags and what they do that the
    caller has taken from the command line. ValueError for a word that is none of these.
    """
    width = min(shutil.get_terminal_size().columns, 120)
    own = Path((prog or _program()).split()[-1]).stem
    rows = list(_described(config, own))
    first = _first(config)
    extra = [Row(own, "", flag, said, "") for flag, said in more]
    groups: dict[str, list[Row]] = {own: []}
    for row in rows:
        groups.setdefault(row.subject, []).append(row)
    if excluded := list(_excluded(config)):
        groups[_EXCLUSIONS] = excluded
    groups[own] += [*extra, Row(own, "", "-h, --help", "show this help and exit", "")]
    if first and not word:
        shown = [row for row in rows if row.name in first]
        shown.sort(key=lambda row: _PLACES.get(row.subject, 1 if row.subject == own else 2))
        rest = ""
        if len(shown) < len(rows):
            subjects = ", ".join(dict.fromkeys(map(_word, groups)))
            rest = f"--help all shows all {len(rows)} options, --help SUBJECT those of a subject: {subjects}"
        return _screen(config, prog, [*shown, *extra], rest, width)

    if word in ("", "all"):
        return _whole(config, prog or _program(), groups, width)
    if word not in (known := list(dict.fromkeys(map(_word, groups)))):
        near = difflib.get_close_matches(word, known, n=1)
        like = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"help: expected all, or one of {', '.join(known)}, got {word!r}{like}")
    return "\n".join(_grouped({s: rows for s, rows in groups.items() if _word(s) == word}, width))


def _program() -> str:
    """Return the file of this process as it was typed, without the folder of an installed one."""
    path = Path(sys.argv[0])
    return path.name if path.is_absolute() else str(path)


def _command(prog: str | None) -> str:
    """Return how one starts the program: python FILE, or rft run NAME for a script of an installation."""
    path = Path(prog or sys.argv[0])
    if path.is_absolute() and path.parent.name in ("train_scripts", "rft_scripts"):
        return f"rft run {path.stem}"
    return f"python {path}" if path.suffix == ".py" else str(path)


def _first(config: type) -> set[str]:
    """Return the options that the first screen shows: what a config and its bases say comes first.

    A script that says nothing shows all that it adds to its bases, unless these fill the screen.
    """
    first = {name for kind in config.__mro__ for name in vars(kind).get("__first__", ())}
    if "__first__" in vars(config) and not config.__first__ and len(first) < _ROWS:
        inherited = {name for kind in config.__mro__[1:] for name in inspect.get_annotations(kind)}
        hints = get_type_hints(config)
        own = inspect.get_annotations(config).keys() - inherited
        first |= {name for name in own if not dataclasses.is_dataclass(hints[name])}
    return first


def _word(subject: str) -> str:
    """Return the word that asks for the options below a heading."""
    return subject.split()[0].lower()


# ---------- one screen

_ROWS = 20
"""Options that a screen has room for, as some take two lines."""

_PLACES = {"Model": 0, "Data": 0, "Rewards": 0}
"""Subjects that come before a script's own options, as one thinks of them; all others come behind."""


def _screen(config: type, prog: str | None, rows: Sequence[Row], rest: str, width: int) -> str:
    """Return what a script is, a command, its first options in a line or two each, and where the rest is."""
    summary, example = _about(config, _command(prog))
    lines = [*textwrap.wrap(summary, width), "", *_broken(example, width), ""]
    short = {row.name: row.flag for row in rows}
    alone = [row.name.rpartition(".")[2] for row in rows]
    for row in rows:
        last = row.name.rpartition(".")[2]
        if alone.count(last) == 1:  # as one may type it
            short[row.name] = row.flag.replace(f"--{row.name[: -len(last)]}", "--")
    left = min(max(map(len, short.values())) + 4, width // 3)
    for row in rows:
        lines += _row(short[row.name] if row.name else row.flag, _half(row, width - left), width, left)
    return "\n".join([*lines, "", *textwrap.wrap(rest, width)]).rstrip("\n")


def _half(row: Row, room: int) -> str:
    """Return as many of the half-sentences of an option's help as a line takes, at least the first.

    All of them where the default is explained in them.
    """
    halves = row.help.split("; ")
    while len(halves) > 1 and row.default and len("; ".join(halves) + row.default) > room:
        halves.pop()
    return "; ".join(halves) + row.default


def _about(config: type, command: str) -> tuple[str, str]:
    """Return (the first line of a script's docstring, the first command there that has arguments)."""
    said = inspect.cleandoc(getattr(sys.modules.get(config.__module__), "__doc__", None) or "")
    summary = said.partition("\n")[0] or (config.__doc__ or "").partition("\n")[0]
    for found in re.finditer(r"^ *python \S+\.py ((?:.*\\\n)*.*)", said, re.M):
        words = re.sub(r"(^| +)# .*", "", found[1]).replace("\\\n", " ").split(" ")
        if arguments := " ".join(word for word in words if word):
            return summary, f"{command} {arguments}"
    return summary, f"{command} [OPTIONS]"


def _broken(command: str, width: int) -> list[str]:
    """Return a command in lines of a width that a shell puts together again."""
    lines = [" "]
    for word in re.findall(r"(?:'[^']*'|\S)+", command):
        if len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


_EXCLUSIONS = "Exclusions (options that do not go together)"


def _excluded(config: type) -> Iterator[Row]:
    """Yield a row for every pair of options that exclude each other, with the reason."""
    for kind in config.__mro__:
        for (one, other), why in vars(kind).get("__excludes__", {}).items():
            if {one, other} <= {f.name for f in dataclasses.fields(config)}:
                one, other = (f"--{name.replace('_', '-')}" for name in (one, other))
                yield Row(_EXCLUSIONS, "", one, f"not with {other}, {why}", "")


# ---------- all options by subject, each with the comment behind it


def _whole(config: type, prog: str, groups: Mapping[str, Sequence[Row]], width: int) -> str:
    """Return all options grouped under their subjects, the script's own first."""
    own = next(iter(groups))
    # arguments without a name, in brackets where they may be left out
    first = [
        row.flag if row.default.endswith("(required)") else f"[{row.flag}]"
        for row in groups[own]
        if row.flag[0] != "-"
    ]
    lines = [" ".join(["usage:", prog, *first, "[OPTIONS]"]), ""]
    for paragraph in inspect.cleandoc(config.__doc__ or "").split("\n\n"):
        lines += [paragraph] if paragraph.startswith(" ") else textwrap.wrap(paragraph, width)
        lines.append("")
    return "\n".join([*lines, *_grouped(groups, width)])


def _grouped(groups: Mapping[str, Sequence[Row]], width: int) -> list[str]:
    """Return one line per option, with each subject's heading above its options."""
    lines: list[str] = []
    for subject, rows in groups.items():
        lines += ["", subject]
        for row in rows:
            lines += _row(row.flag, row.help + row.default, width, width // 3)
    return lines[1:]


def _row(flag: str, text: str, width: int, left: int) -> list[str]:
    """Return the lines of an option: the flag on the left, or on a line for itself if it is longer."""
    lines = textwrap.wrap(text, max(width - left, 20), break_on_hyphens=False)
    head = f"  {flag}"
    if lines and len(head) + 2 <= left:
        head = head.ljust(left) + lines.pop(0)
    return [line.replace("\xa0", " ") for line in (head, *(" " * left + line for line in lines))]


def _described(config: type, own: str, prefix: str = "", part: Any = None) -> Iterator[Row]:
    """Yield every option of a config and then of its parts.

    `part` has the defaults of one.
    """
    from tyro.conf import Positional

    hints = get_type_hints(config)
    marks = {name: get_args(hint)[1:] for name, hint in get_type_hints(config, include_extras=True).items()}
    for f in sorted(dataclasses.fields(config), key=lambda f: dataclasses.is_dataclass(hints[f.name])):
        name = f.name
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if part is not None:
            default = getattr(part, name)
        if dataclasses.is_dataclass(hints[name]):
            heading = f"{name.capitalize()} ({name}. may be left out of a name that no other option has)"
            yield from _described(hints[name], heading, f"{prefix}{name}.", default)
            continue
        if get_origin(hints[name]) is Mapping:  # not of a command line
            continue

        # the base that has the option first decides the subject, the class that has it last the help
        owners = [kind for kind in config.__mro__ if name in inspect.get_annotations(kind)]
        subject = own
        if owners[-1] is not config:
            subject = vars(owners[-1]).get("__subject__") or owners[-1].__name__
        text = f.metadata.get("help") or _comments(owners[0]).get(name, "")
        flag = _flag(prefix + name, hints[name])
        if Positional in marks[name]:
            flag = _kind(hints[name]).replace("STR", name.upper())
        yield Row(subject, prefix + name, flag, text, _default(default, text))


def _flag(name: str, hint: Any) -> str:
    """Return an option as one types it: --lr FLOAT, --[no-]canary."""
    part, dot, last = name.replace("_", "-").rpartition(".")
    if hint is bool:
        return f"--{part}{dot}[no-]{last}"
    return f"--{part}{dot}{last} {_kind(hint)}"


def _kind(hint: Any) -> str:
    """Return what an option takes: INT, STR ..., {linear,cosine}, FLOAT|None."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return "|".join(_kind(kind) for kind in inner)
    if get_origin(hint) is tuple:
        return f"{_kind(inner[0])} ..."
    if get_origin(hint) is Literal:
        return "{" + ",".join(str(choice) for choice in inner if choice != "") + "}"
    if hint is NoneType:
        return "None"
    return "{True,False}" if hint is bool else hint.__name__.upper()


def _default(x: Any, text: str) -> str:
    """Return the end of an option's help; nothing for an empty default, or a None that `text` explains."""
    if x is dataclasses.MISSING:
        return " (required)"
    if x in ("", ()) or (x is None and "None" in text):
        return ""
    shown = " ".join(map(str, x)) if isinstance(x, tuple) else str(x)
    return f" (default:\xa0{shown})"


@cache
def _comments(config: type) -> dict[str, str]:
    """Return the comments behind the fields of a class, or the texts below them, by their names."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except (OSError, TypeError):  # typed into a shell
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    behind = {token.start[0]: token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT}
    [kind] = ast.parse(source).body
    assert isinstance(kind, ast.ClassDef)
    found = {}
    for node, below in pairwise([*kind.body, None]):
        if isinstance(node, ast.AnnAssign):
            text = behind.get(node.end_lineno or 0, "")
            if isinstance(below, ast.Expr):
                text = inspect.cleandoc(ast.literal_eval(below.value))
            found[ast.unparse(node.target)] = " ".join(text.split())
    return found
