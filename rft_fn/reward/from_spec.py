"""Rewards by their texts on the command line.

    [COLUMN=VALUE][LIBRARY:]SOURCE[:NAME][:COLUMN][(ARGUMENTS)][=WEIGHT]

One way through: `_read` cuts a text into its parts, `_found` finds or makes what they name, `_adapted` makes
a `Reward` of it by the convention of its library, and `parse` names and weights several.
"""

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn.data import reasoning_gym
from rft_fn.reward import unit_tests, verifiable
from rft_fn.reward.combine import Weighted
from rft_fn.reward.connection import shown
from rft_fn.reward.foreign import CONVENTIONS, OURS, Convention
from rft_fn.reward.remote import TOKEN_ENV, served_at
from rft_fn.reward.reward_record import Reward, parameters, takes_all
from rft_fn.reward.row_weights import RowWeights, Weight
from rft_fn.reward.signature import GIVEN
from rft_fn.text import no_secret, shown_without_secrets
from rft_fn.user_files import find_module

__all__ = ["HELD", "Source", "by_column", "load", "parse"]


Source = Callable[..., Reward]
"""Makes the reward of a spec SOURCE:TARGET(ARGUMENTS): a model, a judge, a server.

It is called with the target and the literal arguments of the spec. The part has the reward's own name, if
there is one. ValueError for a target or an argument that it cannot take; the line then begins with the spec.
"""


_NAMED: dict[str, Callable[..., Reward]] = {
    "math": verifiable.math,
    "numeric": verifiable.numeric,
    "boxed": partial(verifiable.numeric, boxed=True),
    "exact": verifiable.exact,
    "format": verifiable.boxed_format,
    "tags": verifiable.tag_format,
    reasoning_gym.SOURCE: verifiable.reasoning_gym_score,
    "code": unit_tests.code,
}

_SOURCES: dict[str, Source] = {"http": served_at, "https": served_at}
"""The sources that need nothing of a run."""

_TOKEN = f"a token belongs into the environment variable {TOKEN_ENV}, or into the one that token_env names"

_NAMELESS = ("", "<lambda>")  # names of a function without one

HELD = "@held"
"""The end of the text, and of the name, of a reward that is watched and never learned."""


def load(spec: str) -> Reward:
    """Return the reward function of a text on the command line.

    "math", "numeric", "exact", "boxed" (numeric on the content of the last box), followed by ":COLUMN" where
    the answer is not in the column `answer`: a path such as "math:reward_model.ground_truth"; "format" (a
    box) and "tags"; "code:COLUMN", the unit tests in a column. "task:NAME": the built-in task's verifier;
    "reasoning_gym": the scorer of a row of that package. "path/file.py:function" and
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
    parts = _read(spec, _SOURCES)
    return _adapted(parts, _found(parts, _SOURCES))


def parse(specs: Sequence[str], sources: Mapping[str, Source] | None = None) -> Weighted:
    """Return the weighted sum of the rewards on a command line.

    Each spec is as in `load`, followed by =WEIGHT if that is not 1. `parse(["boxed", "format=0.1"])`. The
    parts are called by their functions: "accuracy" for "path/file.py:accuracy"; where two have the same name,
    by file and function. Only a number after the last "=" is a weight, so a path or a URL may hold one (one
    that ends in "=2" needs another "=1"). ValueError for no reward, and for one that is named twice.

    "[COLUMN=VALUE]SPEC" is a reward for the rows with that value in a column; with another value the same
    spec may have another weight: `parse(["[label=math]boxed=0.9", "[label=chat]boxed=0.1"])`.

    "SPEC@held" is watched and never learned: a part "NAME@held" that is in no sum, and decides no veto.

    `sources` make the rewards that are no functions, by the first word of their specs: with {"model": make},
    "model:FOLDER(budget=512)" is `make("FOLDER", budget=512)`.
    """
    if not specs:
        raise ValueError("reward: expected at least one, got none")
    weights: dict[str, Weight] = {}
    for spec in specs:
        _add(weights, spec)

    known = {**_SOURCES, **(sources or {})}
    components: dict[str, tuple[Reward, Weight]] = {}
    texts: dict[str, str] = {}
    for end in ("", HELD):
        own = [text for text in weights if text.endswith(HELD) == bool(end)]
        parts = [_read(text.removesuffix(HELD), known) for text in own]
        found = [_found(spec, known) for spec in parts]
        names = _distinct(parts, [_names(spec, x) for spec, x in zip(parts, found, strict=True)])
        for name, text, spec, x in zip(names, own, parts, found, strict=True):
            reward = _adapted(spec, x)
            components[name + end] = (replace(reward, held=True) if end else reward), weights[text]
            texts[name + end] = text
    return Weighted(components, specs=texts)


def _add(weights: dict[str, Weight], spec: str) -> None:
    """Add the weight of a spec. ValueError for a reward that is named twice for the same rows."""
    column, value, rest = _split_rows(spec)
    text, number = _split_weight(rest)
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


def _split_rows(spec: str) -> tuple[str, str, str]:
    """Return (column, value, rest) of [COLUMN=VALUE]REST, for some rows; ("", "", spec) of any other."""
    if not spec.startswith("["):
        return "", "", spec
    match = re.fullmatch(r"\[(?P<column>[^=\]]+)=(?P<value>[^\]]*)\](?P<rest>.+)", spec)
    if match is None:
        raise ValueError(f"reward {spec!r}: expected [COLUMN=VALUE]NAME, for the rows with that value")
    return match["column"], match["value"], match["rest"]


def _split_weight(spec: str) -> tuple[str, float]:
    """Return (name, weight) of NAME=WEIGHT; the weight is 1 where there is none."""
    name, equals, weight = spec.rpartition("=")
    if spec.endswith(HELD):
        return spec, 0.0
    if not equals or spec.endswith(")"):  # the "=" is one of an argument
        return spec, 1.0
    if name.endswith(HELD):
        raise ValueError(f"reward {spec!r}: expected no weight for a reward that is held, got {weight!r}")
    try:
        return name, float(weight)
    except ValueError:
        pass

    # the rest of the path follows an "=" within a path, and a word of the query one within a URL
    if ":" in weight or "/" in weight or "://" in spec:
        return spec, 1.0
    raise ValueError(f"reward {spec!r}: expected NAME=WEIGHT with a number, got {weight!r}")


class Spec(NamedTuple):
    """The parts of a text."""

    text: str  # all of it
    source: str  # "math", "task", path/file.py or package.module, or the first word of a source
    convention: Convention = OURS  # of the function
    name: str = ""  # the function, Class.method, or the task; "" for the named ones
    column: str = ""  # of the answer; "" where none is named
    target: str = ""  # a folder or an address, of a model, a judge or a server
    call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None  # its arguments; None without parentheses


def _read(text: str, sources: Collection[str]) -> Spec:
    """Return the parts of a text. ValueError for any other text.

    `sources` are the first words of rewards that are no functions.
    """
    target, call = _split_call(text)

    # a model, a judge or a server, and where it is
    word, colon, rest = target.partition(":")
    if colon and word in sources:
        if not rest.strip("/"):
            raise ValueError(f"reward {text!r}: expected {word}:TARGET, got nothing behind {word!r}")
        whole = target if rest.startswith("//") else rest  # an address, whole
        return Spec(text, word, target=whole, call=call)

    # a named reward, a task, or the function of a file or a module, perhaps of another library
    convention = OURS
    if word in CONVENTIONS:
        convention, target = CONVENTIONS[word], rest
        word, _, rest = target.partition(":")
    if word in _NAMED:
        return Spec(text, word, convention, column=rest, call=call)
    if word == "task" and call is None:
        return Spec(text, word, convention, name=rest)
    match = re.fullmatch(r"(?P<source>.+\.py|[\w.]+):(?P<name>\w+(?:\.\w+)*)(?::(?P<column>.+))?", target)
    if match is None or (match["column"] and call):
        known = ", ".join(_NAMED)
        raise ValueError(
            f"reward {text!r}: expected one of {known}, task:NAME, path/file.py:function, "
            "package.module:function, model:FOLDER, judge:FOLDER or https://HOST/PATH"
        )
    return Spec(text, match["source"], convention, match["name"], match["column"] or "", call=call)


def _split_call(text: str) -> tuple[str, tuple[tuple[Any, ...], Mapping[str, Any]] | None]:
    """Return (the text before the arguments, the arguments or None). ValueError for others than literals."""
    if not text.endswith(")"):
        return text, None
    for opening in re.finditer(r"(?<=\w)\(", text):  # a path may have parentheses too
        try:
            tree = ast.parse("f" + text[opening.start() :], mode="eval").body
        except SyntaxError:
            continue
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            return text[: opening.start()], _arguments(text, tree)
    raise ValueError(f"reward {text!r}: expected NAME(arguments), got parentheses that are no call")


def _arguments(text: str, call: ast.Call) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return (positional, keyword) arguments of a call. ValueError for one that is no literal."""
    named: dict[str, Any] = {}
    try:
        places = tuple(ast.literal_eval(x) for x in call.args)
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError
            named[keyword.arg] = ast.literal_eval(keyword.value)
    except ValueError:
        raise ValueError(
            f"reward {text!r}: expected arguments that are literals, such as 0.5, 'text', [1, 2] or "
            f"True, got {ast.unparse(call)[1:]}"
        ) from None
    return places, named


def _found(spec: Spec, sources: Mapping[str, Source]) -> Any:
    """Return the function, the rubric or the reward that a text names, before its convention."""
    if spec.target:
        return _of_source(spec, sources[spec.source])
    if spec.source in _NAMED and not spec.name:
        factory = _NAMED[spec.source]
        if spec.column and "column" not in inspect.signature(factory).parameters:
            raise ValueError(f"reward {spec.text!r}: {spec.source} reads no column")
        return _called(spec, factory, **({"column": spec.column} if spec.column else {}))
    if spec.source == "task":
        return verifiable.task(spec.name)
    return _of_file(spec, [*sources, *CONVENTIONS, "task"])


def _of_source(spec: Spec, source: Source) -> Reward:
    """Return the reward of a source. ValueError where it refuses the target or the arguments."""
    no_secret(f"reward {shown(spec.target)!r}", spec.target, _TOKEN)
    places, named = spec.call or ((), {})
    try:
        return source(spec.target, *places, **named)
    except (TypeError, ValueError) as error:
        text = shown_without_secrets(spec.text)
        raise ValueError(f"reward {text!r}: {error}") from error


def _called(spec: Spec, factory: Callable[..., Any], **more: Any) -> Any:
    """Call a factory with the arguments. ValueError where it refuses them."""
    places, named = spec.call or ((), {})
    try:
        return factory(*places, **named, **more)
    except TypeError as error:
        hint = f"; {spec.name}(...) is called once and has to return a reward, but {spec.name} is one itself"
        is_reward = "completions" in inspect.signature(factory).parameters
        raise ValueError(f"reward {spec.text!r}: {error}{hint if is_reward else ''}") from error


def _of_file(spec: Spec, words: Sequence[str]) -> Any:
    """Return the function of a file or a module, or what its factory makes.

    ValueError for what is neither; it names the one of `words` that was perhaps meant in place of a module.
    """
    if spec.column and not spec.convention.has_answer:
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
    objects = spec.convention.takes_objects
    if objects and not isinstance(fn, type) and spec.call is None:
        return fn
    if not callable(fn):
        raise ValueError(f"reward {spec.text!r}: {spec.name!r} is {type(fn).__name__}, not a function")
    if spec.call is None:
        _check_convention(spec, fn)
        return fn

    # with arguments it makes the reward; those of verl and NeMo-RL are further ones of the function itself
    if spec.convention.further:
        places, named = spec.call
        if places:
            raise ValueError(
                f"reward {spec.text!r}: expected NAME=VALUE, as in {spec.convention.further}, got "
                f"{places[0]!r} alone"
            )
        return partial(fn, **named)
    made = _called(spec, fn)
    if not callable(made) and not objects:
        raise ValueError(
            f"reward {spec.text!r}: expected a call that makes a reward function, got {type(made).__name__}"
        )
    return made


def _adapted(spec: Spec, found: Any) -> Reward:
    """Return the reward of what was found, by the convention of its library."""
    if spec.column and spec.name:
        return spec.convention.adapt(found, spec.column)
    return spec.convention.adapt(found)


class _Names(NamedTuple):
    """The names that a reward may have."""

    short: str
    long: str


def _names(spec: Spec, found: Any) -> _Names:
    """Return the names of a reward; one that a factory made has the name that it was given."""
    own = found.name if isinstance(found, Reward) else getattr(found, "__name__", "")
    if spec.target:
        # without the query of an address, which may be long, and is no part of what is scored
        address = spec.target.startswith(f"{spec.source}://")
        target = spec.target.split("?")[0] if address else spec.target
        long = f"{spec.source}:{target.removeprefix(f'{spec.source}:')}"
        return _Names(spec.source if own in _NAMELESS else own, long)
    source = Path(spec.source).stem if spec.source.endswith(".py") else spec.source
    long = ":".join(part for part in (source, spec.name, spec.column) if part)
    if spec.call is not None and spec.name and own not in _NAMELESS:
        return _Names(own, f"{long}:{own}")
    return _Names(f"task:{spec.name}" if spec.source == "task" else spec.name or spec.source, long)


def _distinct(specs: Sequence[Spec], known_as: Sequence[_Names]) -> list[str]:
    """Return one name for each, all different: short, or long where two share it, or numbered.

    ValueError for a name that was given, and that another part has: vetoes and metrics would mean either.
    """
    short = [name.short for name in known_as]
    names: list[str] = []
    for name in known_as:
        base = name.long if short.count(name.short) > 1 else name.short
        # ":2" and so on, where even the long name is taken
        numbered = (f"{base}:{i}" for i in itertools.count(2))
        names.append(next(x for x in itertools.chain([base], numbered) if x not in names))

    # those of models, judges and servers may be given in their arguments
    given = [(spec.call[1].get("name") or None) if spec.target and spec.call else None for spec in specs]
    for i, name in enumerate(given):
        if name is None:
            continue
        if given.count(name) > 1:
            raise ValueError(f"reward: expected different names, got name={name!r} twice")
        others = [*known_as[:i], *known_as[i + 1 :]]
        if name != names[i] or any(name in other for other in others):
            raise ValueError(f"reward: expected a name that no other reward has, got name={name!r}")
    return names


def _check_convention(spec: Spec, fn: Callable[..., Any]) -> None:
    """Raise ValueError for a class, a factory or another library's function."""
    if isinstance(fn, type):
        raise ValueError(f"reward {spec.text!r}: {spec.name!r} is a class; call it: {spec.text}()")
    if spec.convention.has_answer:
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
    marked = [(mark, library) for library, known in CONVENTIONS.items() for mark in known.marks]
    for mark, library in marked:
        if not set(mark.split()) <= set(names) or (mark == "completion" and set(names) - _OF_VERIFIERS):
            continue
        raise ValueError(
            f"reward {spec.text!r}: it takes {mark.replace(' ', ' and ')}, as functions for {library} do; "
            f"write {library}:{spec.text}"
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
