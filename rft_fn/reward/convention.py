"""How a reward function is called: the form of prompts and completions, and the arguments that it may name.

The convention is TRL's (`GRPOTrainer` of trl 1.9): keyword arguments, lists with one value a completion, and
the form of the data. A prompt that is a list of messages has completions that are lists of messages.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "GIVEN", "Messages", "RewardFn", "TrainerState", "as_messages", "columns_of", "parameters", "taken",
    "takes_all", "text", "trainer_state",
]  # fmt: skip

RewardFn = Callable[..., Any]
"""(prompts, completions, **columns) -> one number a completion; `results.read` says what else it may be."""

Messages = Sequence[Mapping[str, Any]]
"""The turns of a conversation, each with a "role" and a "content"."""

GIVEN = (
    "prompts",  # texts, or lists of messages
    "completions",  # the same form; the response only
    "completion_ids",  # the tokens of each response
    "prompt_texts",  # the prompts as the model read them, special tokens included
    "trainer_state",
    "log_metric",  # log_metric(name, value): a number for the batch
    "log_extra",  # log_extra(column, values): one value a completion, for trajectories.jsonl
)
"""The arguments that a reward function may name; all other names are columns of the data."""


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands, by the names of transformers' TrainerState that reward functions read."""

    global_step: int = 0  # steps done
    max_steps: int = 1  # steps of the whole run
    epoch: float = 0.0  # passes over the data
    num_train_epochs: int = 1
    log_history: tuple[Mapping[str, float], ...] = ()
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


def trainer_state(step: int, total: int, *, prompts: int = 1, size: int | None = None) -> TrainerState:
    """The state after `step` of `total` steps, with so many prompts each, of a data set of that size.

    Without a size, as of a generator, all of the run is the first pass.
    """
    if size is None:
        return TrainerState(step, total, epoch=step / max(total, 1))
    return TrainerState(
        step, total, epoch=step * prompts / size, num_train_epochs=-(-total * prompts // size)
    )


def text(x: str | Messages) -> str:
    """The text of a prompt or a completion in either form: of messages, their contents, a line each."""
    if isinstance(x, str):
        return x
    return "\n".join(_content(message) for message in x)


def _content(message: Mapping[str, Any]) -> str:
    """The text of one message; content in parts is that of its parts with text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or ())


def as_messages(x: str | Messages, role: str) -> list[Any]:
    """A prompt or a completion as messages: a text is one of that role."""
    if isinstance(x, str):
        return [{"role": role, "content": x}]
    return list(x)


def parameters(fn: RewardFn) -> list[inspect.Parameter]:
    """The parameters of a function that have a name to the caller."""
    found = inspect.signature(fn).parameters.values()
    return [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def takes_all(fn: RewardFn) -> bool:
    """Whether a function takes any keyword."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(fn).parameters.values())


def columns_of(fn: RewardFn) -> tuple[str, ...]:
    """The columns that a reward function cannot do without.

    Those of its attribute `columns`; without one, its parameters without a default.
    """
    named = getattr(fn, "columns", None)
    if named is None:
        named = [p.name for p in parameters(fn) if p.default is p.empty]
    return tuple(name for name in named if name not in GIVEN)


def taken(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes: all if it takes **kwargs, else those that it names."""
    if takes_all(fn):
        return dict(given)
    return {p.name: given[p.name] for p in parameters(fn) if p.name in given}
