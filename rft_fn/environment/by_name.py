"""The built-in environments by name, and their prompts and lessons."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from rft_fn import rng
from rft_fn.data.dataset import Dataset
from rft_fn.data.messages import Turn
from rft_fn.data.prompts import Prompt, from_rows
from rft_fn.data.table import Endless
from rft_fn.environment.arithmetic import calculator
from rft_fn.environment.guess import guess_number
from rft_fn.environment.kuhn import kuhn_poker
from rft_fn.environment.record import Environment, Renderer, as_messages
from rft_fn.reward.event_loop import EventLoop
from rft_fn.user_files import find_module

__all__ = ["ENVIRONMENTS", "get_environment", "lessons", "prompts"]


ENVIRONMENTS: dict[str, Callable[[int], Environment]] = {
    "guess_number": guess_number,
    "calculator": calculator,
    "kuhn_poker": kuhn_poker,
}
"""Name -> a function that makes the environment of a level."""

_LONGEST = 8  # turns of a lesson


def get_environment(spec: str) -> Environment:
    """Return the environment NAME, NAME:LEVEL, or FILE.py:NAME, which may be a function that makes it.

    ValueError for one that does not exist.
    """
    source, _, name = spec.partition(":")
    if source.endswith(".py"):
        environment = getattr(find_module(source, spec, kind="environment"), name or "environment", None)
        if inspect.isfunction(environment):
            environment = environment()
        if not isinstance(environment, Environment):
            raise ValueError(
                f"environment {spec!r}: expected an Environment, or a function that makes one, got "
                f"{type(environment).__name__}"
            )
        return environment
    if source not in ENVIRONMENTS:
        raise ValueError(
            f"environment: expected one of {', '.join(ENVIRONMENTS)}, or FILE.py:NAME, got {spec!r}"
        )
    level = name or "1"
    if not (level.isascii() and level.isdigit()) or int(level) < 1:
        raise ValueError(f"environment: expected a level above 0 behind the colon, got {spec!r}")
    return ENVIRONMENTS[source](int(level))


def prompts(env: Environment, tokenizer: Any, *, seed: int = 0, **options: Any) -> Dataset[Prompt]:
    """Make of the rows of an environment an endless data set.

    The options are options of `data.from_rows`; the template "{short}" is the terse form of a question.
    ValueError for an environment without rows.
    """
    if env.rows is None:
        raise ValueError(f"environment {env.name!r}: expected rows of its own, got none; give it data")
    rows = Endless(env.name, partial(env.rows, seed), seed)
    return from_rows(rows, tokenizer, name=env.name, **options)


def lessons(env: Environment, renderer: Renderer, seed: int, index: int) -> list[tuple[list[int], list[int]]]:
    """Return (tokens before a response, tokens of the response) for each turn of an episode.

    The teacher plays it, on the row of these numbers. ValueError for an environment without rows or teacher.
    """
    if env.rows is None or env.teacher is None:
        raise ValueError(
            f"environment {env.name!r}: expected rows and a teacher to learn its form from, got none"
        )
    row = env.rows(seed, index)
    key = rng.fold_in(seed, "lesson", index)
    state, observed = _awaited(env.reset(row, key))
    asked = [{"role": "user", "content": row["short"]}]
    texts = [renderer.opening(messages or asked, env.tools) for messages in _each(env, observed)]
    unread: list[list[Turn]] = [[] for _ in texts]

    # what each seat has read and said so far
    exchanges = []
    for turn in range(_LONGEST):
        seat = env.seat(state)
        if unread[seat]:
            texts[seat] = [*texts[seat], *renderer.reply(texts[seat], unread[seat])]
            unread[seat] = []
        said = env.teacher(state, rng.fold_in(key, turn))
        ids = renderer.tokenizer.encode(said, add_special_tokens=False)
        response = [*ids, renderer.tokenizer.eos_token_id]
        exchanges.append((texts[seat], response))
        texts[seat] = [*texts[seat], *response]
        state, observed, _, done = _awaited(env.step(state, said))
        if done:
            break
        for i, messages in enumerate(_each(env, observed)):
            unread[i] += messages
    return exchanges


def _each(env: Environment, observed: Any) -> list[list[Turn]]:
    """Return the messages that each seat observes."""
    return [as_messages(x) for x in ([observed] if env.seats == 1 else observed)]


def _awaited(result: Any) -> Any:
    """Return the result of a call of an environment, awaited if need be."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return EventLoop().run(wait())
