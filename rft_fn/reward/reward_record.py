"""A reward as a record: what a function, a model, a judge or a server becomes, once, before any batch.

`as_reward` looks at a function's signature and attributes; everything after it reads fields.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft_fn.reward.signature import GIVEN, JointReward, RewardFn

if TYPE_CHECKING:
    from torch import nn

    from rft_fn.types import Engine

__all__ = ["Reward", "as_reward", "column_names", "parameters", "required", "taken", "takes_all"]


def _nothing() -> None:
    """Close nothing."""


@dataclass(frozen=True, eq=False)
class Reward:
    """A reward, and what a run has to know of it."""

    fn: Callable[..., Any]  # a `RewardFn`, or with `joint` a `JointReward`
    name: str = ""  # its own; "" for none
    takes: tuple[str, ...] | None = None  # the arguments that it names; None: all that there are
    needs: tuple[str, ...] = ()  # the arguments without which it cannot be called
    columns: tuple[str, ...] = ()  # of the data, that it cannot do without
    media: bool = False  # it gets the media of the prompts
    state: bool = False  # it may read `trainer_state`
    asynchronous: bool = False  # it returns an awaitable
    joint: bool = False  # all ranks compute it together
    prepare: Callable[..., Any] | None = None  # of a joint one: what each rank does by itself before
    begin: Callable[..., object] | None = None  # starts what takes time about rows that ended, see `early`
    deadline: float = 0.0  # s that a call may take, by its own limits; 0 for none
    close: Callable[[], None] = _nothing  # ends what it holds
    references: tuple[str, Callable[[Any], str]] | None = None  # column, and what a `Reference` reads as
    held: bool = False  # it is watched and never learned
    answer: Callable[[str], str | None] | None = None  # the answer in a response, for the vote of a majority

    # of models, for forecasts of memory
    module: "nn.Module | None" = None  # the scalar model, without weights
    engine: "Engine | None" = None  # of a judge
    sampled_here: tuple[str, Any] | None = None  # folder of a judge in this process, and its `memory.Sampler`

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Return what the function returns."""
        return self.fn(*args, **given)

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call out of all that there are. ValueError for one that is missing."""
        for column in self.needs:
            if column not in given:
                raise ValueError(
                    f"reward {self.name!r}: column {column!r} is not in the dataset; "
                    f"its columns are: {column_names(given)}"
                )
        return {
            name: x
            for name, x in given.items()
            # files are not sent along to whatever takes any keyword
            if (self.media if name == "media" else self.takes is None or name in self.takes)
        }


def as_reward(fn: RewardFn | JointReward | Reward) -> Reward:
    """Return the record of a function: by its signature, and the attributes that it may have.

    They are `columns`, `close`, `deadline`, `stateless`, `waits` (its plain `__call__` returns an awaitable),
    `begin` (it is told of rows that have ended, as the function is of all, while others are sampled), and
    `together` and `prepare` (see `JointReward`).
    """
    if isinstance(fn, Reward):
        return fn
    joint = bool(getattr(fn, "together", False))
    own = [] if joint else parameters(fn)
    names = tuple(p.name for p in own)
    every = joint or takes_all(fn)
    needs = tuple(p.name for p in own if p.default is p.empty)
    columns = getattr(fn, "columns", None)
    may_read_state = not joint and (every or "trainer_state" in names)
    call = getattr(fn, "__call__", None)  # noqa: B004  of an object with one
    waits = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call)
    return Reward(
        fn=fn,
        name=getattr(fn, "__name__", ""),
        takes=None if every else names,
        needs=needs,
        columns=tuple(name for name in (needs if columns is None else columns) if name not in GIVEN),
        media="media" in names,
        state=may_read_state and not getattr(fn, "stateless", False),
        asynchronous=waits or getattr(fn, "waits", False) is True,
        joint=joint,
        prepare=getattr(fn, "prepare", None),
        begin=None if joint else getattr(fn, "begin", None),
        deadline=getattr(fn, "deadline", 0.0),
        close=getattr(fn, "close", None) or _nothing,
    )


# ---------- the signature of a function


def parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function that a caller may name."""
    found = inspect.signature(fn).parameters.values()
    return [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def required(fn: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters without a default."""
    return [p.name for p in parameters(fn) if p.default is p.empty]


def takes_all(fn: Callable[..., Any]) -> bool:
    """Return whether a function takes any keyword."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(fn).parameters.values())


def taken(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes: all if it takes **kwargs, else those that it names."""
    if takes_all(fn):
        return dict(given)
    return {p.name: given[p.name] for p in parameters(fn) if p.name in given}


def column_names(given: Iterable[str]) -> str:
    """Return the columns among a reward's arguments as text, or "none"."""
    return ", ".join(name for name in given if name not in GIVEN) or "none"
