"""The part of a command that its script accepts, and a note for each argument that it refuses."""

import dataclasses
import inspect
import re
import shlex
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from types import ModuleType, NoneType
from typing import get_args, get_type_hints

from rft_fn import limits, migrate, parsing
from rft_fn.run import options
from rft_fn.tools import scripts

__all__ = ["accepted"]


def accepted(script: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments that the script takes, each as "--NAME VALUE", and the others with its reasons.

    What is wrong with an option alone is found for all of them first, so that the script reads the rest once;
    again only where it refuses options that do not go together. What it refuses without an argument to blame
    is under "".
    """
    config = _script(script).Config
    refused = {x: why for x in arguments if (why := _alone(config, x))}
    kept = [x for x in arguments if x not in refused]
    while error := _refusal(script, kept):
        bad = _culprits(kept, error) or _first_refused(script, kept)
        if not bad:
            return kept, {**refused, "": error}
        kept = [argument for argument in kept if argument not in bad]
        refused |= dict.fromkeys(bad, error)
    return kept, refused


def _alone(config: type, argument: str) -> str:
    """Return why an option is refused whatever the others are; empty where it may be taken.

    That is a name that the script has not, and a text in the place of a number, or one outside its limits.
    """
    try:
        words = parsing.qualify(shlex.split(argument), config)
        migrate.check([words[0]], parsing.names(config))
    except ValueError as error:
        return " ".join(str(error).split())
    words = [x for word in words for x in (word.split("=", 1) if word.startswith("--") else [word])]
    starts = [k for k, word in enumerate(words) if re.match(r"--[a-z]", word)]
    options = [words[k:end] for k, end in zip(starts, [*starts[1:], len(words)])]
    return next((why for flag, *values in options if (why := _wrong(config, flag, values))), "")


def _wrong(config: type, flag: str, values: Sequence[str]) -> str:
    """Return what is wrong with one option; empty where it may be taken."""
    name = flag.removeprefix("--").replace("-", "_")
    part, _, last = name.rpartition(".")
    kind = get_type_hints(config).get(part) if part else config
    hints = get_type_hints(kind, include_extras=True) if dataclasses.is_dataclass(kind) else {}
    if not {last, last.removeprefix("no_")} & hints.keys():
        return f"unrecognized options: {' '.join([flag, *values])}"
    hint = hints.get(last, bool)
    kinds = [getattr(x, "__origin__", x) for x in (get_args(hint) if NoneType in get_args(hint) else [hint])]
    number = next((x for x in (int, float) if x in kinds), None)
    if number is None or len(values) != 1 or (NoneType in kinds and values == ["None"]):
        return ""
    try:
        x = number(values[0])
    except ValueError:
        what = "an integer" if number is int else "a number"
        return f"{name}: expected {what}{', or None' * (NoneType in kinds)}, got {values[0]!r}"
    try:
        limits.field(name if part in parsing.WHOLE else last, x, hint)
    except ValueError as error:
        return str(error)
    return ""


def _refusal(script: str, arguments: Sequence[str]) -> str:
    """Return the line by which a script refuses a command; empty where it accepts it."""
    module = _script(script)
    try:
        words = [word for argument in arguments for word in shlex.split(argument)]
        cfg = parsing.parse(module.Config, parsing.qualify(words, module.Config))
        _check(module, cfg)
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


@cache
def _script(name: str) -> ModuleType:
    return scripts.module(scripts.find(name))


def _check(module: ModuleType, cfg: options.Script) -> None:
    """Raise ValueError for options that the script refuses when it starts, before data and models."""
    from dataclasses import replace

    from rft_fn import algorithm, check, engine
    from rft_fn.run.cli import without

    own = getattr(module, "check", None)
    if own is not None and len(inspect.signature(own).parameters) == 1:
        own(cfg)
    passes = "data_epochs" if hasattr(cfg, "data_epochs") else "epochs"
    check.at_most_one(steps=cfg.steps, **{passes: getattr(cfg, passes)})
    if not hasattr(cfg, "temperature"):
        without(cfg.strategy, *options.ENGINE)
        return
    engine.check_config(engine.config_of(replace(cfg.strategy, engine_tp_size=1)))
    make = algorithm.configured_actor_critic if hasattr(cfg, "critic") else algorithm.configured
    names = [name for name in list(inspect.signature(make).parameters)[1:] if hasattr(cfg, name)]
    make(getattr(cfg, "algorithm", ""), **{name: getattr(cfg, name) for name in names})


def _culprits(arguments: Sequence[str], error: str) -> list[str]:
    """Return the arguments that set an option which the line begins with: "a, b: expected X"."""
    head = error.partition(": expected")[0]
    names = re.split(r"[, ]+", head)
    if error.startswith("unrecognized"):
        names = re.findall(r"--[\w.-]+", error.partition(";")[0])
        if not names:  # more words than an option takes
            words = set(error.partition(";")[0].partition(": ")[2].split(", "))
            return [argument for argument in arguments if words & set(shlex.split(argument)[2:])]
    wanted = {re.sub(r"^no_", "", _name(x)) for x in names}
    flags = {argument: re.findall(r"(?:^| )(--[a-z][\w.-]*)", argument) for argument in arguments}
    return [argument for argument in arguments if wanted & set(map(_name, flags[argument]))]


def _name(flag: str) -> str:
    """Return the name of an option without dashes, its part and its value: --strategy.no-fsdp is fsdp."""
    last = flag.lstrip("-").partition("=")[0].rpartition(".")[2].replace("-", "_")
    return last.removeprefix("no_")


def _first_refused(script: str, arguments: Sequence[str]) -> list[str]:
    """Return an argument with which the script refuses what it takes up to there, found by halving."""
    refused = bisect_left(
        range(1, len(arguments) + 1), True, key=lambda k: bool(_refusal(script, arguments[:k]))
    )
    return list(arguments[refused : refused + 1])
