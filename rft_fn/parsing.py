"""From a command line to a config: short names of options, and errors in one line."""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rft_fn import option_help

__all__ = ["aliases", "names", "owners", "parse", "qualify", "unknown"]


_RULE = re.compile(r"[╭╮╰╯─-]+")
_OPTION = re.compile(r"^--(no[-_])?([\w-]+)(?==|$)")
_KINDS = {"INT": "an integer", "FLOAT": "a number", "STR": "a text"}
_HELP = "--help lists the options"


def _parts(config: type) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of an option, its own options if it is a dataclass) for every option of a config."""
    hints = get_type_hints(config)
    for name in (f.name for f in dataclasses.fields(config)):
        hint = hints[name]
        inner = [f.name for f in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else []
        yield name, inner


def aliases(config: type) -> dict[str, str]:
    """Return the further names of options, {"clip_low": "loss.low"}, as a config and its bases give them.

    One of a part that the config does not have is left out.
    """
    known = {name for name, _ in _parts(config)}
    known |= {f"{name}.{x}" for name, inner in _parts(config) for x in inner}
    given = [vars(kind).get("__aliases__", {}) for kind in config.__mro__]
    return {alias: name for found in given for alias, name in found.items() if name in known}


WHOLE = frozenset({"loss"})  # parts without short names: other libraries have a beta of another meaning


def names(config: type) -> set[str]:
    """Return the options of a config and of its parts, these with the part's name and without."""
    found = {"help", "disable_engine_sleep", *aliases(config)}
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
    """Write --NAME as --PART.NAME for an option that only one dataclass within `config` has.

    So is an alias of one. ValueError for an option that is given by both of its names.
    """
    found_in, also = owners(config), aliases(config)
    given = {arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")}
    for alias, name in also.items():
        if alias in given and name in given:
            raise ValueError(f"{name}: expected it once, got it as {alias} too")

    # --no- comes between the part and the name
    def whole(match: re.Match[str]) -> str:
        no = match[1] or ""
        name = match[2]
        if name.replace("-", "_") in also and not no:
            return f"--{also[name.replace('-', '_')]}"
        if name.replace("-", "_") == "disable_engine_sleep":
            no = "no-"
            name = "enable-engine-sleep"
        found = found_in.get(name.replace("-", "_"), [])
        part = found[0] if len(found) == 1 else ""
        return f"--{part}{no}{name}"

    return list(_with_values([_OPTION.sub(whole, arg) for arg in args], _switches(config)))


def _switches(config: type, prefix: str = "") -> set[str]:
    """Return the options that are True, False or a word, as one types them."""
    found = set()
    for name, hint in get_type_hints(config).items():
        if dataclasses.is_dataclass(hint):
            found |= _switches(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif get_origin(hint) is Literal and True in get_args(hint):
            found.add(f"{prefix}{name}")
    return found


def _with_values(args: Sequence[str], switches: Collection[str]) -> Iterator[str]:
    """Yield arguments with =True behind a switch that has no word, and =False where it is --no-NAME."""
    for arg, behind in zip(args, [*args[1:], "--"]):
        part, _, last = arg.removeprefix("--").replace("-", "_").rpartition(".")
        whole = f"{part}.{last.removeprefix('no_')}".lstrip(".")
        if arg.startswith("--") and whole in switches and last.startswith("no_"):
            yield f"--{whole.replace('_', '-')}=False"
        elif arg.startswith("--") and whole in switches and behind.startswith("--"):
            yield f"{arg}=True"
        else:
            yield arg


def parse(
    config: type, args: Sequence[str], *, prog: str | None = None, more: Sequence[tuple[str, str]] = ()
) -> Any:
    """Return the config of a command line, of the program `prog`, by default the file of this process.

    --help prints options as `option_help.text` says, with `more` flags and what they do that the caller has
    taken from the command line, and exits.

    ValueError, in one line, for unknown options and for values that an option does not take. For a value
    outside of an option's limits the line is the config's own; for an option of another library it names the
    option here.
    """
    word = option_help.asked(args)
    if word is not None:
        print(option_help.text(config, prog=prog, more=more, word=word))
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
    if found := re.match(r"Error parsing (\S+): (.*)", error):  # raised by the config or a part of it
        return f"{found[1]}.{found[2]}" if found[1] in WHOLE else found[2]
    if found := re.match(r"invalid choice '(.*)' for argument '--(.*)'. Expected one of \((.*?),?\)", error):
        choices = re.sub(r"'(\w[^']*)'", r"\1", found[3])
        return f"{_name(found[2])}: expected one of {choices}, got {found[1]!r}"
    if found := re.match(r"Missing value for argument '--(.*?)'", error):
        return f"{_name(found[1])}: expected a value, got none"
    if found := re.match(r"Missing from \S+: (.*?) \(required\)", error):
        return f"missing: {found[1]}; {_HELP}"

    # anything else, as an unknown option: the parser's line with the options that look like it
    like = [line.split()[0].rstrip(",") for part in sections[1:] for line in part if line.startswith("--")]
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
