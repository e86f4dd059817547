"""The training scripts: where they are, copies to be changed, and running one in place.

A checkout has them in `train_scripts`, which the wheel holds as `rft_scripts` beside the package.
"""

import ast
import difflib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["config", "copy", "execute", "find", "folder", "named", "summary"]


def folder() -> Path:
    """The folder of the scripts. FileNotFoundError where an installation has none."""
    beside = Path(__file__).resolve().parents[2]
    for name in ("train_scripts", "rft_scripts"):
        if (beside / name / "grpo.py").is_file():
            return beside / name
    raise FileNotFoundError(
        f"scripts: expected them in {beside / 'rft_scripts'}, got no such folder; install rft-fn again"
    )


def named() -> dict[str, Path]:
    """The scripts by their names."""
    return {path.stem: path for path in sorted(folder().glob("*.py"))}


def find(name: str) -> Path:
    """The file of a script: one of `named`, or a path that ends in .py. ValueError if there is none."""
    if name.endswith(".py"):
        path = Path(name)
        if path.is_file():
            return path
        raise ValueError(f"script: expected a file, got {name}, which is not there")
    scripts = named()
    if name in scripts:
        return scripts[name]
    near = difflib.get_close_matches(name, scripts, n=1)
    like = ""
    if near:
        like = f"; did you mean {near[0]}?"
    raise ValueError(f"script: expected one of {', '.join(scripts)}, or a .py file, got {name!r}{like}")


def summary(path: Path) -> str:
    """The first line of a script's docstring; empty without one."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def copy(name: str, to: str = "") -> Path:
    """Copy the script `name` to the file or folder `to`, by default into this folder.

    Its docstring names the copy then, in the commands that it shows. ValueError for a file that is there, for
    one that is no Python, and for one that would hide a library of its name from every script beside it.
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

    # a folder that is missing is made, as a run makes that of its results
    path.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8")
    path.write_text(text.replace(f"train_scripts/{source.name}", path.as_posix()), encoding="utf-8")
    return path


def _library(name: str) -> str:
    """The place of an installed module of this name, which no script lies beside; empty without one."""
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return f"Python's own {name}"
    found = None
    if name.isidentifier():
        found = importlib.util.find_spec(name)
    if found is None or found.origin is None or Path(found.origin).parent == Path.cwd():
        return ""
    return found.origin


def config(path: Path) -> type:
    """The class of a script's options, `Config`; the script is imported, and does not run."""
    name = f"rft_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # any file ending in .py has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the hints of its dataclass are looked up
    spec.loader.exec_module(module)
    return module.Config


def execute(path: Path, arguments: Sequence[str]) -> None:
    """Run a script as `python PATH ARGUMENTS` would: it is `__main__`, with its folder first on sys.path."""
    sys.argv = [str(path), *arguments]
    if path.resolve().parent != folder():  # ours import nothing that lies beside them
        sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")
