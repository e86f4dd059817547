"""The options in a file of another system: YAML, JSON, or a shell script."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Config", "read"]

_MODULE = re.compile(r"(?:trl|verl|openrlhf|lightrft)(?:\.\w+)+")
_MOST = 10**6  # characters that aliases of YAML may add to a text
_ASSIGNED = re.compile(r"\+{0,2}([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)


class Config(NamedTuple):
    """What a file says."""

    options: dict[str, Any]  # by name; the names of nested options have dots
    programs: list[str]  # files and modules that a shell script starts, without folders, packages and .py


def read(path: str) -> Config:
    """The options of a file, and the programs that it starts.

    .yaml, .yml and .json hold a mapping. Any other file is a shell script: `--name value`, `--name=value`
    and `name=value` are options, wherever they stand. ValueError for a file that is not there, or cannot be
    read, or holds no option.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: expected a file, and there is none")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a text, which cannot be read: {error}") from None
    programs: list[str] = []
    if file.suffix in (".yaml", ".yml", ".json"):
        options = _flat(_parsed(file, text))
    else:
        words = _words(file, text)
        options = _of_shell(words)
        programs = _programs(words)
    if not options:
        raise ValueError(f"{path}: expected options, and there are none")
    return Config(options, programs)


def _parsed(file: Path, text: str) -> Mapping[str, Any]:
    """The mapping in a text of JSON or YAML."""
    import yaml

    try:
        if file.suffix == ".json":
            found = json.loads(text)
        else:
            found = _of_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: expected {file.suffix[1:]}, which cannot be read: {reason}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: expected a mapping of options, got {type(found).__name__}")
    return found


def _of_yaml(text: str) -> Any:
    """What a text of YAML says. ValueError where its aliases stand for far more than the text."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        size = _written_out(node, {})
        if size > len(text) + _MOST:
            raise ValueError(f"its aliases stand for {size} characters, more than {_MOST}")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _written_out(node: Any, known: dict[int, int]) -> int:
    """The characters of a node of YAML with its aliases written out. ValueError for one inside itself."""
    if id(node) not in known:
        known[id(node)] = -1  # until all that is in it was counted
        inside = [x for pair in node.value for x in pair] if node.id == "mapping" else node.value
        if node.id == "scalar":
            known[id(node)] = len(inside) + 1
        else:
            known[id(node)] = 1 + sum(_written_out(x, known) for x in inside)
    if known[id(node)] < 0:
        raise ValueError("an alias stands inside of what it names")
    return known[id(node)]


def _flat(options: Mapping[str, Any], head: str = "") -> dict[str, Any]:
    """Nested options by names with dots; a mapping without entries is none."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and not str(name).endswith("kwargs"):
            found |= _flat(value, f"{head}{name}.")
        else:
            found[f"{head}{name}"] = value
    return found


def _words(file: Path, text: str) -> list[str]:
    """The words of a shell script."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"{file}: expected a shell script, which cannot be read: {error}") from None


def _programs(words: Sequence[str]) -> list[str]:
    """The names of Python's files and modules, and of subcommands of `trl`."""
    found = []
    for before, word in pairwise(["", *words]):
        if word.endswith(".py"):
            found.append(Path(word).stem)
        elif before in ("-m", "--module") or _MODULE.fullmatch(word):
            found.append(word.split(".")[-1])
        elif Path(before).name == "trl":
            found.append(word.replace("-", "_"))
    return found


def _of_shell(words: Sequence[str]) -> dict[str, Any]:
    """The options of the commands in a shell script."""
    # an option without a value is true, one with several values has a list
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        assigned = _ASSIGNED.fullmatch(word)
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            _, _, value = word.partition("=")
            found[name] = value or True
            if value:
                name = ""
        elif assigned and ("." in assigned[1] or not name):
            found[assigned[1]] = assigned[2]
            name = ""
        elif name:
            found[name] = _with(found[name], word)
    found.pop("module", None)  # of a launcher
    return found


def _with(value: Any, word: str) -> Any:
    """The value of an option that one more word belongs to."""
    if value is True:
        return word
    if isinstance(value, list):
        return [*value, word]
    return [value, word]
