"""The training scripts: where they are, copies to be changed, and running one in place.

A checkout has them in `train_scripts`, which the wheel holds as `rft_scripts` next to the package.
"""

import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import io
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, Union, get_type_hints

import tyro

from rft_fn import parsing, user_files

__all__ = [
    "SHELLS",
    "Options",
    "Words",
    "completion",
    "config",
    "copy",
    "execute",
    "find",
    "folder",
    "module",
    "named",
    "summary",
]  # fmt: skip


# ---------- the training scripts: where they are, copies to be changed, and running one in place


def folder() -> Path:
    """Return the folder of the scripts; raise FileNotFoundError if an installation has none."""
    beside = Path(__file__).resolve().parents[2]
    for name in ("train_scripts", "rft_scripts"):
        if (beside / name / "grpo.py").is_file():
            return beside / name
    raise FileNotFoundError(
        f"scripts: expected them in {beside / 'rft_scripts'}, got no such folder; install rft-fn again"
    )


def named() -> dict[str, Path]:
    """Return the paths of the scripts by their names."""
    return {path.stem: path for path in sorted(folder().glob("*.py"))}


def find(name: str) -> Path:
    """Return the file of a script, of `named` or a path to a .py; raise ValueError if there is none."""
    if name.endswith(".py"):
        path = Path(name)
        if path.is_file():
            return path
        raise ValueError(f"script: expected a file, got {name}, which is not there")
    scripts = named()
    if name in scripts:
        return scripts[name]
    near = difflib.get_close_matches(name, scripts, n=1)
    like = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"script: expected one of {', '.join(scripts)}, or a .py file, got {name!r}{like}")


def summary(path: Path) -> str:
    """Return the first line of a script's docstring; empty without one."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def copy(name: str, to: str = "") -> Path:
    """Copy the script `name` to the file or folder `to`, by default into this folder.

    The commands in its docstring then name the copy. Raises ValueError for a file that is there, for one that
    is not Python, and for one that would hide a library of its name from every script in the same folder.
    """
    source = find(name)
    path = Path(to or source.name)
    if path.is_dir():
        path = path / source.name
    if path.suffix != ".py":
        raise ValueError(f"to: expected a folder that is there, or a file that ends in .py, got {to}")
    if path.exists():
        raise ValueError(f"to: expected a new file, got {path}, which is there already; give another name")
    if hidden := _library(path.stem):
        raise ValueError(f"to: expected a name that no library has, got {path}, which would hide {hidden}")

    # make a missing folder, as a run does for its results
    path.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8")
    path.write_text(text.replace(f"train_scripts/{source.name}", path.as_posix()), encoding="utf-8")
    return path


def _library(name: str) -> str:
    """Return the place of an installed module of this name; empty if none, or if it is here or of ours."""
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return f"Python's own {name}"
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or found.origin is None or Path(found.origin).parent in (Path.cwd(), folder()):
        return ""
    return found.origin


def config(path: Path) -> type:
    """Return the class of a script's options, `Config`; import the script, but do not run it."""
    return module(path).Config


def module(path: Path) -> Any:
    """Import a script, but do not run it."""
    return user_files.load(path.resolve())


def execute(path: Path, arguments: Sequence[str]) -> None:
    """Run a script as `python PATH ARGUMENTS` does: as `__main__`, its folder first on sys.path."""
    sys.argv = [str(path), *arguments]
    if path.resolve().parent != folder():  # our scripts import nothing from their folder
        sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


# ---------- completion of `rft` in a shell


SHELLS = ("bash", "zsh", "fish")

Options: TypeAlias = type
Words: TypeAlias = Mapping[str, Options | Mapping[str, Options]]
"""By each word that may come first: the options that follow it, or further words with theirs."""

# where nothing of ours fits, a word is a file
_FILES_IN_BASH = """
_rft() {
  _tyro_rft "$@"
  [[ -n "${COMPREPLY[0]}" ]] || COMPREPLY=()
}
complete -o default -F _rft rft
"""

# the words are more than one argument of a process may hold, so fish must send them as input
_ARGUMENT_IN_FISH = '$python_cmd -c "$pycode" $words $current'
_INPUT_IN_FISH = 'printf "%s" "$pycode" | $python_cmd - $words $current'


def completion(shell: str, words: Words) -> str:
    """Return the completion for bash, zsh or fish of the words that follow `rft`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(_either(words), prog="rft", args=["--tyro-print-completion", shell])
    if shell == "bash":
        printed.write(_FILES_IN_BASH)
    made = printed.getvalue()
    if shell == "fish":
        made = made.replace(_ARGUMENT_IN_FISH, _INPUT_IN_FISH)
    return made


def _either(words: Words) -> Any:
    """Return a union of what each word means, which tyro takes as subcommands."""
    kinds = []
    for word, behind in words.items():
        if isinstance(behind, Mapping):
            further = Annotated[_either(behind), tyro.conf.arg(name="")]
            behind = dataclasses.make_dataclass(word, [("further", further)])
        else:
            behind = _with_short_names(behind)
        kinds.append(Annotated[behind, tyro.conf.subcommand(word, prefix_name=False)])
    return Union[tuple(kinds)]  # noqa: UP007


def _with_short_names(options: type) -> type:
    """Return the options, with --NAME for --PART.NAME too, as on the command line."""
    hints = get_type_hints(options, include_extras=True)
    owners = parsing.owners(options)
    fields = []
    for f in dataclasses.fields(options):
        if dataclasses.is_dataclass(hints[f.name]):
            alone = [name for name, parts in owners.items() if parts == [f"{f.name}."]]
            part = _named_twice(hints[f.name], alone)
            fields.append((f.name, part, dataclasses.field(default_factory=part)))
    if not fields:
        return options
    return dataclasses.make_dataclass(options.__name__, fields, bases=(options,), frozen=True)


def _named_twice(part: type, names: list[str]) -> Any:
    """Return a part of a config with an alias, without the part's name, for every name in `names`."""
    hints = get_type_hints(part, include_extras=True)
    fields = []
    for f in dataclasses.fields(part):
        if f.name in names:
            alias = tyro.conf.arg(aliases=[f"--{f.name.replace('_', '-')}"])
            fields.append((f.name, Annotated[hints[f.name], alias], f))
    return dataclasses.make_dataclass(part.__name__, fields, bases=(part,), frozen=True)
