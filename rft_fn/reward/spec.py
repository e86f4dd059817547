"""Parse the texts that name rewards: source, function, column, arguments, weight; find modules."""

import ast
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rft_fn import rng
from rft_fn.border import contained, is_ours

__all__ = ["Names", "Spec", "arguments", "distinct", "find_module", "split", "split_rows", "split_weight"]


class Spec(NamedTuple):
    """A reward as a command line names it: [ADAPTER:]SOURCE[:NAME][:COLUMN][(ARGUMENTS)].

    A model, a judge or a server is SOURCE:TARGET[(ARGUMENTS)].
    """

    text: str  # all of it
    adapter: str  # "" for none
    source: str  # "math", "task", path/file.py or package.module
    name: str  # the function, Class.method, or the task; "" for the named ones
    column: str  # of the answer; "" where none is named
    call: ast.Call | None  # the arguments
    target: str = ""  # a folder or an address, of a source that is no function

    @property
    def short(self) -> str:
        """Return the name of the reward, unless another one has it too."""
        return f"task:{self.name}" if self.source == "task" else self.name or self.source

    @property
    def long(self) -> str:
        """Return the name of the reward where another one has the short name; metrics show it."""
        if self.target:
            # without the query of an address, which may be long, and is no part of what is scored
            address = self.target.startswith(f"{self.source}://")
            target = self.target.split("?")[0] if address else self.target
            return f"{self.source}:{target.removeprefix(f'{self.source}:')}"
        source = Path(self.source).stem if self.source.endswith(".py") else self.source
        return ":".join(part for part in (source, self.name, self.column) if part)


def split_rows(spec: str) -> tuple[str, str, str]:
    """Return (column, value, rest) of [COLUMN=VALUE]REST, for some rows; ("", "", spec) of any other."""
    if not spec.startswith("["):
        return "", "", spec
    match = re.fullmatch(r"\[(?P<column>[^=\]]+)=(?P<value>[^\]]*)\](?P<rest>.+)", spec)
    if match is None:
        raise ValueError(f"reward {spec!r}: expected [COLUMN=VALUE]NAME, for the rows with that value")
    return match["column"], match["value"], match["rest"]


def split_weight(spec: str) -> tuple[str, float]:
    """Return (name, weight) of NAME=WEIGHT; the weight is 1 where there is none."""
    name, equals, weight = spec.rpartition("=")
    if not equals or spec.endswith(")"):  # the "=" is one of an argument
        return spec, 1.0
    try:
        return name, float(weight)
    except ValueError:
        pass

    # the rest of the path follows an "=" within a path, and a word of the query one within a URL
    if ":" in weight or "/" in weight or "://" in spec:
        return spec, 1.0
    raise ValueError(f"reward {spec!r}: expected NAME=WEIGHT with a number, got {weight!r}")


def split(
    text: str, named: Collection[str], adapters: Collection[str], sources: Collection[str] = ()
) -> Spec:
    """Return the parts of a spec without its weight. ValueError for any other text.

    `named` are the rewards that have a name, `adapters` the words that may come first, and `sources` the
    first words of rewards that are no functions.
    """
    target, call = _split_call(text)

    # a model, a judge or a server, and where it is
    word, colon, rest = target.partition(":")
    if colon and word in sources:
        if not rest.strip("/"):
            raise ValueError(f"reward {text!r}: expected {word}:TARGET, got nothing behind {word!r}")
        if rest.startswith("//"):  # an address, whole
            rest = target
        return Spec(text, "", word, "", "", call, rest)

    # an adapter
    first, _, rest = target.partition(":")
    adapter = ""
    if first in adapters:
        adapter = first
        target = rest
        first, _, rest = rest.partition(":")

    # a named reward, a task, or the function of a file or a module
    if first in named:
        return Spec(text, adapter, first, "", rest, call)
    if first == "task" and call is None:
        return Spec(text, adapter, first, rest, "", call)
    match = re.fullmatch(r"(?P<source>.+\.py|[\w.]+):(?P<name>\w+(?:\.\w+)*)(?::(?P<column>.+))?", target)
    if match is None or (match["column"] and call):
        known = ", ".join(named)
        raise ValueError(
            f"reward {text!r}: expected one of {known}, task:NAME, path/file.py:function, "
            "package.module:function, model:FOLDER, judge:FOLDER or https://HOST/PATH"
        )
    return Spec(text, adapter, match["source"], match["name"], match["column"] or "", call)


def _split_call(text: str) -> tuple[str, ast.Call | None]:
    """Return (the text before the arguments, the arguments or None)."""
    if not text.endswith(")"):
        return text, None
    for opening in re.finditer(r"(?<=\w)\(", text):  # a path may have parentheses too
        try:
            tree = ast.parse("f" + text[opening.start() :], mode="eval").body
        except SyntaxError:
            continue
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            return text[: opening.start()], tree
    raise ValueError(f"reward {text!r}: expected NAME(arguments), got parentheses that are no call")


def arguments(spec: Spec) -> tuple[list[Any], dict[str, Any]]:
    """Return (positional, keyword) arguments of the call. ValueError for one that is no literal."""
    named: dict[str, Any] = {}
    if spec.call is None:
        return [], named
    try:
        places = [ast.literal_eval(x) for x in spec.call.args]
        for keyword in spec.call.keywords:
            if keyword.arg is None:
                raise ValueError
            named[keyword.arg] = ast.literal_eval(keyword.value)
    except ValueError:
        raise ValueError(
            f"reward {spec.text!r}: expected arguments that are literals, such as 0.5, 'text', [1, 2] or "
            f"True, got {ast.unparse(spec.call)[1:]}"
        ) from None
    return places, named


class Names(NamedTuple):
    """The names that a reward may have."""

    short: str
    long: str


def distinct(names: Sequence[Names]) -> list[str]:
    """Return one name for each, all different: short, or long where two share it, or numbered."""
    short = [name.short for name in names]
    chosen: list[str] = []
    for name in names:
        base = name.long if short.count(name.short) > 1 else name.short
        # ":2" and so on, where even the long name is taken
        numbered = (f"{base}:{i}" for i in itertools.count(2))
        chosen.append(next(x for x in itertools.chain([base], numbered) if x not in chosen))
    return chosen


# ---------- the modules of users' reward functions: installed ones, and files


def find_module(source: str, spec: str, *, kind: str = "reward") -> ModuleType:
    """Return the module of a file or of a dotted name.

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
        made = error if is_ours(error) else contained(error)
        made.add_note(f"raised by the file of the {kind} {spec!r}")
        if made is error:
            raise
        raise made from error


def _import(source: str, what: str) -> ModuleType:
    """Return the module of a dotted name, installed or in the working directory."""
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise  # a module that this one imports
        raise ValueError(f"{what}: no module {error.name!r} is installed or lies in {Path.cwd()}") from error


def _make_importable(folder: Path) -> None:
    """Make the modules of a folder importable; installed ones come first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _run_file(path: Path) -> ModuleType:
    """Return the module of a file, run again only if the file has changed.

    A file with relative imports is a member of its package, which gets a name made from its path, so that two
    packages of one name stay apart. Modules in its folder, or in its package's, can be imported.
    """
    source = path.read_bytes()
    name = f"rft_fn_reward_{path.stem}_{rng.fold_in(0, str(path), source.hex())}"
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # raised again when the file is run
        nodes = []
    dots = max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)
    if not dots:
        _make_importable(path.parent)
        return _imported(name, path)

    # the outermost folder of its package, at least as far up as its relative imports go
    root = path.parents[dots - 1]
    while (root / "__init__.py").is_file() and (root.parent / "__init__.py").is_file():
        root = root.parent

    # the package by that name, then the file as a module in it
    _make_importable(root.parent)
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


def _imported(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    """Return the module of a file under that name; nothing of it is left if it raises."""
    if name in sys.modules:
        return sys.modules[name]
    where = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert where is not None and where.loader is not None
    module = importlib.util.module_from_spec(where)
    sys.modules[name] = module  # dataclasses and pickle look the module up while and after it runs
    try:
        where.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
