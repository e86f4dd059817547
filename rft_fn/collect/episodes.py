"""Calls of an environment: many at once where they can be awaited, in a limit of time, checked."""

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import dist
from rft_fn.check import error_text
from rft_fn.data.messages import Turn
from rft_fn.engine.time_limit import time_limit
from rft_fn.environment import Environment, as_messages
from rft_fn.reward import Judged
from rft_fn.reward.calling import EventLoop
from rft_fn.types import Rollout, Sampling, Strategy

__all__ = ["Act", "Acted", "Conversation", "Played", "act_together", "assembled", "read_reset", "read_step"]


# ---------- calls of an environment: many at once where they can be awaited, in a limit of time, checked


_LOOP = EventLoop()  # one for all, since the clients of an environment belong to the loop they were made in


class Act(NamedTuple):
    """One call of an environment."""

    name: str  # for errors: the environment, the row and the turn
    call: Callable[[], Any]  # gives the result, or an awaitable of it
    read: Callable[[Any], tuple[Any, "Acted"]]  # the result as (the new state, what all ranks learn of it)


class Acted(NamedTuple):
    """What comes of a call, one entry per seat."""

    observations: list[list[Turn]]
    rewards: list[float]
    done: bool
    seat: int  # that speaks next


class _Answer(NamedTuple):
    """The answer of one rank to the others."""

    found: list[Acted]
    error: str  # what went wrong, in a line; "" for nothing


def act_together(
    strategy: Strategy, env: Environment, acts: Sequence[Act], *, timeout: float
) -> tuple[list[Any], list[Acted]]:
    """(the new states of this rank's acts, what came of the acts of all ranks in their order).

    Acts that give awaitables are awaited together; `timeout` [s] limits all acts of a rank. Nothing is
    changed if one fails: ValueError, or TimeoutError, with one line that names the environment, the row and
    the turn, on every rank. Called by all ranks alike.
    """
    states: list[Any] = []
    found: list[Acted] = []
    failed: Exception | None = None
    line = ""
    running = _Running("")
    try:
        limit = time_limit(timeout, lambda: running.name)
        with strategy.session.phase(f"environment {env.name}"), limit:
            for state, acted in _results(acts, running):
                states.append(state)
                found.append(acted)
    except (Exception, SystemExit) as error:  # raised below, once the others know
        failed = _as_one_line(error, running.name)
        line = str(failed)

    everyone = [_Answer(found, line)]
    if strategy.world > 1:
        with strategy.session.phase(f"gather of environment {env.name}"):
            everyone = dist.all_gather_object(everyone[0])
    if failed is not None:
        raise failed
    for rank, answer in enumerate(everyone):
        if answer.error:
            raise ValueError(f"rank {rank}: {answer.error}")
    return states, [acted for answer in everyone for acted in answer.found]


class _Running:
    """The name of the act that runs, which the clock's line and errors take."""

    def __init__(self, name: str):
        self.name = name


def _as_one_line(error: BaseException, name: str) -> Exception:
    """The error with the act's name before it."""
    if isinstance(error, _Failed):
        return _as_one_line(error.error, error.name)
    text = error_text(error)
    if isinstance(error, TimeoutError) and text.startswith(name):
        return TimeoutError(text)
    made = ValueError(f"{name}: {type(error).__name__}: {text}")
    if isinstance(error, _Wrong):
        made = ValueError(f"{name}: {text}")
    made.__cause__ = error
    return made


class _Failed(Exception):
    """An awaitable raised; others may have, or be cancelled, before the error is looked at."""

    def __init__(self, name: str, error: BaseException):
        super().__init__(error_text(error))
        self.name = name
        self.error = error


class _Wrong(ValueError):
    """A result that an environment may not give."""


def _results(acts: Sequence[Act], running: _Running) -> list[tuple[Any, Acted]]:
    """What each act gives, read."""
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

    found = []
    for act, result in zip(acts, results, strict=True):
        running.name = act.name
        found.append(act.read(result))
    return found


async def _all(calls: Sequence[Awaitable[Any]], names: Sequence[str], running: _Running) -> list[Any]:
    """The results of awaitables that run together; `running` is the first that has not ended."""
    left = list(names)
    running.name = left[0]

    async def one(call: Awaitable[Any], name: str) -> Any:
        try:
            result = await call
        except (Exception, SystemExit) as error:
            raise _Failed(name, error) from error
        left.remove(name)
        if left:
            running.name = left[0]
        return result

    return list(await asyncio.gather(*map(one, calls, names)))


# ---------- what an environment gives


def read_reset(env: Environment, result: Any) -> tuple[Any, Acted]:
    """The result of `reset` as (the state, what all ranks learn of it)."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise _Wrong(f"expected (state, observation) from reset, got {result!r:.80}")
    state, observation = result
    return state, Acted(_observations(env, observation), [0.0] * env.seats, False, _seat(env, state))


def read_step(env: Environment, result: Any) -> tuple[Any, Acted]:
    """The result of `step` as (the state, what all ranks learn of it)."""
    if not isinstance(result, tuple) or len(result) != 4:
        raise _Wrong(f"expected (state, observation, reward, done) from step, got {result!r:.80}")
    state, observation, reward, done = result
    if not isinstance(done, bool):
        raise _Wrong(f"expected True or False as done, got {done!r:.80}")
    rewards = [reward]
    if env.seats > 1:
        rewards = _per_seat(env, "rewards", reward)
    for x in rewards:
        if isinstance(x, bool) or not isinstance(x, numbers.Real) or not math.isfinite(x):
            raise _Wrong(f"expected a finite number as the reward, got {x!r:.80}")
    seat = 0
    if not done:
        seat = _seat(env, state)
    return state, Acted(_observations(env, observation), [float(x) for x in rewards], done, seat)


def _seat(env: Environment, state: Any) -> int:
    """The seat that speaks next."""
    seat = env.seat(state)
    if seat not in range(env.seats):
        raise _Wrong(f"expected a seat below {env.seats}, got {seat!r:.80}")
    return seat


def _observations(env: Environment, observation: Any) -> list[list[Turn]]:
    """The messages for each seat."""
    each = [observation]
    if env.seats > 1:
        each = _per_seat(env, "observations", observation)
    try:
        return [as_messages(x) for x in each]
    except ValueError as error:
        raise _Wrong(str(error)) from None


def _per_seat(env: Environment, what: str, values: Any) -> list[Any]:
    """The values for all seats."""
    if not isinstance(values, (list, tuple)) or len(values) != env.seats:
        raise _Wrong(f"expected {env.seats} {what}, one for each seat, got {values!r:.80}")
    return list(values)


# ---------- conversations while they are sampled, and the rollout that they make in the end


@dataclass
class Conversation:
    """What one seat has read and said: B of them make a rollout."""

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
    spoke_at: int = 0  # the place of the first token of the last of them
    last_token: int = -1  # the place of its last token; -1 before the first turn
    unfinished: int = 0  # turns of them that the limit of a response cut off
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
        """Put a reward on the last token that was sampled, if there is one yet."""
        self.total += reward
        if self.turns:
            self.rewards.append((self.last_token, reward))

    def observe(self, messages: Iterable[Turn]) -> None:
        """Take messages, which become tokens when the policy speaks next."""
        found = list(messages)
        self.messages += found
        self.unread += found


class Played(NamedTuple):
    """Whole conversations: B = N G rows, the G samples of one prompt and seat side by side.

    N counts prompts times seats: prompt 0 as seat 0, prompt 0 as seat 1, prompt 1 as seat 0 ...
    """

    rollout: Rollout  # mask: what the policy sampled; truncated: ended by a limit
    reward: Tensor  # [N, G] of the whole conversation
    token_reward: Tensor  # [B, S] that of each turn, on its last sampled token; 0 elsewhere
    prompts: list[Any]  # N, whose conversations they are
    talks: list[list[Turn]]  # B, to be read
    texts: list[str]  # B, what the policy said
    numbers: dict[str, Tensor]  # name -> [B] float32: turns, cut_by_turns, cut_by_tokens, unfinished

    def judged(self) -> Judged:
        """The rewards as those of any rollout, with the conversations to be read."""
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
    """The rollout of conversations in the order of (prompt, sample, seat); cuts [B] name the limits met."""
    order = sorted(range(len(rows)), key=lambda b: (rows[b].prompt, rows[b].seat, rows[b].sample))
    rows = [rows[b] for b in order]
    cuts = [cuts[b] for b in order]
    groups = len(prompts) * seats
    size = max(len(row.tokens) for row in rows)

    # right-padded; whatever is no token of the policy is 0 but for the tokens
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
