"""Python files of users as modules: rewards, environments, losses, weights, scripts.

A file gets a name that holds its path, `rft_fn.user_files.x0f3c_2fhome_2fme_2fmine_2epy`, and every process
that has rft_fn can import that name. So pickle finds a file's functions in a worker too, however it was
started (spawn, forkserver, another machine with the same folders), and two files of one name stay apart.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__all__ = ["find_module", "load"]


__path__: list[str] = []  # what makes `import` look for modules in here; `_Finder` finds them


def find_module(source: str, spec: str, *, kind: str = "reward") -> ModuleType:
    """Return the module of a file or of a dotted name.

    `spec` is what is loaded, and `kind` what that is, for errors. ValueError for one that does not exist or
    does not parse; errors that the module itself raises get a note with the spec.
    """
    what = f"{kind} {spec!r}"
    is_file = source.endswith(".py")
    path = Path(source).resolve()
    if is_file and not path.is_file():
        raise ValueError(f"{what}: {'not a regular file' if path.exists() else 'no such file'}: {path}")

    # a file may do anything while it runs: every error gets the name of the reward
    try:
        if is_file:
            return load(path)
        _make_importable(Path.cwd())
        return importlib.import_module(source)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise ValueError(f"{what}: {where}: {error.msg}") from error
    except SystemExit as error:
        raise ValueError(
            f"{what}: expected a file that defines functions, got sys.exit({error.code!r})"
        ) from error
    except BaseException as error:
        from rft_fn.border import (  # imports torch, which completion in a shell does without
            contained,
            is_ours,
        )

        name = error.name if isinstance(error, ModuleNotFoundError) else None
        if name and not is_file and f"{source}.".startswith(f"{name}."):  # not one that it imports
            raise ValueError(f"{what}: no module {name!r} is installed or lies in {Path.cwd()}") from error
        made = error if is_ours(error) else contained(error)
        made.add_note(f"raised by the file of the {what}")
        if made is error:
            raise
        raise made from error


def _make_importable(folder: Path) -> None:
    """Make the modules of a folder importable; installed ones come first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


# ---------- a file, run once under a name that holds its path


def load(path: Path) -> ModuleType:
    """Return the module of a file, run again only if the file has changed.

    A file with relative imports is a member of its package, which is another one for each of its files that
    is loaded. Modules in its folder, or in its package's, can be imported.
    """
    source = path.read_bytes()
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # raised again when the file is run
        nodes = []
    dots = max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)
    if not dots:
        return importlib.import_module(_name(path, source))

    # the outermost folder of its package, at least as far up as its relative imports go
    root = path.parents[dots - 1]
    while (root / "__init__.py").is_file() and (root.parent / "__init__.py").is_file():
        root = root.parent
    inner = path.relative_to(root).with_suffix("").parts
    return importlib.import_module(".".join((_name(root, source, path.name), *inner)))


_NAME = re.compile(r"x(?P<digest>[0-9a-f]{12})(?P<path>(?:[A-Za-z0-9]|_[0-9a-f]{2})+)")


def _name(path: Path, source: bytes, member: str = "") -> str:
    """Return the name of a file with this source, or of the package of a `member` with it."""
    plain = [
        chr(byte) if chr(byte).isascii() and chr(byte).isalnum() else f"_{byte:02x}"
        for byte in os.fsencode(path)
    ]
    return f"{__name__}.x{_digest(source, member)}{''.join(plain)}"


def _path(quoted: str) -> Path:
    """Return the path in a name."""
    plain = re.sub(rb"_([0-9a-f]{2})", lambda found: bytes.fromhex(found[1].decode()), quoted.encode())
    return Path(os.fsdecode(plain))


def _digest(source: bytes, member: str = "") -> str:
    return hashlib.sha256(member.encode() + b"\0" + source).hexdigest()[:12]


class _Finder:
    """Finds the file or the package that a name of `_name` holds."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """Return how a module is loaded; None for one that is not a user's file."""
        parent, _, own = name.rpartition(".")
        match = _NAME.fullmatch(own)
        if match is None or parent != __name__:
            return None
        place = _path(match["path"])
        if place.is_dir():
            _make_importable(place.parent)
            init = place / "__init__.py"
            if init.is_file():
                return importlib.util.spec_from_file_location(
                    name, init, submodule_search_locations=[str(place)]
                )
            package = ModuleSpec(name, None, is_package=True)
            package.submodule_search_locations = [str(place)]
            return package
        if not place.is_file():
            return None
        _make_importable(place.parent)
        if _digest(place.read_bytes()) != match["digest"]:  # a worker imports it later than its run
            line = f"{place}: it has changed since the run read it; this worker runs it as it is now"
            warnings.warn(line, stacklevel=2)
        return importlib.util.spec_from_file_location(name, place)


if not any(getattr(finder, "__module__", "") == __name__ for finder in sys.meta_path):
    sys.meta_path.append(_Finder)
