"""Several rewards as one weighted sum; every value is checked."""

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rft_fn.reward import results
from rft_fn.reward.convention import (
    GIVEN,
    Columns,
    JointReward,
    Messages,
    RewardFn,
    Score,
    Scored,
    TrainerState,
    asks_for,
    column_names,
    columns_of,
    is_joint,
    required,
    taken,
)
from rft_fn.reward.event_loop import EventLoop
from rft_fn.reward.results import Result

__all__ = ["Known", "Weighted", "columns", "joint_names", "weighted"]

Known = Callable[[], Mapping[str, Tensor]]
"""The values [B] of the joint rewards of a score by name; called once, after the async ones have begun."""


class Weighted:
    """A weighted sum of rewards: a `Score`, made by `weighted` or `parse`."""

    def __init__(
        self,
        components: Mapping[str, tuple[RewardFn | JointReward, float]],
        *,
        specs: Mapping[str, str] | None = None,
    ):
        _check_components(components)
        self.components = dict(components)
        self.specs = dict(specs or {})  # their texts on the command line
        self.running = ""  # the reward that is being computed, or the one that raised
        self._loop = EventLoop()

    def __call__(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        columns: Columns,
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        prompt_texts: Sequence[str] | None = None,
        prompt_ids: Sequence[Sequence[int]] | None = None,
        truncated: Sequence[bool] | None = None,
        keys: Sequence[int] | None = None,
        media: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        trainer_state: TrainerState | None = None,
        known: Known | None = None,
    ) -> Scored:
        """The rewards of a batch, as `Score` has them.

        `known` gives the values of the joint rewards, which need all ranks.
        """
        # the arguments that every reward may name
        _check_batch(prompts, completions, columns)
        batch: dict[str, Any] = {**columns, "prompts": list(prompts), "completions": list(completions)}
        batch["trainer_state"] = trainer_state or TrainerState()
        given = {"completion_ids": completion_ids, "prompt_texts": prompt_texts, "prompt_ids": prompt_ids}
        given |= {"truncated": truncated, "keys": keys, "media": media}
        for name, values in given.items():
            if values is not None:
                batch[name] = list(values)

        # call all of them before any result is read: async ones run together
        count = len(completions)
        logs = {name: _Log(name, count) for name in self.components}
        found = self._known(known)
        found |= self._call(batch, logs)
        read: dict[str, Result] = {}
        for name in self.components:
            self.running = name
            read[name] = results.read(name, found[name], count)
        self.running = ""

        parts = {name: x.values for name, x in read.items()}
        metrics, extra = _further(read, logs)
        return Scored(self._total(parts, prompts), parts, metrics, extra)

    def _known(self, known: Known | None) -> dict[str, object]:
        """The values of the joint rewards. ValueError where nobody has computed them."""
        joint = joint_names(self)
        if not joint:
            return {}
        if known is None:
            raise ValueError(
                f"reward {joint[0]!r}: expected `known`, its values, which all ranks compute together; "
                "reward.judge and collect.gather_and_judge do that"
            )
        return dict(known())

    def _call(self, batch: Mapping[str, Any], logs: Mapping[str, "_Log"]) -> dict[str, object]:
        """The results of all functions, by name.

        Plain ones run one after the other, then async ones together.
        """
        found: dict[str, object] = {}
        waiting: dict[str, Awaitable[object]] = {}

        # when a plain one raises, the coroutines of others were never started: close them
        try:
            for name, (fn, _) in self.components.items():
                if is_joint(fn):
                    continue
                result = self._start(name, batch, logs[name])
                if inspect.isawaitable(result):
                    waiting[name] = result
                else:
                    found[name] = result
        except BaseException:
            for awaitable in waiting.values():
                if inspect.iscoroutine(awaitable):
                    awaitable.close()
            raise
        if waiting:
            self.running = ", ".join(waiting)
            found |= self._loop.run(self._gather(waiting))
        return found

    def _start(self, name: str, batch: Mapping[str, Any], log: "_Log") -> object:
        """The result of a function, an awaitable if it is async."""
        self.running = name
        fn: Any = self.components[name][0]
        given = {**batch, "log_metric": log.metric, "log_extra": log.further}
        _check_arguments(name, fn, given)
        with self.named(name):
            arguments = taken(fn, given)
            if not asks_for(fn, "media"):
                arguments.pop("media", None)
            result = fn(**arguments)
            if isinstance(result, Iterator) and not inspect.isawaitable(result):  # computes when it is read
                result = list(result)
        return result

    async def _gather(self, waiting: Mapping[str, Awaitable[object]]) -> dict[str, object]:
        """The results of async functions, which run together."""

        async def wait(name: str) -> object:
            with self.named(name):
                return await waiting[name]

        values = await asyncio.gather(*(wait(name) for name in waiting))
        return dict(zip(waiting, values, strict=True))

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Add a note with the reward's name to any error.

        A call of sys.exit becomes ValueError.
        """
        # a reward must not end the run without its name
        try:
            yield
        except SystemExit as error:
            self.running = name
            exit_ = ValueError(
                f"reward {name!r}: expected a list of numbers, got sys.exit({error.code!r}); raise an error "
                "to stop the run, return 0.0 for a completion that cannot be scored"
            )
            exit_.add_note(f"raised by the reward {name!r}")
            raise exit_ from error
        except KeyboardInterrupt:  # the user's, not the reward's
            raise
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):  # another one has failed
                self.running = name
            error.add_note(f"raised by the reward {name!r}")
            raise

    def _total(self, parts: Mapping[str, Tensor], prompts: Sequence[str | Messages]) -> Tensor:
        """The weighted sum [B] of the parts that apply.

        ValueError for a row to which none does.
        """
        total = torch.zeros(len(prompts))
        for name, (_, weight) in self.components.items():
            total = total + float(weight) * parts[name].nan_to_num()

        # a row without any reward is not worth 0
        nothing = torch.stack(list(parts.values())).isnan().all(0).nonzero().flatten().tolist()
        if nothing:
            row = nothing[0]
            raise ValueError(
                f"reward: expected a number from one of {', '.join(parts)} for every completion, got None "
                f"from all of them for completion {row}, of the prompt {prompts[row]!r:.80}; add a reward "
                "that applies to it, or return 0.0"
            )
        return total


def weighted(**components: tuple[RewardFn | JointReward, float]) -> Weighted:
    """score = sum of weight * component: `weighted(accuracy=(math(), 0.9), format=(boxed_format(), 0.1))`.

    Each component is called with keywords, as TRL does it: `fn(prompts=..., completions=..., **columns)`.
    Raises ValueError here for no component or a weight that is not finite. `score` raises ValueError that
    names the component for the wrong number of values, for a value that is not a finite number (nothing is
    replaced silently: a NaN reward would turn a whole group's advantages into NaN), for a column that is
    missing and for a component that calls `sys.exit`. Any other error of a component is passed on with a note
    that names the component.
    """
    return Weighted(components)


def columns(score: Score) -> tuple[str, ...]:
    """The columns that a score cannot do without, for `data.load(..., columns=...)`.

    A reward function names them in its attribute `columns`, as those of `verifiable` do; of any other they
    are its parameters without a default, so give one to a parameter whose column may be missing or empty.
    () for a score that is not made by `weighted` or `parse`.
    """
    names: dict[str, None] = {}
    for fn, _ in getattr(score, "components", {}).values():
        names |= dict.fromkeys(columns_of(fn))
    return tuple(names)


def joint_names(score: Score) -> list[str]:
    """The joint rewards among the components of a score."""
    components = getattr(score, "components", {})
    return [name for name, (fn, _) in components.items() if is_joint(fn)]


def _check_components(components: Mapping[str, tuple[RewardFn | JointReward, float]]) -> None:
    if not components:
        raise ValueError("weighted: expected at least one component, as name=(reward function, weight)")
    for name, component in components.items():
        if not (isinstance(component, tuple) and len(component) == 2 and callable(component[0])):
            raise ValueError(f"reward {name!r}: expected (reward function, weight), got {component!r}")
        if not isinstance(component[1], numbers.Real) or not math.isfinite(component[1]):
            raise ValueError(f"reward {name!r}: expected a finite weight, got {component[1]!r}")


def _check_batch(prompts: Sequence[Any], completions: Sequence[Any], columns: Columns) -> None:
    """Raises ValueError for lengths that differ and for columns whose names are taken."""
    count = len(completions)
    if len(prompts) != count:
        raise ValueError(f"prompts: expected {count} values, one per completion, got {len(prompts)}")
    for name, values in columns.items():
        if name in GIVEN:
            raise ValueError(f"column {name!r}: the reward's own argument has this name; rename the column")
        if len(values) != count:
            raise ValueError(
                f"column {name!r}: expected {count} values, one per completion, got {len(values)}"
            )


def _check_arguments(name: str, fn: RewardFn, given: Mapping[str, Any]) -> None:
    """ValueError for a parameter without a default that is no column."""
    for column in required(fn):
        if column not in given:
            raise ValueError(
                f"reward {name!r}: column {column!r} is not in the dataset; "
                f"its columns are: {column_names(given)}"
            )


class _Log:
    """The numbers and values that a reward function logs, by `log_metric` and `log_extra`."""

    def __init__(self, reward: str, count: int):
        self._reward = reward
        self._count = count
        self._numbers: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        """Add a number for the batch.

        The mean of those with one name is logged.
        """
        self._numbers.setdefault(name, []).append(float(value))

    def further(self, column: str, values: Sequence[Any]) -> None:
        """Set one value per completion. ValueError for another count."""
        values = list(values)
        if len(values) != self._count:
            raise ValueError(
                f"reward {self._reward!r}: log_extra({column!r}): expected {self._count} values, one per "
                f"completion, got {len(values)}"
            )
        self.extra[column] = values

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The means by name, as the same number for every completion [B]."""
        found = {}
        for name, values in self._numbers.items():
            mean = sum(values) / len(values)
            found[name] = torch.full((self._count,), mean)
        return found


def _further(
    read: Mapping[str, Result], logs: Mapping[str, _Log]
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """The metrics and the other values of all rewards, as PART/NAME."""
    metrics: dict[str, Tensor] = {}
    extra: dict[str, list[Any]] = {}
    for part in read:
        for name, x in {**read[part].metrics, **logs[part].metrics}.items():
            metrics[f"{part}/{name}"] = x
        for name, values in {**read[part].extra, **logs[part].extra}.items():
            extra[f"{part}/{name}"] = [_readable(x) for x in values]
    return metrics, extra


def _readable(x: Any) -> Any:
    """The value, or its text unless it is a plain one.

    So it can be sent to any process and written as JSON.
    """
    if x is None or isinstance(x, (str, int, float)):
        return x
    return str(x)
