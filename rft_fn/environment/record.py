"""The record of an environment, and the signatures of its functions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rft_fn.check import writable
from rft_fn.data.messages import Turn

__all__ = ["Environment", "Observation", "Reset", "Row", "Rows", "Step", "Stepped", "as_messages"]

Row = Mapping[str, Any]
"""The columns of one row of data, of which an episode is made."""

Observation = str | Sequence[Turn] | None
"""A text that the policy reads, or messages {"role", "content"}; None or "" for nothing."""


class Stepped(NamedTuple):
    """The result of one step; a plain tuple of these four will do."""

    state: Any
    observation: Any  # an Observation; with several seats one for each
    reward: Any  # a number; with several seats one for each
    done: bool


class Reset(Protocol):
    """Begins an episode."""

    def __call__(self, row: Row, key: int, /) -> Any:
        """(state, observation) at the beginning, or an awaitable of these.

        The observation is the prompt; None leaves it to the data set, whose prompt of this row is then the
        first thing that the policy reads. With several seats there is one for each. Everything random is
        drawn from `key`, which all samples of a prompt share.
        """
        ...


class Step(Protocol):
    """Moves an episode on by one response of the policy."""

    def __call__(self, state: Any, response: str, /) -> Any:
        """A `Stepped`, or an awaitable of one; steps that can be awaited run at the same time.

        `response` is the sampled text without special tokens. The state that was given stays as it is.
        """
        ...


class Seat(Protocol):
    """Tells whose turn it is."""

    def __call__(self, state: Any, /) -> int:
        """The number of the seat that responds next."""
        ...


class Rows(Protocol):
    """Makes the rows of an environment that needs no data."""

    def __call__(self, seed: int, index: int, /) -> dict[str, str]:
        """The row of these two numbers."""
        ...


class Teacher(Protocol):
    """Responds in the right form, so that a new model can be shown it."""

    def __call__(self, state: Any, key: int, /) -> str:
        """A response, drawn from `key`; its content need not be right."""
        ...


class Close(Protocol):
    """Frees what the state of an episode holds."""

    def __call__(self, state: Any, /) -> None: ...


def _first_seat(state: Any) -> int:
    """The seat of an environment with one."""
    return 0


def _nothing_to_close(state: Any) -> None:
    """Close a state that holds nothing."""


class Environment(NamedTuple):
    """Something that a policy acts in by text, as functions of an explicit state.

    With `seats` > 1 the policy plays all of them, each with tokens of its own: observations and rewards are
    sequences with one entry per seat.
    """

    name: str
    reset: Reset
    step: Step
    seats: int = 1
    seat: Seat = _first_seat
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas, for the chat template
    close: Close = _nothing_to_close
    rows: Rows | None = None  # its own data, where it has any
    teacher: Teacher | None = None
    tokens: tuple[str, ...] = ()  # texts that are one token each in a built-in model made for it
    warm_up: int = 20  # steps that such a model learns from the teacher, before reinforcement learning


def as_messages(observation: Observation) -> list[Turn]:
    """The messages of an observation; a text is a user's. Halves of surrogate pairs become U+FFFD.

    ValueError for anything that is neither text nor messages.
    """
    if observation is None or observation == "":
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": writable(observation)}]
    if not isinstance(observation, Sequence):
        raise ValueError(f"expected a text or messages to observe, got {observation!r:.80}")
    for message in observation:
        known = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not known or not isinstance(message.get("content"), str):
            raise ValueError(f"expected messages with role and content to observe, got {message!r:.80}")
    return [{**message, "content": writable(message["content"])} for message in observation]
