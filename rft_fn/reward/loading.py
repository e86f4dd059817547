"""Reward functions by the names that a command line gives them."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rft_fn.reward import modules, verifiable
from rft_fn.reward.adapters import ADAPTERS
from rft_fn.reward.combine import Weighted
from rft_fn.reward.convention import GIVEN, RewardFn, parameters, takes_all
from rft_fn.reward.spec import Called, Spec, arguments, distinct, split, split_weight

__all__ = ["load", "parse"]

_NAMED: dict[str, Callable[..., RewardFn]] = {
    "math": verifiable.math,
    "numeric": verifiable.numeric,
    "boxed": partial(verifiable.numeric, boxed=True),
    "exact": verifiable.exact,
    "format": verifiable.boxed_format,
    "tags": verifiable.tag_format,
}

_NAMELESS = "<lambda>"  # what Python calls a function without a name

_OWN_COLUMNS = ("", "messages", "text")  # adapters of functions that name the columns that they read

# What a function names that is written for another library, and the adapter for it.
_FOREIGN = {
    "model_reward_list": "lightrft",
    "queries": "openrlhf",
    "solution_str": "verl",
    "solution_strs": "verl",
    "completion": "verifiers",
}


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
    return _load(split(spec, _NAMED, ADAPTERS))


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
        text, weight = split_weight(spec)
        if text in weights:
            raise ValueError(
                f"reward {text!r}: expected it once, got it twice; give it one weight, NAME=WEIGHT"
            )
        weights[text] = weight

    found = [split(text, _NAMED, ADAPTERS) for text in weights]
    functions = [_load(spec) for spec in found]
    names = distinct([_called(spec, fn) for spec, fn in zip(found, functions, strict=True)])
    components = dict(zip(names, zip(functions, weights.values(), strict=True), strict=True))
    return Weighted(components, specs=dict(zip(names, weights, strict=True)))


def _called(spec: Spec, fn: RewardFn) -> Called:
    """A function that was made by a call of a factory is called what it calls itself."""
    own = getattr(fn, "__name__", _NAMELESS)
    if spec.call is None or not spec.name or own == _NAMELESS:
        return Called(spec.short, spec.long)
    return Called(own, f"{spec.long}:{own}")


def _load(spec: Spec) -> RewardFn:
    if spec.source in _NAMED and not spec.name:
        fn = _make(spec, _NAMED[spec.source])
    elif spec.source == "task":
        fn = verifiable.task(spec.name)
    else:
        fn = _find(spec)
    if not spec.adapter:
        return fn
    column = [spec.column] if spec.column and spec.name else []
    adapted = ADAPTERS[spec.adapter](fn, *column)
    adapted.__name__ = getattr(fn, "__name__", _NAMELESS)
    return adapted


def _make(spec: Spec, factory: Callable[..., Any]) -> Any:
    """What a factory makes of the arguments, or of the column alone. ValueError where it refuses them."""
    places, named = [], {}
    if spec.call is not None:
        places, named = arguments(spec)
    if spec.column and not spec.name:
        if "column" not in inspect.signature(factory).parameters:
            raise ValueError(f"reward {spec.text!r}: {spec.source} reads no column")
        named["column"] = spec.column
    try:
        return factory(*places, **named)
    except TypeError as error:
        raise ValueError(f"reward {spec.text!r}: {error}") from error


def _find(spec: Spec) -> Any:
    """The function of a file or a module, or what its factory makes. ValueError for what is neither."""
    if spec.column and spec.adapter in _OWN_COLUMNS:
        raise ValueError(
            f"reward {spec.text!r}: expected no column, the function names those that it reads, got "
            f"{spec.column!r}"
        )
    module = modules.find(spec.source, spec.text)
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
    if spec.adapter in ("verl", "tinyzero"):  # its reward_kwargs are further arguments of the function itself
        return _bound(spec, fn)
    made = _make(spec, fn)
    if not callable(made) and spec.adapter != "verifiers":
        raise ValueError(
            f"reward {spec.text!r}: expected a call that makes a reward function, got {type(made).__name__}"
        )
    return made


def _bound(spec: Spec, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with some of its arguments. ValueError for arguments that have no name."""
    places, named = arguments(spec)
    if places:
        raise ValueError(f"reward {spec.text!r}: expected NAME=VALUE, as in verl's reward_kwargs")
    return partial(fn, **named)


def _check_convention(spec: Spec, fn: Callable[..., Any]) -> None:
    """ValueError for a class, and for a function of another library's convention or that makes functions."""
    if isinstance(fn, type):
        raise ValueError(f"reward {spec.text!r}: {spec.name!r} is a class; call it: {spec.text}()")
    if spec.adapter not in _OWN_COLUMNS:
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
