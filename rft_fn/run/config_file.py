"""`--config FILE`: the options of a script from a YAML or JSON file, or from the folder of a run.

A file means what its options mean as flags in front of the command line, so that flags win. Keys are names of
options, with - or _; an option of a part is `strategy: {fsdp: true}`, `strategy.fsdp: true` or `fsdp: true`.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from rft_fn import border, option_help, parsing
from rft_fn.foreign_json import parse_json
from rft_fn.run.earlier_run import FACTS, renamed

__all__ = ["parse"]


_MORE = [("--config FILE", "options from a .yaml or .json file or the folder of a run; flags win")]


def parse(config: type, args: Sequence[str], *, first: Sequence[str] = ()) -> Any:
    """Return the config of a script's command line, as `parsing.qualify` leaves it, with --config FILE.

    `first` are arguments that those of the file and of the command line win over.
    ValueError, in one line, as `parsing.parse` raises it; what is wrong in the file begins with the file.
    """
    if "config" in {f.name for f in dataclasses.fields(config)}:  # the script means something else by it
        return parsing.parse(config, args)
    path, flags = _split(args)
    if path is None or option_help.asked(flags) is not None:
        return parsing.parse(config, [*first, *flags], more=_MORE)
    try:
        return parsing.parse(config, [*first, *_arguments(config, path, flags), *flags])
    except ValueError as error:
        if str(error) == _mistake(config, flags):
            raise
        raise ValueError(f"config {path}: {error}") from None


def _split(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return (the file of --config, the other arguments)."""
    files = []
    flags = []
    words = iter(args)
    for word in words:
        if word == "--config":
            files.append(next(words, ""))
        elif word.startswith("--config="):
            files.append(word.partition("=")[2])
        else:
            flags.append(word)
    if len(files) > 1:
        raise ValueError(f"config: expected one file, got {len(files)}: {', '.join(files)}")
    if files and (not files[0] or files[0].startswith("--")):
        raise ValueError("config: expected a value, got none")
    return (files[0] if files else None), flags


def _mistake(config: type, flags: Sequence[str]) -> str:
    """Return what is wrong with a command line without its file; empty for nothing."""
    try:
        parsing.parse(config, flags)
    except ValueError as error:
        return str(error)
    return ""


# ---------- the options of a file, as arguments of a command line


def _arguments(config: type, path: str, flags: Sequence[str]) -> list[str]:
    """Return the arguments that say what a file says; ValueError for what no option is or takes."""
    hints = _hints(config)
    values = _read(Path(path))
    saved = Path(path).is_dir() or bool(values.keys() & FACTS)
    if saved:
        values = renamed({key: x for key, x in values.items() if key not in FACTS})

    also = parsing.aliases(config)
    found: dict[str, Any] = {}
    unknown = []
    parts = {name.partition(".")[0] for name in hints if "." in name}
    for key, x in _flat(values):
        name = _whole(also.get(key.replace("-", "_"), key), hints)
        if key in parts:
            raise ValueError(f"{key}: expected options by their names, got {x!r}")
        if name is None:
            unknown.append(key)
        elif name in found:
            raise ValueError(f"{name}: expected it once, got {found[name]!r} and {x!r}")
        else:
            found[name] = x
    if unknown:
        short = {*(name.rpartition(".")[2] for name in hints), *also}
        raise ValueError(parsing.unknown(unknown, config, {*hints, *short}))
    if saved:
        found = _begun_anew(found, hints, flags)

    # lists first: the last one would take a first argument without a name
    order = sorted(found, key=lambda name: get_origin(hints[name]) is not tuple)
    return [word for name in order for word in _words(name, hints[name], found[name])]


def _hints(config: type, prefix: str = "") -> dict[str, Any]:
    """Return the types of all options that a command line names, by their whole names: lr, strategy.fsdp."""
    from tyro.conf import Positional

    hints = get_type_hints(config)
    marked = get_type_hints(config, include_extras=True)
    found = {}
    for f in dataclasses.fields(config):
        hint = hints[f.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= _hints(hint, f"{prefix}{f.name}.")
        elif get_origin(hint) is not Mapping and Positional not in get_args(marked[f.name])[1:]:
            found[prefix + f.name] = hint
    return found


def _read(path: Path) -> dict[Any, Any]:
    """Return the options of a file as it nests them."""
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError("expected a file, or the folder of a run: it has no config.json")
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError("expected a file, or the folder of a run: it is not there") from None
    except OSError as error:
        raise ValueError(f"expected a file, or the folder of a run: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("expected a text in UTF-8") from None
    values = _json(text) if path.suffix == ".json" else _yaml(text)
    if values is None:  # an empty file
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"expected options by their names, got {border.quoted(values, 60)}")
    return values


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from None


def _yaml(text: str) -> Any:
    import yaml

    try:
        tree = yaml.compose(text, yaml.SafeLoader)
        found = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"expected YAML: {error.problem}{where}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"expected YAML: {' '.join(str(error).split())}") from None
    _check_keys(tree)
    return found


def _check_keys(root: Any) -> None:
    """Raise ValueError for a key that a mapping of YAML has twice, of which the last would win."""
    waiting = [root]
    visited: set[int] = set()  # an alias may lead back
    while waiting:
        node = waiting.pop()
        if id(node) in visited or not isinstance(getattr(node, "value", None), list):
            continue
        visited.add(id(node))
        lines: dict[str, int] = {}
        for entry in node.value:
            if not isinstance(entry, tuple):
                waiting.append(entry)
                continue
            key, value = entry
            waiting.append(value)
            if not isinstance(key.value, str) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ValueError(
                    f"{key.value}: expected it once, got it in line {lines[key.value]} and in line {line}"
                )
            lines[key.value] = line


def _flat(values: Mapping[Any, Any], prefix: str = "", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested options."""
    if not depth:
        raise ValueError(f"{prefix.rstrip('.')}: expected options, got parts within parts")
    for key, x in values.items():
        if isinstance(x, Mapping):
            yield from _flat(x, f"{prefix}{key}.", depth - 1)
        else:
            yield f"{prefix}{key}", x


def _whole(key: str, hints: Mapping[str, Any]) -> str | None:
    """Return the whole name of an option; None for a key that is none, or that several parts have."""
    name = key.replace("-", "_")
    if name in hints:
        return name
    inner = [whole for whole in hints if whole.partition(".")[2] == name]
    return inner[0] if len(inner) == 1 else None


def _begun_anew(found: dict[str, Any], hints: Mapping[str, Any], flags: Sequence[str]) -> dict[str, Any]:
    """Return the options of a run without the ones that were for one start of it.

    ValueError without --out: the folder is the one of that run.
    """
    folder = found.pop("out", None)
    if folder is not None and not any(re.match("--out(=|$)", flag) for flag in flags):
        raise ValueError(
            f"out: expected --out beside the options of a run, got none; --out {folder} continues that run, "
            "another folder begins a new one"
        )
    found.pop("override", None)
    for passes in ("data_epochs", "epochs"):  # the run has noted how many steps they are
        if found.get(passes) is not None and NoneType in get_args(hints[passes]):
            found.pop("steps", None)
    return found


def _words(name: str, hint: Any, x: Any) -> list[str]:
    """Return the arguments that give the value `x` to an option of the type `hint`."""
    flag = "--" + name.replace("_", "-")
    if hint is bool:
        if not isinstance(x, bool):
            raise ValueError(f"{name}: expected True or False, got {x!r}")
        part, dot, last = flag[2:].rpartition(".")
        return [flag if x else f"--{part}{dot}no-{last}"]

    several = get_origin(hint) is tuple
    items = x if several and isinstance(x, list) else [x]
    kinds = get_args(hint) or (hint,)
    for item in items:
        if isinstance(item, list | dict):
            raise ValueError(f"{name}: expected one value, got {item!r}")
        # a text that YAML reads as something else: null, no
        if str in kinds and (isinstance(item, bool) or (item is None and NoneType not in kinds)):
            raise ValueError(f"{name}: expected a text, got {item!r}; quotes make it one")
    return [flag, *map(str, items)] if several else [f"{flag}={x}"]
