"""Calls environments, many at once where they can be awaited, in a time limit; checks each result."""

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from rft_fn import dist
from rft_fn.border import is_ours
from rft_fn.data.messages import Turn
from rft_fn.engine.time_limit import time_limit
from rft_fn.environment import Environment, as_messages
from rft_fn.reward.event_loop import EventLoop
from rft_fn.text import error_text
from rft_fn.types import Strategy

__all__ = ["Act", "StepResult", "read_reset", "read_step", "step_environments"]


_LOOP = EventLoop()  # one for all, since the clients of an environment belong to the loop they were made in


class Act(NamedTuple):
    """One call of an environment."""

    name: str  # for errors: the environment, the row and the turn
    call: Callable[[], Any]  # gives the result, or an awaitable of it
    read: Callable[[Any], tuple[Any, "StepResult"]]  # the result -> (new state, what all ranks learn of it)


class StepResult(NamedTuple):
    """The result of a call, one entry per seat."""

    observations: list[list[Turn]]
    rewards: list[float]
    done: bool
    seat: int  # that speaks next


def step_environments(
    strategy: Strategy, env: Environment, acts: Sequence[Act], *, timeout: float
) -> tuple[list[Any], list[StepResult]]:
    """Return (the new states of this rank's acts, the results of all ranks' acts in their order).

    Acts that give awaitables are awaited together; `timeout` [s] limits all acts of a rank. Nothing is
    changed if one fails: ValueError, or TimeoutError, with one line that names the environment, the row and
    the turn, on every rank. Called by all ranks alike.
    """
    states: list[Any] = []
    results: list[StepResult] = []
    failed: Exception | None = None
    running = _Running("")
    try:
        limit = time_limit(timeout, lambda: running.name)
        with strategy.session.phase(f"environment {env.name}"), limit:
            for state, result in _results(acts, running):
                states.append(state)
                results.append(result)
    except BaseException as error:  # raised below, once the others know
        if is_ours(error):
            raise
        failed = _as_one_line(error, running.name)

    # of each rank: the results, and what went wrong in a line or ""
    everyone = [(results, str(failed or ""))]
    if strategy.world > 1:
        with strategy.session.phase(f"gather of environment {env.name}"):
            everyone = dist.all_gather_object(everyone[0])
    if failed is not None:
        raise failed
    for rank, (_, error) in enumerate(everyone):
        if error:
            raise ValueError(f"rank {rank}: {error}")
    return states, [result for answer, _ in everyone for result in answer]


class _Running:
    """The name of the act that runs, for errors and the time limit."""

    def __init__(self, name: str):
        self.name = name


def _as_one_line(error: BaseException, name: str) -> Exception:
    """Return the error with the act's name before it."""
    if isinstance(error, _Failed):
        return _as_one_line(error.error, error.name)
    text = error_text(error)
    if isinstance(error, TimeoutError) and text.startswith(name):
        return TimeoutError(text)
    kind = "" if isinstance(error, _Wrong) else f"{type(error).__name__}: "
    made = ValueError(f"{name}: {kind}{text}")
    made.__cause__ = error
    return made


class _Failed(Exception):
    """The error of one of several concurrent calls, with its name."""

    def __init__(self, name: str, error: BaseException):
        super().__init__(error_text(error))
        self.name = name
        self.error = error


class _Wrong(ValueError):
    """The error of a result that an environment may not give."""


def _results(acts: Sequence[Act], running: _Running) -> list[tuple[Any, StepResult]]:
    """Call all acts, and read their results."""
    results = []
    waiting: list[int] = []
    for i, act in enumerate(acts):
        running.name = act.name
        results.append(act.call())
        if inspect.isawaitable(results[i]):
            waiting.append(i)
    if waiting:
        awaited = _LOOP.run(_all([results[i] for i in waiting], [acts[i].name for i in waiting], running))
        for i, result in zip(waiting, awaited, strict=True):
            results[i] = result

    read = []
    for act, result in zip(acts, results, strict=True):
        running.name = act.name
        read.append(act.read(result))
    return read


async def _all(calls: Sequence[Awaitable[Any]], names: Sequence[str], running: _Running) -> list[Any]:
    """Await all calls together; `running` is the first that has not ended."""
    left = list(names)
    running.name = left[0]

    async def one(call: Awaitable[Any], name: str) -> Any:
        try:
            result = await call
        except BaseException as error:
            if is_ours(error):
                raise
            raise _Failed(name, error) from error
        left.remove(name)
        if left:
            running.name = left[0]
        return result

    return list(await asyncio.gather(*map(one, calls, names)))


def read_reset(env: Environment, result: Any) -> tuple[Any, StepResult]:
    """Read the result of `reset` as (the state, what all ranks learn of it)."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise _Wrong(f"expected (state, observation) from reset, got {result!r:.80}")
    state, observation = result
    return state, StepResult(_observations(env, observation), [0.0] * env.seats, False, _seat(env, state))


def read_step(env: Environment, result: Any) -> tuple[Any, StepResult]:
    """Read the result of `step` as (the state, what all ranks learn of it)."""
    if not isinstance(result, tuple) or len(result) != 4:
        raise _Wrong(f"expected (state, observation, reward, done) from step, got {result!r:.80}")
    state, observation, reward, done = result
    if not isinstance(done, bool):
        raise _Wrong(f"expected True or False as done, got {done!r:.80}")
    rewards = _per_seat(env, "rewards", reward) if env.seats > 1 else [reward]
    for x in rewards:
        if isinstance(x, bool) or not isinstance(x, numbers.Real) or not math.isfinite(x):
            raise _Wrong(f"expected a finite number as the reward, got {x!r:.80}")
    seat = 0 if done else _seat(env, state)
    return state, StepResult(_observations(env, observation), [float(x) for x in rewards], done, seat)


def _seat(env: Environment, state: Any) -> int:
    """Return the seat that speaks next."""
    seat = env.seat(state)
    if seat not in range(env.seats):
        raise _Wrong(f"expected a seat below {env.seats}, got {seat!r:.80}")
    return seat


def _observations(env: Environment, observation: Any) -> list[list[Turn]]:
    """Return the messages for each seat."""
    each = _per_seat(env, "observations", observation) if env.seats > 1 else [observation]
    try:
        return [as_messages(x) for x in each]
    except ValueError as error:
        raise _Wrong(str(error)) from None


def _per_seat(env: Environment, what: str, values: Any) -> list[Any]:
    """Return the values for all seats."""
    if not isinstance(values, (list, tuple)) or len(values) != env.seats:
        raise _Wrong(f"expected {env.seats} {what}, one for each seat, got {values!r:.80}")
    return list(values)
