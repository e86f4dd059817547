"""Episodes with an environment: its calls, the conversations, and the rollout that they make."""

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import dist
from rft_fn.border import is_ours
from rft_fn.data.messages import Turn
from rft_fn.engine.time_limit import time_limit
from rft_fn.environment import Environment, as_messages
from rft_fn.reward import Judged
from rft_fn.reward.event_loop import EventLoop
from rft_fn.text import error_text
from rft_fn.types import Rollout, Sampling, Strategy

__all__ = [
    "Act", "Conversation", "Played", "StepResult", "assembled", "read_reset", "read_step",
    "step_environments",
]  # fmt: skip


# ---------- calls of an environment: many at once where they can be awaited, in a limit of time


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


# ---------- what an environment gives


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


# ---------- conversations, and the rollout that they make


@dataclass
class Conversation:
    """The tokens that one seat has read and sampled: B conversations make a rollout."""

    prompt: int  # its number among the prompts
    sample: int
    seat: int
    key: int  # of the prompt
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # True where the policy sampled
    logp: list[float] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)  # (place of a token, what it earned)
    total: float = 0.0
    turns: int = 0  # that the policy took
    spoke_at: int = 0  # the place of the first token of the last turn
    last_token: int = -1  # the place of its last token; -1 before the first turn
    unfinished: int = 0  # turns that the limit of a response cut off
    version: int = 0  # the oldest of the weights that it was sampled with
    messages: list[Turn] = field(default_factory=list)  # to be read
    unread: list[Turn] = field(default_factory=list)  # observations that are not tokens yet

    def read(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy did not sample."""
        self.tokens += ids
        self.mask += [False] * len(ids)
        self.logp += [0.0] * len(ids)

    def say(self, ids: Sequence[int], logp: Sequence[float], *, version: int, cut: bool) -> None:
        """Add the tokens of one turn of the policy."""
        if not self.turns:
            self.version = version
        self.version = min(self.version, version)
        self.spoke_at = len(self.tokens)
        self.tokens += ids
        self.mask += [True] * len(ids)
        self.logp += logp
        self.last_token = len(self.tokens) - 1
        self.turns += 1
        self.unfinished += cut

    def earn(self, reward: float) -> None:
        """Add a reward to the last sampled token."""
        self.total += reward
        if self.turns:
            self.rewards.append((self.last_token, reward))

    def observe(self, messages: Sequence[Turn]) -> None:
        """Add messages, which become tokens before the policy's next turn."""
        self.messages += messages
        self.unread += messages


class Played(NamedTuple):
    """Whole conversations: B = N G rows, grouped by prompt and seat.

    N counts prompts times seats: prompt 0 as seat 0, prompt 0 as seat 1, prompt 1 as seat 0 ...
    """

    rollout: Rollout  # mask: what the policy sampled; truncated: ended by a limit
    reward: Tensor  # [N, G] of the whole conversation
    token_reward: Tensor  # [B, S] of each turn, on its last sampled token; 0 elsewhere
    prompts: list[Any]  # N
    talks: list[list[Turn]]  # B, to be read
    texts: list[str]  # B, what the policy said
    numbers: dict[str, Tensor]  # name -> [B] float32: turns, cut_by_turns, cut_by_tokens, unfinished

    def judged(self) -> Judged:
        """Return the rewards as `Judged`, with the conversations to be read."""
        shape = self.reward.shape
        metrics = {name: x.view(shape) for name, x in self.numbers.items()}
        return Judged(self.reward, {}, self.texts, metrics, {"conversation": self.talks})


def assembled(
    rows: Sequence[Conversation],
    prompts: Sequence[Any],
    cuts: Sequence[str],
    texts: Sequence[str],
    *,
    seats: int,
    pad: int,
    sampling: Sampling,
) -> Played:
    """Assemble the rollout, ordered by (prompt, seat, sample); cuts [B] name the limits met."""
    order = sorted(range(len(rows)), key=lambda b: (rows[b].prompt, rows[b].seat, rows[b].sample))
    rows = [rows[b] for b in order]
    cuts = [cuts[b] for b in order]
    groups = len(prompts) * seats
    size = max(len(row.tokens) for row in rows)

    # right-padded; all but the tokens is 0 outside mask
    tokens = torch.full((len(rows), size), pad)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    logp = torch.zeros(tokens.shape)
    token_reward = torch.zeros(tokens.shape)
    for b, row in enumerate(rows):
        length = len(row.tokens)
        tokens[b, :length] = torch.tensor(row.tokens)
        mask[b, :length] = torch.tensor(row.mask)
        logp[b, :length] = torch.tensor(row.logp)
        for place, reward in row.rewards:
            token_reward[b, place] += reward

    rollout = Rollout(
        tokens=tokens,
        mask=mask,
        logp=logp,
        length=torch.tensor([len(row.tokens) for row in rows]),
        truncated=torch.tensor([bool(cut) for cut in cuts]),
        group=torch.tensor([row.prompt * seats + row.seat for row in rows]),
        version=torch.tensor([row.version for row in rows]),
        sampling=sampling,
    )
    numbers = {
        "turns": [row.turns for row in rows],
        "cut_by_turns": [cut == "turns" for cut in cuts],
        "cut_by_tokens": [cut == "tokens" for cut in cuts],
        "unfinished": [row.unfinished for row in rows],
    }
    return Played(
        rollout=rollout,
        reward=torch.tensor([row.total for row in rows]).view(groups, -1),
        token_reward=token_reward,
        prompts=[prompt for prompt in prompts for _ in range(seats)],
        talks=[row.messages for row in rows],
        texts=[texts[b] for b in order],
        numbers={name: torch.tensor(x, dtype=torch.float32) for name, x in numbers.items()},
    )
