"""Reward functions by the names that a command line gives them."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rft_fn import rng
from rft_fn.reward import verifiable
from rft_fn.reward.adapters import ADAPTERS
from rft_fn.reward.combine import Weighted
from rft_fn.reward.convention import GIVEN, RewardFn, parameters, takes_all

__all__ = ["load", "parse"]

_NAMED: dict[str, Callable[..., RewardFn]] = {
    "math": verifiable.math,
    "numeric": verifiable.numeric,
    "boxed": partial(verifiable.numeric, boxed=True),
    "exact": verifiable.exact,
    "format": verifiable.boxed_format,
    "tags": verifiable.tag_format,
}

# What a function names that is written for another library, and the adapter for it.
_FOREIGN = {
    "model_reward_list": "lightrft",
    "queries": "openrlhf",
    "solution_str": "verl",
    "solution_strs": "verl",
    "completion": "verifiers",
}


class _Spec(NamedTuple):
    """A reward as a command line names it: [ADAPTER:]SOURCE[:NAME][:COLUMN][(ARGUMENTS)]."""

    text: str  # all of it
    adapter: str  # "" for none
    source: str  # "math", "task", path/file.py or package.module
    name: str  # the function, or the task; "" for the named ones
    column: str  # of the answer; "" where it is not said
    call: ast.Call | None  # the arguments

    @property
    def short(self) -> str:
        """What the reward is called where no other one has this name."""
        if self.source == "task":
            return f"task:{self.name}"
        return self.name or self.source

    @property
    def long(self) -> str:
        """What it is called where another one has the short name."""
        parts = [self.source, self.name, self.column]
        if self.source.endswith(".py"):
            parts[0] = Path(self.source).stem
        return ":".join(part for part in parts if part)


def load(spec: str) -> RewardFn:
    """The reward function that a command line names.

    "math", "numeric", "exact", "boxed" (numeric on what is in the last box), with ":COLUMN" behind it where
    the answer is not in the column `answer`: a path such as "math:reward_model.ground_truth"; "format" (a
    box) and "tags". "task:NAME": the built-in task's verifier. "path/file.py:function" and
    "package.module:function", of what is installed or lies in the working directory: one of your own. A
    factory is called with literal arguments: "file.py:cosine(max_len=512)", "numeric(boxed=True)".

    In front of a function that is not written for TRL stands what it is written for: "verl:", "openrlhf:",
    "lightrft:" or "verifiers:" (see `reward.adapters`), with ":COLUMN" behind it where the answer has another
    column than there. "messages:" and "text:" say in which form a function reads prompts and completions
    where that is not the form of the data.

    ValueError that says what is wrong with the spec; what the file itself raises is passed on with its name.
    """
    return _load(_split(spec))


def parse(specs: Sequence[str]) -> Weighted:
    """The weighted sum that a command line names: each spec as in `load`, =WEIGHT behind it if that is not 1.

    `parse(["boxed", "format=0.1"])`. The parts are called by their functions: "accuracy" for
    "path/file.py:accuracy"; where two have the same name, by file and function. Only a number behind the
    last "=" is a weight, so a path or a URL may hold one (one that ends in "=2" needs "=1" behind it).
    ValueError for no reward, and for one that is named twice.
    """
    if not specs:
        raise ValueError("reward: expected at least one, got none")
    weights: dict[str, float] = {}
    for spec in specs:
        text, weight = _split_weight(spec)
        if text in weights:
            raise ValueError(
                f"reward {text!r}: expected it once, got it twice; give it one weight, NAME=WEIGHT"
            )
        weights[text] = weight

    split = [_split(text) for text in weights]
    functions = [_load(spec) for spec in split]
    names = _distinct([_called(spec, fn) for spec, fn in zip(split, functions, strict=True)])
    components = dict(zip(names, zip(functions, weights.values(), strict=True), strict=True))
    return Weighted(components, specs=dict(zip(names, weights, strict=True)))


# -------------------------------------------------------------------------------------------------- the names


class _Called(NamedTuple):
    """The names that a reward may have."""

    short: str
    long: str


def _called(spec: _Spec, fn: RewardFn) -> _Called:
    """A function that was made by a call of a factory is called what it calls itself."""
    own = getattr(fn, "__name__", "<lambda>")
    if spec.call is None or not spec.name or spec.adapter or own == "<lambda>":
        return _Called(spec.short, spec.long)
    return _Called(own, f"{spec.long}:{own}")


def _distinct(names: Sequence[_Called]) -> list[str]:
    """One name for each: the short one if no other has it, else the long one, numbered if need be."""
    short = [name.short for name in names]
    found: list[str] = []
    for name in names:
        chosen = base = name.short
        if short.count(chosen) > 1:
            chosen = base = name.long
        again = 1
        while chosen in found:
            again += 1
            chosen = f"{base}:{again}"
        found.append(chosen)
    return found


# -------------------------------------------------------------------------------------------------- the parts


def _split_weight(spec: str) -> tuple[str, float]:
    """(name, weight) of NAME=WEIGHT; the weight is 1 where there is none."""
    name, equals, weight = spec.rpartition("=")
    if not equals or spec.endswith(")"):  # the "=" is one of an argument
        return spec, 1.0
    try:
        return name, float(weight)
    except ValueError:
        pass
    # an "=" within a path has the rest of the path behind it, and one within a URL a word of the query
    if ":" in weight or "/" in weight or "://" in spec:
        return spec, 1.0
    raise ValueError(f"reward {spec!r}: expected NAME=WEIGHT with a number, got {weight!r}")


def _split(text: str) -> _Spec:
    """The parts of a spec without its weight. ValueError for one that is none."""
    target, call = _split_call(text)
    first, _, rest = target.partition(":")
    adapter = ""
    if first in ADAPTERS:
        adapter, target = first, rest
        first, _, rest = rest.partition(":")
    if first in _NAMED and not (rest and first in ("format", "tags")):
        return _Spec(text, adapter, first, "", rest, call)
    if first == "task" and call is None:
        return _Spec(text, adapter, first, rest, "", call)
    found = re.fullmatch(r"(?P<source>.+\.py|[\w.]+):(?P<name>\w+)(?::(?P<column>.+))?", target)
    if found is None or (found["column"] and call):
        known = ", ".join(_NAMED)
        raise ValueError(
            f"reward {text!r}: expected one of {known}, task:NAME, path/file.py:function or "
            "package.module:function"
        )
    return _Spec(text, adapter, found["source"], found["name"], found["column"] or "", call)


def _split_call(text: str) -> tuple[str, ast.Call | None]:
    """What stands in front of the arguments, and the arguments: None where there are none."""
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


def _arguments(spec: _Spec) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the call. ValueError for one that is no literal."""
    assert spec.call is not None
    named: dict[str, Any] = {}
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


# ----------------------------------------------------------------------------------------------- the function


def _load(spec: _Spec) -> RewardFn:
    if spec.source in _NAMED and not spec.name:
        fn = _make(spec, _NAMED[spec.source])
    elif spec.source == "task":
        fn = verifiable.task(spec.name)
    else:
        fn = _find(spec)
    if not spec.adapter:
        return fn
    wrap = ADAPTERS[spec.adapter]
    if not spec.column or spec.source in _NAMED:
        return wrap(fn)
    return wrap(fn, spec.column)


def _make(spec: _Spec, factory: Callable[..., Any]) -> Any:
    """What a factory makes of the arguments, or of the column alone. ValueError where it refuses them."""
    places, named = [], {}
    if spec.call is not None:
        places, named = _arguments(spec)
    if spec.column and spec.source in _NAMED:
        named["column"] = spec.column
    try:
        return factory(*places, **named)
    except TypeError as error:
        raise ValueError(f"reward {spec.text!r}: {error}") from error


def _find(spec: _Spec) -> Any:
    """The function of a file or a module, or what its factory makes. ValueError for what is neither."""
    module = _module(spec)
    if not hasattr(module, spec.name):
        functions = ", ".join(n for n, x in vars(module).items() if inspect.isfunction(x)) or "none"
        raise ValueError(f"reward {spec.text!r}: no {spec.name!r} in the file; its functions: {functions}")
    fn = getattr(module, spec.name)
    if spec.adapter == "verifiers" and not isinstance(fn, type) and spec.call is None:
        return fn  # an object, which need not be a function
    if not callable(fn):
        raise ValueError(f"reward {spec.text!r}: {spec.name!r} is {type(fn).__name__}, not a function")
    if spec.call is None:
        _check_convention(spec, fn)
        return fn
    if spec.adapter == "verl":  # whose reward_kwargs are arguments of the function itself
        return partial(fn, **_arguments(spec)[1])
    made = _make(spec, fn)
    if not callable(made) and spec.adapter != "verifiers":
        raise ValueError(
            f"reward {spec.text!r}: expected a call that makes a reward function, got {type(made).__name__}"
        )
    return made


def _check_convention(spec: _Spec, fn: Callable[..., Any]) -> None:
    """ValueError for a class, and for a function of another library's convention or that makes functions."""
    if isinstance(fn, type):
        raise ValueError(f"reward {spec.text!r}: {spec.name!r} is a class; call it: {spec.text}()")
    if spec.adapter not in ("", "messages", "text"):
        return
    names = [p.name for p in parameters(fn)]
    if "completions" in names:
        return
    for name, adapter in _FOREIGN.items():
        if name in names:
            raise ValueError(
                f"reward {spec.text!r}: it takes {name}, as functions for {adapter} do; write "
                f"{adapter}:{spec.text}"
            )
    if not takes_all(fn) and not set(names) & set(GIVEN):
        example = ", ".join(f"{name}=..." for name in names)
        raise ValueError(
            f"reward {spec.text!r}: expected a function of completions, got one of ({', '.join(names)}); if "
            f"it makes reward functions, call it: {spec.text}({example})"
        )


# ------------------------------------------------------------------------------------------------- the module


def _module(spec: _Spec) -> ModuleType:
    """The file or the module of a spec. What it raises has a note that names the spec."""
    try:
        if not spec.source.endswith(".py"):
            return _import(spec)
        path = Path(spec.source).resolve()
        if not path.is_file():
            raise ValueError(f"reward {spec.text!r}: no such file: {path}")
        return _run_file(path)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise ValueError(f"reward {spec.text!r}: {where}: {error.msg}") from error
    except SystemExit as error:
        raise ValueError(
            f"reward {spec.text!r}: expected a file that defines functions, got sys.exit({error.code!r})"
        ) from error
    except BaseException as error:
        error.add_note(f"raised by the file of the reward {spec.text!r}")
        raise


def _import(spec: _Spec) -> ModuleType:
    """The module of a spec, installed or in the working directory."""
    _find_beside(Path.cwd())
    try:
        return importlib.import_module(spec.source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{spec.source}.".startswith(f"{error.name}."):
            raise  # another one, which that module imports
        raise ValueError(
            f"reward {spec.text!r}: no module {error.name!r} is installed or lies in {Path.cwd()}"
        ) from error


def _find_beside(folder: Path) -> None:
    """Lets modules of a folder be imported, after all that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _run_file(path: Path) -> ModuleType:
    """The module of a file: run once, and anew when the file has changed.

    One with relative imports is a member of its package, which gets a name of its own, so that two packages
    of one name are two. What lies in its folder, or beside its package, can be imported.
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
    """The outermost folder of the package that a file is in, as many up as its imports go at least."""
    root = path.parents[dots - 1]
    while (root / "__init__.py").is_file() and (root.parent / "__init__.py").is_file():
        root = root.parent
    return root


def _relative(source: bytes) -> int:
    """The most dots of a file's relative imports; 0 for a file without them, or that does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # said when the file is run
        return 0
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return max(levels, default=0)


def _imported(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    """The module of a file by a name of its own; nothing of it stays where it raises."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up while and after it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
