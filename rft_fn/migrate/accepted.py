"""The part of a command that its script accepts, and a note for each argument that it refuses."""

import inspect
import re
import shlex
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

from rft_fn import parsing
from rft_fn.tools import scripts

__all__ = ["accepted"]

_MOST = 40  # arguments that a script may refuse


def accepted(script: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments that the script takes, each as "--NAME VALUE", and the others with its reasons.

    What it refuses without an argument to blame is under "".
    """
    kept = list(arguments)
    refused: dict[str, str] = {}
    for _ in range(_MOST):
        error = _refusal(script, kept)
        if not error:
            return kept, refused
        bad = _culprits(kept, error) or _first_refused(script, kept)
        if not bad:
            return kept, {**refused, "": error}
        kept = [argument for argument in kept if argument not in bad]
        refused |= dict.fromkeys(bad, error)
    return kept, refused


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


def _check(module: ModuleType, cfg: Any) -> None:
    """Raise ValueError for options that the script refuses when it starts, before data and models."""
    from dataclasses import replace

    from rft_fn import algorithm, check, engine
    from rft_fn.run import options
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
    make(cfg.algorithm, **{name: getattr(cfg, name) for name in names})


def _culprits(arguments: Sequence[str], error: str) -> list[str]:
    """Return the arguments that set an option which the line begins with: "a, b: expected X"."""
    head = error.partition(": expected")[0]
    names = re.split(r"[, ]+", head)
    if error.startswith("unrecognized"):
        names = re.findall(r"--[\w.-]+", error.partition(";")[0])
    wanted = {re.sub(r"^no_", "", _name(x)) for x in names}
    return [argument for argument in arguments if _name(argument.split()[0]) in wanted]


def _name(flag: str) -> str:
    """Return the name of an option without dashes, its part and its value: --strategy.no-fsdp is fsdp."""
    last = flag.lstrip("-").partition("=")[0].rpartition(".")[2].replace("-", "_")
    return last.removeprefix("no_")


def _first_refused(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the first argument without which the script takes the ones before it."""
    for k in range(1, len(arguments) + 1):
        if _refusal(script, arguments[:k]):
            return [arguments[k - 1]]
    return []
