"""From a command line to a config: short names of options, --help by subject, and errors in one line."""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import re
import shutil
import sys
import textwrap
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["names", "owners", "parse", "qualify", "unknown", "usage"]


_RULE = re.compile(r"[╭╮╰╯─-]+")
_OPTION = re.compile(r"^--(no[-_])?([\w-]+)(?==|$)")
_KINDS = {"INT": "an integer", "FLOAT": "a number", "STR": "a text"}
_HELP = "--help lists the options"


def _parts(config: type) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of an option, its own options if it is a dataclass) for every option of a config."""
    for name, hint in get_type_hints(config).items():
        inner = [f.name for f in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else []
        yield name, inner


WHOLE = frozenset({"loss"})  # parts without short names: other libraries have a beta of another meaning


def names(config: type) -> set[str]:
    """Return the options of a config and of its parts, these with the part's name and without."""
    found = {"help", "disable_engine_sleep"}
    for name, inner in _parts(config):
        short = () if name in WHOLE else inner
        found |= {name, *short, *(f"{name}.{x}" for x in inner)}
    return found


def owners(config: type) -> dict[str, list[str]]:
    """Return the parts that have an option, by its name, as "PART."; "" is the config itself."""
    found: dict[str, list[str]] = {}
    for part, inner in _parts(config):
        found.setdefault(part, []).append("")
        for name in () if part in WHOLE else inner:
            found.setdefault(name, []).append(f"{part}.")
    return found


def qualify(args: Sequence[str], config: type) -> list[str]:
    """Write --NAME as --PART.NAME for an option that only one dataclass within `config` has."""
    found_in = owners(config)

    # --no- comes between the part and the name
    def whole(match: re.Match[str]) -> str:
        no = match[1] or ""
        name = match[2]
        if name.replace("-", "_") == "disable_engine_sleep":
            no = "no-"
            name = "enable-engine-sleep"
        found = found_in.get(name.replace("-", "_"), [])
        part = found[0] if len(found) == 1 else ""
        return f"--{part}{no}{name}"

    return [_OPTION.sub(whole, arg) for arg in args]


def parse(
    config: type, args: Sequence[str], *, prog: str | None = None, more: Sequence[tuple[str, str]] = ()
) -> Any:
    """Return the config of a command line, of the program `prog`, by default the file of this process.

    --help prints the options, with `more` flags and what they do that the caller has taken from the command
    line, and exits.

    ValueError, in one line, for unknown options and for values that an option does not take. For a value
    outside of an option's limits the line is the config's own; for an option of another library it names the
    option here.
    """
    if any(arg in ("-h", "--help") for arg in args):
        print(usage(config, prog or _program(), more))
        sys.exit()
    from rft_fn import migrate  # at the far right, for its texts only

    migrate.check(args, names(config))
    import tyro

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(config, args=args, prog=prog)
    except SystemExit:
        raise ValueError(_line(_sections(printed.getvalue()))) from None


def unknown(keys: Sequence[str], config: type, known: Collection[str]) -> str:
    """Return the line about keys of a file that are no options of a config, which are `known`."""
    from rft_fn import migrate  # at the far right, for its texts only

    own = names(config)
    hints = {key: migrate.answer(key, key.replace("-", "_"), own) for key in keys}
    lines = [line for line in hints.values() if line]
    if rest := [key for key, line in hints.items() if not line]:
        plain = [key.replace("-", "_").lower() for key in rest]
        like = [name for key in plain for name in difflib.get_close_matches(key, known, n=1, cutoff=0.7)]
        remedy = f"did you mean {' or '.join(dict.fromkeys(like))}?" if like else _HELP
        more = f" and {len(rest) - 4} more" if len(rest) > 4 else ""
        lines.append(f"unrecognized options: {', '.join(rest[:4])}{more}; {remedy}")
    return "; ".join(lines)


# ---------- --help: the options by subject, each with the comment behind it


def _program() -> str:
    """Return the file of this process as it was typed, without the folder of an installed one."""
    path = Path(sys.argv[0])
    return path.name if path.is_absolute() else str(path)


def usage(config: type, prog: str, more: Sequence[tuple[str, str]] = ()) -> str:
    """Return the text of --help, at most as wide as the terminal: a heading and options for every subject.

    The options of `config` itself come first, under the name of the program `prog`, with the `more` ones.
    """
    width = min(shutil.get_terminal_size().columns, 120)
    own = Path(prog.split()[-1]).stem
    groups: dict[str, list[tuple[str, str]]] = {own: []}
    for subject, flag, text in _described(config, own):
        groups.setdefault(subject, []).append((flag, text))
    groups[own] += [*more, ("-h, --help", "show this help and exit")]
    # arguments without a name, in brackets where they may be left out
    first = [
        flag if text.endswith("(required)") else f"[{flag}]" for flag, text in groups[own] if flag[0] != "-"
    ]

    lines = [" ".join(["usage:", prog, *first, "[OPTIONS]"]), ""]
    for paragraph in inspect.cleandoc(config.__doc__ or "").split("\n\n"):
        lines += [paragraph] if paragraph.startswith(" ") else textwrap.wrap(paragraph, width)
        lines.append("")
    for subject, rows in groups.items():
        lines.append(subject)
        for flag, text in rows:
            lines += _row(flag, text, width)
        lines.append("")
    return "\n".join(lines[:-1])


def _row(flag: str, text: str, width: int) -> list[str]:
    """Return the lines of an option: the flag in the left third, or on a line for itself if it is longer."""
    left = width // 3
    lines = textwrap.wrap(text, max(width - left, 20), break_on_hyphens=False)
    head = f"  {flag}"
    if lines and len(head) + 2 <= left:
        head = head.ljust(left) + lines.pop(0)
    return [line.replace("\xa0", " ") for line in (head, *(" " * left + line for line in lines))]


def _described(config: type, own: str, prefix: str = "", part: Any = None) -> Iterator[tuple[str, str, str]]:
    """Yield (subject, flag, help) of every option of a config and then of its parts.

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
        yield subject, flag, text + _default(default, text)


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


# ---------- errors in one line


def _sections(text: str) -> list[list[str]]:
    """Return the lines inside the box that tyro draws around an error, from rule to rule.

    Without its title.
    """
    sections: list[list[str]] = [[]]
    for line in text.splitlines()[1:]:
        line = line.strip(" │")
        if _RULE.fullmatch(line):
            sections.append([])
        elif line:
            sections[-1].append(line)
    return [section for section in sections if section]


def _line(sections: list[list[str]]) -> str:
    """Return the error of the parser in the form of this project: name: expected X, got Y."""
    # what is wrong with one option
    error = " ".join(sections[0])
    if found := re.match(r"Error parsing --(\S+): ", error):
        return _no_value(_name(found[1]), error, sections)
    if found := re.match(r"Error parsing \S+: (.*)", error):  # raised by the config itself
        return found[1]
    if found := re.match(r"invalid choice '(.*)' for argument '--(.*)'. Expected one of \((.*?),?\)", error):
        choices = re.sub(r"'(\w[^']*)'", r"\1", found[3])
        return f"{_name(found[2])}: expected one of {choices}, got {found[1]!r}"
    if found := re.match(r"Missing value for argument '--(.*?)'", error):
        return f"{_name(found[1])}: expected a value, got none"
    if found := re.match(r"Missing from \S+: (.*?) \(required\)", error):
        return f"missing: {found[1]}; {_HELP}"

    # anything else, as an unknown option: the parser's line with the options that look like it
    like = [line.split()[0] for part in sections[1:] for line in part if line.startswith("--")]
    remedy = f"did you mean {' or '.join(dict.fromkeys(like))}?" if like else _HELP
    return f"{error[:1].lower()}{error[1:].rstrip('.')}; {remedy}"


def _no_value(name: str, error: str, sections: list[list[str]]) -> str:
    """Return the line for a text that is not a value of the option `name`.

    Its kind is in the help below.
    """
    kind = next(line.split()[-1] for part in sections[1:] for line in part if line.startswith("--"))
    want = _KINDS.get(kind.removeprefix("{None}|"), kind)
    if kind.startswith("{None}|"):
        want += ", or None"
    got = re.search(r"'([^']*)'", error.split("could be instantiated from ")[-1])
    if got is None:
        return f"{name}: expected {want}"
    return f"{name}: expected {want}, got {got[1]!r}"


def _name(option: str) -> str:
    return option.replace("-", "_")
