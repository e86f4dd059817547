"""The built-in environments by name, and their prompts and lessons."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from rft_fn import rng
from rft_fn.data.dataset import Dataset
from rft_fn.data.prompts import Prompt, from_rows
from rft_fn.data.rows import Endless
from rft_fn.environment.guess_number import guess_number
from rft_fn.environment.record import Environment, as_messages
from rft_fn.reward import importing

__all__ = ["ENVIRONMENTS", "get_environment", "lessons", "prompts"]

ENVIRONMENTS: dict[str, Callable[[int], Environment]] = {
    "guess_number": guess_number,
}
"""Name -> a function that makes the environment of a level."""

_LONGEST = 8  # turns of a lesson


def get_environment(spec: str) -> Environment:
    """The environment NAME, NAME:LEVEL, or FILE.py:NAME, an Environment or a function that makes one.

    ValueError for one that does not exist.
    """
    source, _, name = spec.partition(":")
    if source.endswith(".py"):
        return _of_file(spec, source, name)
    if source not in ENVIRONMENTS:
        raise ValueError(
            f"environment: expected one of {', '.join(ENVIRONMENTS)}, or FILE.py:NAME, got {spec!r}"
        )
    if not (name or "1").isdigit() or int(name or "1") < 1:
        raise ValueError(f"environment: expected a level above 0 behind the colon, got {spec!r}")
    return ENVIRONMENTS[source](int(name or "1"))


def _of_file(spec: str, source: str, name: str) -> Environment:
    """The environment that a file defines."""
    found = getattr(importing.find(source, spec, kind="environment"), name or "environment", None)
    if inspect.isfunction(found):
        found = found()
    if not isinstance(found, Environment):
        raise ValueError(
            f"environment {spec!r}: expected an Environment, or a function that makes one, got "
            f"{type(found).__name__}"
        )
    return found


def prompts(env: Environment, tokenizer: Any, *, seed: int = 0, **options: Any) -> Dataset[Prompt]:
    """The rows of an environment as an endless data set.

    The options are those of `data.from_rows`; the template "{short}" is the terse form of a question.
    ValueError for an environment without rows.
    """
    if env.rows is None:
        raise ValueError(f"environment {env.name!r}: it has no rows of its own; give it data")
    rows = Endless(env.name, partial(env.rows, seed))
    return from_rows(rows, tokenizer, name=env.name, **options)


def lessons(env: Environment, seed: int, index: int) -> list[tuple[str, str]]:
    """(what stands before a response, the response) for each turn of an episode that the teacher plays.

    Texts of one seat for a model whose chat template is the bare text; `<end>` ends a response.
    """
    if env.rows is None or env.teacher is None:
        raise ValueError(f"environment {env.name!r}: it has no rows or no teacher to learn its form from")
    row = env.rows(seed, index)
    key = rng.fold_in(seed, "lesson", index)
    state, observed = env.reset(row, key)
    first = observed
    if env.seats == 1:
        first = [observed]

    # what each seat has read and said so far
    texts = ["".join(m["content"] for m in as_messages(x)) or row["short"] for x in first]
    found = []
    for turn in range(_LONGEST):
        seat = env.seat(state)
        response = env.teacher(state, rng.fold_in(key, turn))
        found.append((texts[seat], response))
        state, observed, _, done = env.step(state, response)
        texts[seat] += f"{response}<end>"
        if done:
            break
        if env.seats == 1:
            observed = [observed]
        for i, x in enumerate(observed):
            texts[i] += "".join(m["content"] for m in as_messages(x))
    return found
