"""The options in a file of another library: a shell script, Python, YAML, TOML or JSON."""

import json
import pickle
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rft_fn import confined
from rft_fn.migrate import python_source, shell

__all__ = ["Config", "read"]

_MOST = 10**6  # characters that aliases of YAML may add to a text
_LONGEST = 1 << 22  # bytes of all options of a file
_MODULE = re.compile(r"(?:trl|verl|openrlhf|lightrft|recipe|prime_rl|open_r1)(?:\.\w+)+")
_ASSIGNED = re.compile(r"[+~]{0,2}([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)
_LAUNCHERS = ("torch.distributed", "accelerate", "deepspeed", "pip", "ray", "venv", "torchrun")
_PROCESSES = ("--nproc_per_node", "--nproc-per-node", "--num_processes", "--num-processes")
_OF_HYDRA = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer")


class Config(NamedTuple):
    """The options of one run in a file."""

    options: dict[str, Any]  # by name; the names of nested options have dots
    programs: list[str]  # files and modules that are started, without folders, packages and .py
    notes: Sequence[str] = ()  # what of the file could not be read, with its line
    unknown: Mapping[str, int] = MappingProxyType({})  # texts that no line gives a value -> their line
    processes: int = 1  # that the launcher starts, as far as it says
    path: Sequence[str] = ()  # words of the file's name and folders, of a file that starts nothing
    started: str = ""  # the program as it is written, with its packages; "" where the file starts none


def read(path: str) -> list[Config]:
    """Return the options of each run that a file starts, at least one.

    .yaml, .yml, .json and .toml hold a mapping of options, .py and .ipynb calls of GRPOConfig and the like,
    or a command in a docstring. Any other file is a shell script, which may name such files. ValueError for a
    file that is not there, cannot be read, or holds no option, and for one that takes more time or memory
    than a script of a person can.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: expected a file, and there is none")
    try:
        return confined.call(path, _read, path)
    except confined.Raised as error:
        raise ValueError(f"{path}: expected a file that can be read, got {error}") from None


def _read(path: str) -> list[Config]:
    """Return what a file says, in a child, which a bomb in it may end."""
    file = Path(path)
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a text, which cannot be read: {error}") from None
    if file.suffix in (".yaml", ".yml", ".json", ".toml"):
        options = _flat(_parsed(file, text))
        found = _of_text(file, str(options["run"])) if "verl" in str(options.get("run")) else []
        words = re.split(r"[^a-z0-9]+", "/".join(file.parts[-4:]).lower())
        found = found or [Config(options, [], path=words)]
    elif file.suffix == ".ipynb":
        found = _of_python(file, _of_notebook(file, text))
    elif file.suffix == ".py" or re.match(r"#!.*python", text):
        found = _of_python(file, text)
    else:
        found = _of_text(file, text)
    found = [x._replace(options=_resolved(x.options)) for x in found if x.options]
    if not found:
        raise ValueError(f"{path}: expected options, and there are none")
    size = len(pickle.dumps([[x.options, x.notes] for x in found]))
    if size > _LONGEST:
        raise ValueError(f"{path}: expected the options of a run, got {size} bytes of them")
    return [x._replace(unknown=dict(x.unknown)) for x in found]


def _parsed(file: Path, text: str) -> Mapping[str, Any]:
    """Return the mapping in a text of JSON, YAML or TOML."""
    import yaml

    try:
        if file.suffix == ".toml":
            found = tomllib.loads(text)
        else:
            found = json.loads(text) if file.suffix == ".json" else _of_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: expected {file.suffix[1:]}, which cannot be read: {reason}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: expected a mapping of options, got {type(found).__name__}")
    return found


def _of_yaml(text: str) -> Any:
    """Return the data in a text of YAML; raise ValueError if its aliases mean far more than the text."""
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
    """Count the characters of a YAML node, aliases written out; raise ValueError for one in itself."""
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
    """Return nested options by names with dots; a mapping without entries is no option."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and not str(name).endswith("kwargs"):
            found |= _flat(value, f"{head}{name}.")
        else:
            found[f"{head}{name}"] = value
    return found


_REFERENCE = re.compile(r"\$\{(oc\.select:|oc\.env:)?([A-Za-z_][\w.]*)(?:,([^{}]*))?\}")


def _resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the values of those that they refer to as hydra does: ${data.train_batch_size}."""

    def value(match: re.Match[str]) -> Any:
        kind, name, default = match.groups()
        if kind == "oc.env:":
            return f"${{{name}}}" if default is None else default
        return options.get(name, match[0] if default is None else default)

    found = dict(options)
    for name, x in options.items():
        for _ in range(5):  # of one to another
            if not isinstance(x, str):
                break
            whole = _REFERENCE.fullmatch(x)
            x = value(whole) if whole else _REFERENCE.sub(lambda match: str(value(match)), x)
        found[name] = x
    return found


def _of_text(file: Path, text: str) -> list[Config]:
    """Return what each training command of a shell script says."""
    try:
        commands = shell.commands(text)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{file}: expected a shell script, which cannot be read: {error}") from None
    found = [_of_command(file, command) for command in commands]
    started = [x for x in found if x.started and x.options]
    if started:
        return started
    # a part of a command, or one of a program that no package has
    return sorted(found, key=lambda x: len(x.options))[-1:]


def _of_command(file: Path, command: shell.Command) -> Config:
    """Return the program and the options of one command."""
    words = command.words
    at, started = _program(words)
    options = _of_words(words[at:])
    notes = [f"line {command.line}: {x} has more values in a loop; here its first" for x in command.loops]
    notes += [
        f"line {command.line}: {x} has no value in the file; it may be further options"
        for before, x in zip(words[at:], words[at + 1 :])
        if _is_further(before, x)
    ]
    processes = 1
    for k, word in enumerate(words[:at]):
        name, _, value = word.partition("=")
        if name in (*_PROCESSES, "--nnodes"):
            value = value or "".join(words[k + 1 : k + 2])
            processes *= int(value) if value.isdigit() else 1

    # a file with further options, which the command's own win over
    for path, head in _files(options, words[at:]):
        inner = _near(file, path)
        if inner is None:
            notes.append(f"{path}, line {command.line}: it has more options, and is not here")
        else:
            options = {**_flat(_parsed(inner, inner.read_text("utf-8-sig")), head), **options}
    programs = [started.removesuffix(".py").rpartition("/")[2].rpartition(".")[2]] if started else []
    return Config(options, programs, notes, command.unknown, processes, started=started)


def _program(words: Sequence[str]) -> tuple[int, str]:
    """Return where the options of a program begin, and the program as it is written; (0, "") for none."""
    for k, word in enumerate(words):
        following = words[k + 1] if k + 1 < len(words) else ""
        if word in ("-m", "--module") and following and not following.startswith(_LAUNCHERS):
            return k + 2, following
        if word.endswith(".py") or _MODULE.fullmatch(word):
            return k + 1, word
        if word.rpartition("/")[2] == "trl" and following:
            return k + 2, f"trl.{following.replace('-', '_')}"
        if word in ("rl", "sft") and following == "@":
            return k + 1, f"prime_rl.{word}"
    return 0, ""


def _files(options: dict[str, Any], words: Sequence[str]) -> list[tuple[str, str]]:
    """Take the names of files with further options out of `options`; each with what begins its names."""
    found = [
        str(options.pop(name)) for name in ("config",) if str(options.get(name)).endswith((".yaml", ".yml"))
    ]
    folder, name = str(options.pop("config_path", "")), str(options.pop("config_name", ""))
    if name and name.removesuffix(".yaml") not in _OF_HYDRA:
        found.append(f"{folder}{'/' * bool(folder)}{name.removesuffix('.yaml')}.yaml")
    # before all options, as alignment-handbook has it
    plain = takewhile(lambda word: not word.startswith("--"), words)
    found += [word for word in plain if word.endswith((".yaml", ".yml"))]
    named = [(path, "") for path in found]
    for k in (k for k, word in enumerate(words[:-1]) if word == "@"):  # --trainer @ a.toml
        part = words[k - 1][2:].replace("-", "_") if k and words[k - 1].startswith("--") else ""
        options.pop(part, None)
        named.append((words[k + 1], f"{part}." if part else ""))
    return named


def _near(file: Path, path: str) -> Path | None:
    """Return a file by its name from here, from the file that names it, or from a folder above that."""
    places = [Path.cwd(), *list(file.resolve().parents)[:5]]
    named = [place / path for place in places]
    if "$" in path:  # $PROJECT_DIR/config/a.yaml
        tail = re.sub(r"^.*\$[^/]*/", "", path)
        named = [place / tail for place in places]
    return next((x for x in named if x.is_file()), None)


def _of_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command."""
    # an option without a value is true, one with several values has a list
    found: dict[str, Any] = {}
    name = ""
    for before, word in zip(["", *words], words):
        assigned = _ASSIGNED.fullmatch(word)
        if _is_further(before, word):
            name = ""
        elif re.match(r"--[A-Za-z]", word):
            name = word[2:].partition("=")[0].replace("-", "_")
            _, equals, value = word.partition("=")
            found[name] = _value(value) if equals else True
            if equals:
                name = ""
        elif assigned and ("." in assigned[1] or not name) and not word.startswith("~"):
            found |= _flat({assigned[1]: _mapping(assigned[2])})
            name = ""
        elif name:
            found[name] = _with(found[name], word)
    kwargs = {
        name: _mapping(x) for name, x in found.items() if name.endswith("kwargs") and isinstance(x, str)
    }
    return {**found, **kwargs}


def _is_further(before: str, word: str) -> bool:
    """Return whether a word is a variable without a value, and not the value of the option before it."""
    named = before.startswith("--") and "=" not in before
    return not named and re.fullmatch(r"\$(\{\w+\}|\d)", word) is not None


def _value(text: str) -> Any:
    """Return the items of a list, ['a', 'b'] or [a,b]; any other text as it is, without quotes around it."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    plain = re.sub(r"\$\{[^}]*\}", "", text)
    if plain.startswith("[") and plain.endswith("]") and "{" not in plain and plain.count("[") == 1:
        return [item.strip().strip("'\"") for item in text[1:-1].split(",") if item.strip()]
    return text


def _mapping(text: str) -> Any:
    """Return the mapping of a text of JSON, or as hydra has it, {a:1,b:{c:2}}; the value of another text."""
    import yaml

    if text[:1] != "{":
        return _value(text)
    # hydra needs no space behind a name, YAML does
    try:
        found = _of_yaml(re.sub(r"([{,]\s*['\"]?[\w.]+['\"]?)\s*:", r"\1: ", text))
    except (ValueError, yaml.YAMLError):
        return text
    return found if isinstance(found, Mapping) else text


def _with(value: Any, word: str) -> Any:
    """Return the value of an option with one more word added."""
    word = word.removesuffix(",") if word.endswith(",") else word
    if value is True:
        return word
    return [*value, word] if isinstance(value, list) else [value, word]


def _of_notebook(file: Path, text: str) -> str:
    """Return the code of a notebook, without lines for its own shell."""
    try:
        cells = json.loads(text)["cells"]
        code = ["".join(x["source"]) for x in cells if x["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: expected a notebook, which cannot be read: {reason}") from None
    return "\n".join(
        line for x in code for line in x.splitlines() if not line.lstrip().startswith(("%", "!"))
    )


def _of_python(file: Path, text: str) -> list[Config]:
    """Return what the calls of a Python file say for each kind of trainer in it."""
    try:
        modules = python_source.read(text, file.as_posix())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file}: expected Python, which cannot be read: {error}") from None
    return [x for module in modules for x in _of_module(file, module)]


def _of_module(file: Path, module: python_source.Module) -> list[Config]:
    """Return what the calls say, and each command in the docstring, with these calls."""
    own = Config(module.options, module.programs, module.notes, started=module.started)
    commands: list[Config] = []
    if module.commands:
        try:
            commands = [x for x in _of_text(file, module.commands) if x.started.endswith(".py") and x.options]
        except ValueError:
            commands = []
    if not commands:
        return [own._replace(notes=[*own.notes, *_open(module, own.options)])]
    # the parser of the script reads the command, so that its options are those of the command
    return [
        x._replace(
            options={**own.options, **x.options},
            programs=own.programs or x.programs,
            notes=[*own.notes, *_open(module, {**own.options, **x.options}), *x.notes],
            started=own.started or x.started,
        )
        for x in commands
    ]


def _open(module: python_source.Module, options: Mapping[str, Any]) -> list[str]:
    """Return the notes on options of the module's own command line that have no value."""
    return [note for name, note in module.parsed.items() if name not in options]
