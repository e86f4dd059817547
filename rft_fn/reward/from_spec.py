"""Load reward functions by their names on the command line."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from rft_fn.reward import verifiable
from rft_fn.reward.combine import Weighted
from rft_fn.reward.connection import shown
from rft_fn.reward.foreign import ADAPTERS
from rft_fn.reward.remote import TOKEN_ENV, served_at
from rft_fn.reward.reward_record import Reward, as_reward, parameters, takes_all
from rft_fn.reward.row_weights import RowWeights, Weight
from rft_fn.reward.signature import GIVEN
from rft_fn.reward.spec import Names, Spec, arguments, distinct, split, split_rows, split_weight
from rft_fn.text import no_secret, shown_without_secrets
from rft_fn.user_files import find_module

__all__ = ["Source", "by_column", "load", "parse"]


Source = Callable[..., Reward]
"""Makes the reward of a spec SOURCE:TARGET(ARGUMENTS): a model, a judge, a server.

It is called with the target and the literal arguments of the spec. The part has the reward's `__name__`, if
there is one. ValueError for a target or an argument that it cannot take; the line then begins with the spec.
"""


_NAMED: dict[str, Callable[..., Reward]] = {
    "math": verifiable.math,
    "numeric": verifiable.numeric,
    "boxed": partial(verifiable.numeric, boxed=True),
    "exact": verifiable.exact,
    "format": verifiable.boxed_format,
    "tags": verifiable.tag_format,
}

_SOURCES: dict[str, Source] = {"http": served_at, "https": served_at}
"""The sources that need nothing of a run."""

_TOKEN = f"a token belongs into the environment variable {TOKEN_ENV}, or into the one that token_env names"

_NAMELESS = "<lambda>"  # Python's name for a function without one

_OWN_COLUMNS = ("", "messages", "text")  # adapters of functions that name the columns that they read

# Adapters of functions with arguments of the config -> where these are given there.
_FURTHER = {
    "verl": "verl's reward_kwargs",
    "tinyzero": "verl's reward_kwargs",
    "nemo_rl": "the kwargs of NeMo-RL's reward_functions",
    "easyr1": "EasyR1's reward_function_kwargs",
}

# Parameters of functions that are written for another library -> the adapter for them.
_FOREIGN = {
    "model_reward_list": "lightrft",
    "queries": "openrlhf",
    "solution_str": "verl",
    "solution_strs": "verl",
    "reward_inputs": "easyr1",
    "reward_input": "easyr1",
    "completion": "verifiers",
    "args sample": "slime",
    "args samples": "slime",
    "response label": "slime",
    "ground_truth response": "nemo_rl",
    "prompt completions completion_ids": "areal",
}


def load(spec: str) -> Reward:
    """Return the reward function of a text on the command line.

    "math", "numeric", "exact", "boxed" (numeric on the content of the last box), followed by ":COLUMN" where
    the answer is not in the column `answer`: a path such as "math:reward_model.ground_truth"; "format" (a
    box) and "tags". "task:NAME": the built-in task's verifier. "path/file.py:function" and
    "package.module:function", also "file.py:Class.method": a function of yours, installed or in the working
    directory. A factory is called with literal arguments: "file.py:cosine(max_len=512)",
    "numeric(boxed=True)".

    A function that is not written for TRL has its library first: "verl:", "openrlhf:", "lightrft:",
    "areal:", "nemo_rl:", "easyr1:", "slime:" or "verifiers:" (see `reward.foreign`), and ":COLUMN" last where
    the answer has another column than there.
    "messages:" and "text:" give a function prompts and completions in that form, whatever the data has.

    "https://HOST/score", or several with commas between them: what servers say, with the options of
    `served_at` as arguments.

    ValueError, with the remedy, for a wrong spec; errors of the file itself are passed on with its name.
    """
    named = split(spec, _NAMED, ADAPTERS, _SOURCES)
    return _adapt(named, _function(named, _SOURCES))


def parse(specs: Sequence[str], sources: Mapping[str, Source] | None = None) -> Weighted:
    """Return the weighted sum of the rewards on a command line.

    Each spec is as in `load`, followed by =WEIGHT if that is not 1. `parse(["boxed", "format=0.1"])`. The
    parts are called by their functions: "accuracy" for "path/file.py:accuracy"; where two have the same name,
    by file and function. Only a number after the last "=" is a weight, so a path or a URL may hold one (one
    that ends in "=2" needs another "=1"). ValueError for no reward, and for one that is named twice.

    "[COLUMN=VALUE]SPEC" is a reward for the rows with that value in a column; with another value the same
    spec may have another weight: `parse(["[label=math]boxed=0.9", "[label=chat]boxed=0.1"])`.

    `sources` make the rewards that are no functions, by the first word of their specs: with {"model": make},
    "model:FOLDER(budget=512)" is `make("FOLDER", budget=512)`.
    """
    if not specs:
        raise ValueError("reward: expected at least one, got none")
    weights: dict[str, Weight] = {}
    for spec in specs:
        _add(weights, spec)

    # functions first: a made one brings its name
    known = {**_SOURCES, **(sources or {})}
    parts = [split(text, _NAMED, ADAPTERS, known) for text in weights]
    functions = [_function(spec, known) for spec in parts]
    known_as = [_names(spec, fn) for spec, fn in zip(parts, functions, strict=True)]
    names = distinct(known_as)
    _check_given_names(parts, known_as, names)

    components: dict[str, tuple[Reward, Weight]] = {}
    for name, spec, fn in zip(names, parts, functions, strict=True):
        components[name] = (_adapt(spec, fn), weights[spec.text])
    return Weighted(components, specs=dict(zip(names, weights, strict=True)))


def _add(weights: dict[str, Weight], spec: str) -> None:
    """Add the weight of a spec. ValueError for a reward that is named twice for the same rows."""
    column, value, rest = split_rows(spec)
    text, number = split_weight(rest)
    weight: Weight = RowWeights(column, {value: number}) if column else number
    if text not in weights:
        weights[text] = weight
        return
    before = weights[text]
    if not isinstance(before, RowWeights) or not isinstance(weight, RowWeights):
        raise ValueError(f"reward {text!r}: expected it once, got it twice; give it one weight, NAME=WEIGHT")
    try:
        weights[text] = before.joined(weight)
    except ValueError as error:
        raise ValueError(f"reward {text!r}: {error}") from None


def _check_given_names(specs: Sequence[Spec], known_as: Sequence[Names], names: Sequence[str]) -> None:
    """Raise ValueError for a given name that another part has: vetoes and metrics would mean either.

    `known_as` are the names that the parts may have, and `names` those that they have.
    """
    # of a model, a judge or a server, in its arguments
    given = [(arguments(spec)[1].get("name") or None) if spec.target else None for spec in specs]
    for i, name in enumerate(given):
        if name is None:
            continue
        if given.count(name) > 1:
            raise ValueError(f"reward: expected different names, got name={name!r} twice")
        others = [*known_as[:i], *known_as[i + 1 :]]
        if name != names[i] or any(name in other for other in others):
            raise ValueError(f"reward: expected a name that no other reward has, got name={name!r}")


def _names(spec: Spec, fn: Any) -> Names:
    """Return the names of a reward; a function that a factory made has the name that it was given."""
    own = fn.name if isinstance(fn, Reward) else getattr(fn, "__name__", _NAMELESS)
    if spec.target and own != _NAMELESS:
        return Names(own, spec.long)
    if spec.call is None or not spec.name or own == _NAMELESS:
        return Names(spec.short, spec.long)
    return Names(own, f"{spec.long}:{own}")


def _function(spec: Spec, sources: Mapping[str, Source]) -> Any:
    """Return the function, the rubric or the model that the spec names before its adapter."""
    if spec.target:
        return _made_by(sources[spec.source], spec)
    if spec.source in _NAMED and not spec.name:
        return _make(spec, _NAMED[spec.source])
    if spec.source == "task":
        return verifiable.task(spec.name)
    return _find(spec, [*sources, *ADAPTERS, "task"])


def _made_by(source: Source, spec: Spec) -> Reward:
    """Return the reward of a source. ValueError where it refuses the target or the arguments."""
    places, named = arguments(spec)
    no_secret(f"reward {shown(spec.target)!r}", spec.target, _TOKEN)
    try:
        return source(spec.target, *places, **named)
    except (TypeError, ValueError) as error:
        text = shown_without_secrets(spec.text)
        raise ValueError(f"reward {text!r}: {error}") from error


def _adapt(spec: Spec, fn: Any) -> Reward:
    """Return the function as a reward function of this library."""
    if not spec.adapter:
        return as_reward(fn)
    if spec.column and spec.name:
        return ADAPTERS[spec.adapter](fn, spec.column)
    return ADAPTERS[spec.adapter](fn)


def _make(spec: Spec, factory: Callable[..., Any]) -> Any:
    """Call a factory with the arguments and the column. ValueError where it refuses them."""
    places, named = arguments(spec)
    if spec.column and not spec.name:
        if "column" not in inspect.signature(factory).parameters:
            raise ValueError(f"reward {spec.text!r}: {spec.source} reads no column")
        named["column"] = spec.column
    try:
        return factory(*places, **named)
    except TypeError as error:
        hint = f"; {spec.name}(...) is called once and has to return a reward, but {spec.name} is one itself"
        is_reward = "completions" in inspect.signature(factory).parameters
        raise ValueError(f"reward {spec.text!r}: {error}{hint if is_reward else ''}") from error


def _find(spec: Spec, words: Sequence[str]) -> Any:
    """Return the function of a file or a module, or what its factory makes.

    ValueError for what is neither; it names the one of `words` that was perhaps meant in place of a module.
    """
    if spec.column and spec.adapter in _OWN_COLUMNS:
        raise ValueError(
            f"reward {spec.text!r}: expected no column, the function names those that it reads, got "
            f"{spec.column!r}"
        )
    try:
        module = find_module(spec.source, spec.text)
    except ValueError as error:
        for word in get_close_matches(spec.source, words, n=1):
            error.add_note(f"did you mean {spec.text.replace(spec.source, word, 1)!r}?")
        raise
    fn: Any = module
    for part in spec.name.split("."):
        fn = getattr(fn, part, None)
    if fn is None:
        functions = ", ".join(n for n, x in vars(module).items() if inspect.isfunction(x)) or "none"
        raise ValueError(f"reward {spec.text!r}: no {spec.name!r} in the file; its functions: {functions}")

    # without arguments it is the reward itself
    if spec.adapter == "verifiers" and not isinstance(fn, type) and spec.call is None:
        return fn  # an object, which need not be a function
    if not callable(fn):
        raise ValueError(f"reward {spec.text!r}: {spec.name!r} is {type(fn).__name__}, not a function")
    if spec.call is None:
        _check_convention(spec, fn)
        return fn

    # with arguments it makes the reward; those of verl and NeMo-RL are further ones of the function itself
    if spec.adapter in _FURTHER:
        places, named = arguments(spec)
        if places:
            raise ValueError(
                f"reward {spec.text!r}: expected NAME=VALUE, as in {_FURTHER[spec.adapter]}, got "
                f"{places[0]!r} alone"
            )
        return partial(fn, **named)
    made = _make(spec, fn)
    if not callable(made) and spec.adapter != "verifiers":
        raise ValueError(
            f"reward {spec.text!r}: expected a call that makes a reward function, got {type(made).__name__}"
        )
    return made


def _check_convention(spec: Spec, fn: Callable[..., Any]) -> None:
    """Raise ValueError for a class, a factory or another library's function."""
    if isinstance(fn, type):
        raise ValueError(f"reward {spec.text!r}: {spec.name!r} is a class; call it: {spec.text}()")
    if spec.adapter not in _OWN_COLUMNS:
        return

    # a method of an object, which is to be made first
    names = [p.name for p in parameters(fn)]
    if "." in spec.name and names[:1] == ["self"]:
        owner = spec.name.rpartition(".")[0]
        raise ValueError(
            f"reward {spec.text!r}: {spec.name!r} is a method of an object of {owner}"
            + _wrapper(spec, fn, names[1:], owner)
        )

    # a function of completions, or else the advice for the kind that it seems to be
    if "completions" in names and not {"prompt", "completion_ids"} <= set(names):
        return
    for name, adapter in _FOREIGN.items():
        if not set(name.split()) <= set(names) or (name == "completion" and set(names) - _OF_VERIFIERS):
            continue
        raise ValueError(
            f"reward {spec.text!r}: it takes {name.replace(' ', ' and ')}, as functions for {adapter} do; "
            f"write {adapter}:{spec.text}"
        )
    if not takes_all(fn) and not set(names) & set(GIVEN):
        example = ", ".join(f"{name}=..." for name in names)
        raise ValueError(
            f"reward {spec.text!r}: expected a function of completions, got one of ({', '.join(names)}); if "
            f"it makes reward functions, call it: {spec.text}({example})" + _wrapper(spec, fn, names)
        )


_RESPONSES = (
    "response", "completion", "solution", "prediction", "pred", "output", "generated_text", "text",
)  # fmt: skip
_OF_VERIFIERS = {"prompt", "completion", "answer", "state", "info", "task", "parser"}


def _wrapper(spec: Spec, fn: Callable[..., Any], names: Sequence[str], owner: str = "") -> str:
    """Return the advice to wrap a function of responses in three lines; "" for one of something else."""
    response = next((x for x in names if x in ("completions", *_RESPONSES)), "")
    if not response:
        return ""
    module = Path(spec.source).stem
    name = f"{owner}().{spec.name.rpartition('.')[2]}" if owner else spec.name
    waits, define = ("await ", "async def") if inspect.iscoroutinefunction(fn) else ("", "def")
    columns = [x for x in names if x != response and x not in GIVEN]
    if response == "completions":
        inside = ", ".join(f"{x}={x}" for x in [response, *columns])
        body = f"return {waits}{name}({inside})"
    else:
        inside = ", ".join([f"{response}=c", *(f"{x}={x}[i]" for x in columns)])
        body = f"return [{waits}{name}({inside}) for i, c in enumerate(completions)]"
    given = ", ".join(["completions", *columns, "**_"])
    return (
        f"; or write three lines into a file beside it: `from {module} import "
        f"{(owner or name).split('.')[0]}`, `{define} reward({given}):`, `    {body}`"
    )


# ---------- rewards by a column of the data: each kind of row has its rewards and weights


def by_column(column: str, recipes: Mapping[str, Weighted | Mapping[str, float]]) -> Weighted:
    """Return one score of several: a row is scored by the recipe for its value in `column`.

    A recipe is a `Weighted`, or weights by the specs of `load`:

        by_column("label", {"gsm8k": {"numeric": 0.9, "format": 0.1}, "chat": weighted(length=(length, 1.0))})

    A reward that several recipes share is called once, for the rows of all of them. A row with another value
    has no reward, and is an error when it is scored. ValueError for no recipe, for two rewards with one name,
    and for a recipe with vetoes or weights by a column.
    """
    if not recipes:
        raise ValueError("by_column: expected at least one recipe, got none")
    components: dict[str, tuple[Any, RowWeights]] = {}
    loaded: dict[str, Weighted] = {}
    specs: dict[str, str] = {}
    for value, recipe in recipes.items():
        for name, fn, weight, spec in _parts(column, str(value), recipe, loaded):
            if name in components and components[name][0].fn is not fn.fn:
                raise ValueError(
                    f"by_column: expected rewards with names that differ, got two that are called {name!r}"
                )
            own = RowWeights(column, {str(value): weight})
            if name in components:
                own = components[name][1].joined(own)
            components[name] = (fn, own)
            specs[name] = spec
    return Weighted(components, specs=specs)


def _parts(
    column: str, value: str, recipe: Weighted | Mapping[str, float], loaded: dict[str, Weighted]
) -> list[tuple[str, Any, float, str]]:
    """Return (name, reward, weight, spec) of each part of a recipe; each spec is loaded once."""
    parts = []
    if isinstance(recipe, Weighted):
        if recipe.vetoes:
            raise ValueError(f"by_column: {column} {value!r}: expected vetoes of the whole, got its own")
        for name, (fn, weight) in recipe.components.items():
            if isinstance(weight, RowWeights):
                raise ValueError(f"by_column: {column} {value!r}: expected numbers as weights, got {weight}")
            parts.append((name, fn, weight, recipe.specs.get(name, name)))
        return parts
    for spec, weight in recipe.items():
        if spec not in loaded:
            loaded[spec] = parse([spec])
        for name, (fn, _) in loaded[spec].components.items():
            parts.append((name, fn, weight, spec))
    return parts
