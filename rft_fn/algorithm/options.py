"""Options of one function, taken over by another."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

__all__ = ["with_options_of"]

R = TypeVar("R")


def with_options_of(
    source: Callable[..., Any], *names: str
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a function the options of another one.

    Decorates a function of `**options` to receive all options of `source`, with its defaults. Options are
    the keyword-only parameters, or those in `names`. They appear in the decorated signature, so a caller
    can look up which ones there are.
    """
    parameters = signature(source).parameters.values()
    if not names:
        names = tuple(p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY)

    # callers name options, whatever kind of parameter they are in `source`
    options = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in parameters if p.name in names]
    defaults = {p.name: p.default for p in options}

    def decorate(f: Callable[..., R]) -> Callable[..., R]:
        @wraps(f)
        def complete(*args: Any, **given: Any) -> R:
            return f(*args, **defaults | given)

        # `inspect.signature` reads this attribute
        own = [p for p in signature(f).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        complete.__dict__["__signature__"] = Signature([*own, *options])
        return complete

    return decorate
