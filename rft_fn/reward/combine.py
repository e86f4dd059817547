"""Rewards as one weighted sum whose every value is checked, a preflight for it, rewards by name or file."""

import importlib.util
import inspect
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import rng
from rft_fn.reward import verifiable
from rft_fn.reward.verifiable import RewardFn

__all__ = ["Score", "Scored", "Weighted", "check", "columns", "load", "parse", "weighted"]


class Scored(NamedTuple):
    """The rewards of B completions."""

    total: Tensor  # [B] float32: the weighted sum of the parts
    parts: dict[str, Tensor]  # name -> [B] float32, before its weight


Columns = Mapping[str, Sequence[Any]]  # of the dataset: name -> one value a completion

Score = Callable[[Sequence[str], Sequence[str], Columns], Scored]
"""score(prompts, completions, columns), each with one value a completion -> Scored."""


def _number(name: str, index: int, value: object) -> float:
    """One value of a reward as a float. Raises ValueError for anything but a finite float32."""
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(plain, numbers.Real) and abs(plain) <= torch.finfo(torch.float32).max:  # False for NaN
        return float(plain)
    raise ValueError(
        f"reward {name!r}: value {index} is {value!r:.80}, not a finite number; "
        "return a float for every completion, 0.0 for one that cannot be scored"
    )


def _values(name: str, result: object, count: int) -> Tensor:
    """What a reward function returned, as [B] float32. Raises ValueError for a wrong count or a bad value."""
    try:
        values = list(result)
    except TypeError:
        kind = type(result).__name__
        raise ValueError(f"reward {name!r}: expected a list of {count} numbers, got {kind}") from None
    if len(values) != count:
        raise ValueError(f"reward {name!r}: expected {count} values, got {len(values)}")
    return torch.tensor([_number(name, i, value) for i, value in enumerate(values)], dtype=torch.float32)


_GIVEN = ("prompts", "completions")  # what every reward is given; all other names are columns


def _named(fn: RewardFn) -> list[inspect.Parameter]:
    """The parameters of a reward function that have a name to the caller."""
    parameters = inspect.signature(fn).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _adapted(name: str, fn: RewardFn) -> RewardFn:
    """`fn`, given the columns that it asks for: all if it takes **kwargs, else those among its parameters.

    So `def reward(completions, answer)` is a reward function too. Raises ValueError, when called, for a
    parameter without a default that is no column.
    """
    takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(fn).parameters.values())
    named = _named(fn)

    def reward(**given: Any) -> object:
        known = ", ".join(name for name in given if name not in _GIVEN) or "none"
        for p in named:
            if p.default is p.empty and p.name not in given:
                missing = f"reward {name!r}: column {p.name!r} is not in the dataset"
                raise ValueError(f"{missing}; its columns are: {known}")
        return fn(**(given if takes_all else {p.name: given[p.name] for p in named if p.name in given}))

    return reward


class Weighted:
    """A weighted sum of rewards, called as `score(prompts, completions, columns)`; made by `weighted`."""

    def __init__(self, components: Mapping[str, tuple[RewardFn, float]]):
        _check_components(components)
        self.components = dict(components)
        self.running = ""  # the reward that is being computed, or the one that raised
        self._adapted = {name: _adapted(name, fn) for name, (fn, _) in components.items()}

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns) -> Scored:
        _check_batch(prompts, completions, columns)
        batch = {**columns, "prompts": list(prompts), "completions": list(completions)}
        count, parts = len(completions), {}
        for name, fn in self._adapted.items():
            self.running = name
            parts[name] = _values(name, _call(name, fn, batch), count)
        self.running = ""
        total = torch.zeros(count)
        for name, (_, weight) in self.components.items():
            total = total + float(weight) * parts[name]
        return Scored(total, parts)


def weighted(**components: tuple[RewardFn, float]) -> Weighted:
    """score = sum of weight * component: `weighted(accuracy=(math(), 0.9), format=(boxed_format(), 0.1))`.

    Each component is called with keywords, as TRL does it: `fn(prompts=..., completions=..., **columns)`.
    Raises ValueError here for no component or a weight that is not finite. `score` raises ValueError that
    names the component for the wrong number of values, for a value that is not a finite number (nothing is
    replaced silently: a NaN reward would turn a whole group's advantages into NaN), for a column that is
    missing and for a component that calls `sys.exit`. Whatever else a component raises is passed on with a
    note that names the component.
    """
    return Weighted(components)


def columns(score: Score) -> tuple[str, ...]:
    """The columns that a score cannot do without, in order: for `data.load(..., columns=...)`.

    A reward function names them in its attribute `columns`, as those of `verifiable` do; of any other they
    are its parameters without a default, so give one to a parameter whose column may be missing or empty.
    () for a score that is not made by `weighted` or `parse`.
    """
    names: dict[str, None] = {}
    for fn, _ in getattr(score, "components", {}).values():
        read = getattr(fn, "columns", None)
        if read is None:
            read = [p.name for p in _named(fn) if p.default is p.empty]
        names |= dict.fromkeys(read)
    return tuple(name for name in names if name not in _GIVEN)


def _check_components(components: Mapping[str, tuple[RewardFn, float]]) -> None:
    if not components:
        raise ValueError("weighted: expected at least one component, as name=(reward function, weight)")
    for name, component in components.items():
        if not (isinstance(component, tuple) and len(component) == 2 and callable(component[0])):
            raise ValueError(f"reward {name!r}: expected (reward function, weight), got {component!r}")
        if not isinstance(component[1], numbers.Real) or not math.isfinite(component[1]):
            raise ValueError(f"reward {name!r}: expected a finite weight, got {component[1]!r}")


def _check_batch(prompts: Sequence[str], completions: Sequence[str], columns: Columns) -> None:
    """Raises ValueError for lengths that differ and for columns whose names are taken."""
    count = len(completions)
    if len(prompts) != count:
        raise ValueError(f"prompts: expected {count} values, one a completion, got {len(prompts)}")
    for name, values in columns.items():
        if name in _GIVEN:
            raise ValueError(f"column {name!r}: the reward's own argument has this name; rename the column")
        if len(values) != count:
            raise ValueError(f"column {name!r}: expected {count} values, one a completion, got {len(values)}")


def _call(name: str, fn: RewardFn, batch: dict[str, Any]) -> object:
    """fn(**batch). Whatever it raises has a note that names the component; sys.exit becomes ValueError."""
    try:
        result = fn(**batch)
        if isinstance(result, Iterator):  # a generator computes when it is read
            result = list(result)
        return result
    except SystemExit as error:
        exit_ = ValueError(
            f"reward {name!r}: expected a list of numbers, got sys.exit({error.code!r}); raise an error to "
            "stop the run, return 0.0 for a completion that cannot be scored"
        )
        exit_.add_note(f"raised by the reward {name!r}")
        raise exit_ from error
    except KeyboardInterrupt:  # not the reward's doing
        raise
    except BaseException as error:
        error.add_note(f"raised by the reward {name!r}")
        raise


def check(score: Score, rows: Sequence[Mapping[str, Any]], *, answer: str = "answer") -> dict[str, Scored]:
    r"""Scores made-up completions of a few rows, so that a broken reward fails before a GPU is warm.

    Completions: "empty"; "garbage", letters and punctuation drawn by the index of the row; and, where the
    rows have the column `answer`, "answer", the reference itself, and "boxed", the reference in \boxed{}.
    Returns the scores by these names. Raises what `score` raises, and ValueError for no rows. Warns where no
    reference scores above the garbage (the reward cannot tell right from wrong, or wants a format of its own:
    look at the returned parts).
    """
    if not rows:
        raise ValueError("rows: expected at least one row of the dataset, got none")
    names = [name for name in rows[0] if all(name in row for row in rows)]
    columns = {name: [row[name] for row in rows] for name in names}
    prompts = [str(row.get("prompt", row.get("question", ""))) for row in rows]
    tries = {"empty": [""] * len(rows), "garbage": [_garbage(i) for i in range(len(rows))]}
    if answer in columns:
        tries["answer"] = [str(value) for value in columns[answer]]
        tries["boxed"] = [rf"\boxed{{{value}}}" for value in columns[answer]]
    scored = {name: score(prompts, completions, columns) for name, completions in tries.items()}
    if answer in columns:
        _warn_if_blind(scored)
    return scored


def _garbage(index: int) -> str:
    """Sixty characters that answer nothing: no digits, no braces, no backslash."""
    key = rng.fold_in(0, "garbage", index)
    return "".join(chr(ord("a") + rng.fold_in(key, i) % 26) if i % 7 else " ;" for i in range(60))


def _warn_if_blind(scored: dict[str, Scored]) -> None:
    best = torch.maximum(scored["answer"].total, scored["boxed"].total)
    if not (best > scored["garbage"].total).any():
        warnings.warn(
            f"reward: the reference answers score no more than garbage does: {best.tolist()} "
            f"against {scored['garbage'].total.tolist()}",
            stacklevel=3,
        )


_NAMED: dict[str, Callable[[], RewardFn]] = {
    "math": verifiable.math,
    "numeric": verifiable.numeric,
    "boxed": partial(verifiable.numeric, boxed=True),
    "exact": verifiable.exact,
    "format": verifiable.boxed_format,
    "tags": verifiable.tag_format,
}


def load(spec: str) -> RewardFn:
    """The reward function that a command line names.

    "math", "numeric", "exact", "format" (a box) and "tags": that factory with its defaults; "boxed": numeric
    on what is in the last box. "task:NAME": the built-in task's verifier. "path/file.py:function": a function
    of your own; the file runs once a call. Raises ValueError that says what is wrong with the spec; what the
    file itself raises is passed on with its name, a syntax error as ValueError.
    """
    if spec in _NAMED:
        return _NAMED[spec]()
    source, colon, attribute = spec.rpartition(":")
    if source == "task":
        return verifiable.task(attribute)
    if not colon or not source.endswith(".py") or not attribute:
        known = ", ".join(_NAMED)
        raise ValueError(f"reward {spec!r}: expected one of {known}, task:NAME or path/file.py:function")
    return _load_file(spec, Path(source), attribute)


def _load_file(spec: str, path: Path, attribute: str) -> RewardFn:
    """The callable `attribute` of a Python file that is not part of a package."""
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: no such file: {path.resolve()}")
    name = f"rft_fn_reward_{path.stem}_{rng.fold_in(0, str(path.resolve()))}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up while and after it runs
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            where = f"{error.filename}, line {error.lineno}"
            raise ValueError(f"reward {spec!r}: {where}: {error.msg}") from error
        if isinstance(error, SystemExit):
            raise ValueError(
                f"reward {spec!r}: expected a file that defines functions, got sys.exit({error.code!r})"
            ) from error
        error.add_note(f"raised by the file of the reward {spec!r}")
        raise
    if not hasattr(module, attribute):
        functions = ", ".join(n for n, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise ValueError(f"reward {spec!r}: no {attribute!r} in the file; its functions: {functions}")
    if not callable(fn := getattr(module, attribute)):
        raise ValueError(f"reward {spec!r}: {attribute!r} is {type(fn).__name__}, not a function")
    return fn


def parse(specs: Sequence[str]) -> Weighted:
    """The weighted sum that a command line names: each spec as in `load`, =WEIGHT behind it if that is not 1.

    `parse(["boxed", "format=0.1"])`. The parts are called by their specs without the weights. Only a number
    behind the last "=" is a weight, so a path or a URL may hold one (one that ends in "=2" needs "=1" behind
    it). ValueError for no reward, and for one that is named twice.
    """
    if not specs:
        raise ValueError("reward: expected at least one, got none")
    components: dict[str, tuple[RewardFn, float]] = {}
    for spec in specs:
        name, weight = _split_weight(spec)
        if name in components:
            raise ValueError(
                f"reward {name!r}: expected it once, got it twice; give it one weight, NAME=WEIGHT"
            )
        components[name] = (load(name), weight)
    return weighted(**components)


def _split_weight(spec: str) -> tuple[str, float]:
    """(name, weight) of NAME=WEIGHT; the weight is 1 where there is none."""
    name, equals, weight = spec.rpartition("=")
    if not equals:
        return spec, 1.0
    try:
        return name, float(weight)
    except ValueError:
        pass
    # an "=" within a path has the rest of the path behind it, and one within a URL a word of the query
    if ":" in weight or "/" in weight or "://" in spec:
        return spec, 1.0
    raise ValueError(f"reward {spec!r}: expected NAME=WEIGHT with a number, got {weight!r}")
