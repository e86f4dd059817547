"""Imports the modules of users' reward functions: installed ones, and files."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rft_fn import rng

__all__ = ["find"]


def find(source: str, spec: str, *, kind: str = "reward") -> ModuleType:
    """The module of a file or of a dotted name.

    `spec` is what is loaded, and `kind` what that is, for errors. ValueError for one that does not exist or
    does not parse; errors that the module itself raises get a note with the spec.
    """
    # a file may do anything while it runs: every error gets the name of the reward
    try:
        if not source.endswith(".py"):
            return _import(source, f"{kind} {spec!r}")
        path = Path(source).resolve()
        if not path.is_file():
            raise ValueError(f"{kind} {spec!r}: no such file: {path}")
        return _run_file(path)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise ValueError(f"{kind} {spec!r}: {where}: {error.msg}") from error
    except SystemExit as error:
        raise ValueError(
            f"{kind} {spec!r}: expected a file that defines functions, got sys.exit({error.code!r})"
        ) from error
    except BaseException as error:
        error.add_note(f"raised by the file of the {kind} {spec!r}")
        raise


def _import(source: str, what: str) -> ModuleType:
    """The module of a dotted name, installed or in the working directory."""
    _find_beside(Path.cwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise  # a module that this one imports
        raise ValueError(f"{what}: no module {error.name!r} is installed or lies in {Path.cwd()}") from error


def _find_beside(folder: Path) -> None:
    """Make the modules of a folder importable; installed ones come first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _run_file(path: Path) -> ModuleType:
    """The module of a file, run again only if the file has changed.

    A file with relative imports is a member of its package, which gets a name made from its path, so that two
    packages of one name stay apart. Modules in its folder, or beside its package, can be imported.
    """
    source = path.read_bytes()
    name = f"rft_fn_reward_{path.stem}_{rng.fold_in(0, str(path), source.hex())}"
    dots = _relative(source)
    if not dots:
        _find_beside(path.parent)
        return _imported(name, path)

    # the package by that name, then the file as a module in it
    root = _package(path, dots)
    _find_beside(root.parent)
    if name not in sys.modules:
        init = root / "__init__.py"
        if init.is_file():
            _imported(name, init, [str(root)])
        else:
            package = ModuleType(name)
            package.__path__ = [str(root)]
            sys.modules[name] = package
    inner = path.relative_to(root).with_suffix("").parts
    return importlib.import_module(".".join((name, *inner)))


def _package(path: Path, dots: int) -> Path:
    """The outermost folder of a file's package.

    It is at least as far up as the file's relative imports go.
    """
    root = path.parents[dots - 1]
    while (root / "__init__.py").is_file() and (root.parent / "__init__.py").is_file():
        root = root.parent
    return root


def _relative(source: bytes) -> int:
    """The most dots of a file's relative imports, 0 without any.

    Also 0 for a file that does not parse.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # raised again when the file is run
        return 0
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return max(levels, default=0)


def _imported(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    """The module of a file under that name.

    Nothing of it stays behind if it raises.
    """
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look the module up while and after it runs
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
