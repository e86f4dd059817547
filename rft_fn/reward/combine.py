"""Combine several rewards into one weighted sum; every value is checked."""

import concurrent.futures as futures
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rft_fn import border
from rft_fn.metric import OF_REWARD
from rft_fn.reward.calling import Call, awaited, listed, noted
from rft_fn.reward.event_loop import EventLoop
from rft_fn.reward.results import Result, read_result, spread_result
from rft_fn.reward.reward_record import Reward, as_reward
from rft_fn.reward.row_weights import RowWeights, Weight, check_weight, weights_of
from rft_fn.reward.signature import (
    GIVEN,
    Columns,
    JointReward,
    Messages,
    RewardFn,
    Score,
    Scored,
    TrainerState,
)
from rft_fn.reward.veto import Veto, vetoed

__all__ = ["Known", "Weighted", "columns", "components_of", "joint_names", "label_values", "weighted"]


Known = Callable[[], Mapping[str, Tensor]]
"""The values [B] of the joint rewards of a score by name; called once, after the async ones have begun."""


class Weighted:
    """A weighted sum of rewards: a `Score`, made by `weighted`, `by_column` or `parse`."""

    def __init__(
        self,
        components: Mapping[str, tuple[RewardFn | JointReward | Reward, Weight]],
        *,
        specs: Mapping[str, str] | None = None,
        vetoes: Sequence[Veto] = (),
    ):
        _check_components(components)
        for veto in vetoes:
            if veto.part not in components:
                raise ValueError(f"veto: expected one of {', '.join(components)}, got {veto.part!r}")
            if getattr(components[veto.part][0], "held", False):
                raise ValueError(f"veto: expected a reward that is learned, got {veto.part!r}, which is held")
        self.components: dict[str, tuple[Reward, Weight]] = {}
        for name, (fn, weight) in components.items():
            self.components[name] = replace(as_reward(fn), name=name), weight
        self.specs = dict(specs or {})  # their texts on the command line
        self.vetoes = tuple(vetoes)
        self.running = ""  # the reward that is being computed, or the one that raised
        self._loop = EventLoop()  # of async ones, batch after batch

    def with_vetoes(self, *vetoes: Veto) -> "Weighted":
        """Return this sum with further vetoes. ValueError for a part that it does not have."""
        return Weighted(self.components, specs=self.specs, vetoes=[*self.vetoes, *vetoes])

    def close(self) -> None:
        """Close what the parts hold: engines, connections, the event loop."""
        self._loop.close()
        for reward, _ in self.components.values():
            reward.close()

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
        groups: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
        media: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        trainer_state: TrainerState | None = None,
        known: Known | None = None,
    ) -> Scored:
        """Return the rewards of a batch, as `Score` does; `known` gives the values of the joint rewards."""
        _check_batch(prompts, completions, columns)
        given: dict[str, Sequence[Any] | None] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "prompt_texts": prompt_texts,
            "prompt_ids": prompt_ids,
            "truncated": truncated,
            "groups": groups,
            "keys": keys,
            "media": media,
        }
        batch: dict[str, Any] = {**columns, "trainer_state": trainer_state or TrainerState()}
        batch |= {name: list(values) for name, values in given.items() if values is not None}

        # a reward is asked for the rows that it applies to
        count = len(completions)
        weights: dict[str, Tensor] = {}
        calls: dict[str, Call] = {}
        for name, (reward, weight) in self.components.items():
            self.running = name
            weights[name] = weights_of(name, weight, columns, count)
            rows = (~weights[name].isnan()).nonzero().flatten().tolist()
            if rows and not reward.joint:
                calls[name] = Call(reward, rows)

        # async ones begin first; while they wait, joint ones compute, then plain ones, one after the other
        found: dict[str, object] = {}
        waiting: dict[str, futures.Future[object]] = {}
        try:
            for asynchronous in (True, False):
                if not asynchronous:
                    found |= self._known(known)
                for name, call in calls.items():
                    if call.reward.asynchronous != asynchronous:
                        continue
                    self.running = name
                    arguments = call.arguments(batch)
                    with noted(name):
                        result = listed(call.reward.fn(**arguments))
                    if inspect.isawaitable(result):
                        waiting[name] = self._loop.start(awaited(name, result))
                    else:
                        found[name] = result
            found |= self._wait(waiting)
        except BaseException:  # which ends the others
            self._loop.close()
            raise

        read = self._read_all(found, calls, weights)  # all have answered before any result is read
        parts = {name: x.values for name, x in read.items()}
        total = self._total(parts, weights, prompts)
        total, decided = vetoed(total, parts, self.vetoes)
        metrics, extra = _further(read)
        for name, x in decided.items():
            metrics[f"{name}/vetoed"] = x
        return Scored(total, parts, metrics, extra)

    def _wait(self, waiting: Mapping[str, "futures.Future[object]"]) -> dict[str, object]:
        """Return the results of the async functions, or raise the first error."""
        if not waiting:
            return {}
        self.running = ", ".join(waiting)
        done, _ = futures.wait(waiting.values(), return_when=futures.FIRST_EXCEPTION)
        for name, future in waiting.items():
            if future not in done:
                continue
            if future.cancelled():
                self.running = name
                raise ValueError(f"reward {name!r}: expected a list of numbers, got a cancelled task")
            error = future.exception()
            if error is not None:
                self.running = name
                raise error
        return {name: future.result() for name, future in waiting.items()}

    def _known(self, known: Known | None) -> Mapping[str, object]:
        """Return the values of the joint rewards. ValueError where nobody has computed them."""
        joint = joint_names(self)
        if not joint:
            return {}
        if known is None:
            raise ValueError(
                f"reward {joint[0]!r}: expected `known`, its values, which all ranks compute together; "
                "reward.judge and collect.gather_and_judge do that"
            )
        return known()

    def _read_all(
        self, found: Mapping[str, object], calls: Mapping[str, Call], weights: Mapping[str, Tensor]
    ) -> dict[str, Result]:
        """Return the results of all rewards, each for all rows."""
        read: dict[str, Result] = {}
        for name in self.components:
            self.running = name
            read[name] = self._read(name, found.get(name), calls.get(name), weights[name])
        self.running = ""
        return read

    def _read(self, name: str, given: Any, call: Call | None, weight: Tensor) -> Result:
        """Return the result of a reward for all rows; nothing for rows that it does not apply to."""
        count = len(weight)
        if call is None and not self.components[name][0].joint:  # it was asked for none
            return Result(torch.full((count,), math.nan), {}, {})
        if call is None:
            result = read_result(name, [None if math.isnan(x) else x for x in given.tolist()], count)
            return result._replace(values=torch.where(weight.isnan(), math.nan, result.values))
        rows = (~weight.isnan()).nonzero().flatten()
        result = read_result(name, given, len(rows))
        log = call.log
        result = result._replace(
            metrics={**result.metrics, **log.metrics}, extra={**result.extra, **log.extra}
        )
        return spread_result(result, rows.tolist(), count)

    def _total(
        self, parts: Mapping[str, Tensor], weights: Mapping[str, Tensor], prompts: Sequence[str | Messages]
    ) -> Tensor:
        """Return the weighted sum [B] of the parts that apply. ValueError for a row to which none does."""
        learned = {name: part for name, part in parts.items() if not self.components[name][0].held}
        total = torch.zeros(len(prompts))
        for name, part in learned.items():
            total = total + (weights[name] * part).nan_to_num()

        # a row without any reward is not worth 0
        nothing = torch.stack(list(learned.values())).isnan().all(0).nonzero().flatten().tolist()
        if nothing:
            row = nothing[0]
            raise ValueError(
                f"reward: expected a number from one of {', '.join(learned)} for every completion, got None "
                f"from all of them for completion {row}, of the prompt {prompts[row]!r:.80}; add a reward "
                "that applies to it, or return 0.0"
            )
        return total


def weighted(**components: tuple[RewardFn | JointReward | Reward, Weight]) -> Weighted:
    """Return a `Score`: the weighted sum of reward functions.

    `weighted(accuracy=(math(), 0.9), format=(boxed_format(), 0.1))`. Each component is called with keywords,
    as TRL does it: `fn(prompts=..., completions=..., **columns)`. A weight of 0 only logs a part. A weight
    may be `RowWeights`, one for each value of a column. ValueError here for no component or a weight that is
    not finite. `score` raises ValueError that names the component for the wrong number of values, for a value
    that is not a finite number (nothing is replaced silently: a NaN reward would turn a whole group's
    advantages into NaN), for a column that is missing and for a component that calls `sys.exit`. Any other
    error of a component is passed on with a note that names the component.
    """
    return Weighted(components)


def components_of(score: object) -> Mapping[str, tuple[Reward, Weight]]:
    """Return the rewards of a weighted sum with their weights; {} of any other score."""
    return score.components if isinstance(score, Weighted) else {}


def columns(score: Score) -> tuple[str, ...]:
    """Return the columns that a score cannot do without, for `data.load(..., columns=...)`.

    A reward function names them in its attribute `columns`, as `verifiable` does; of any other they are its
    parameters without a default, so give one to a parameter with a column that may be missing or empty. ()
    for a score that is not made by `weighted` or `parse`.
    """
    names: dict[str, None] = {}
    for reward, weight in components_of(score).values():
        if isinstance(weight, RowWeights):
            names |= {weight.column: None}
        names |= dict.fromkeys(reward.columns)
    return tuple(names)


def label_values(score: Score) -> dict[str, list[str]]:
    """Return the values of a column to which some reward applies, for `data.load(values=...)`.

    {} where a reward applies to all rows, and where rewards look at more than one column.
    """
    by_column: dict[str, dict[str, None]] = {}
    for _, weight in components_of(score).values():
        if not isinstance(weight, RowWeights):
            return {}
        by_column.setdefault(weight.column, {}).update(dict.fromkeys(weight.of))
    return {column: list(values) for column, values in by_column.items()} if len(by_column) == 1 else {}


def joint_names(score: Score) -> list[str]:
    """Return the joint rewards among the components of a score."""
    return [name for name, (reward, _) in components_of(score).items() if reward.joint]


def _check_components(components: Mapping[str, tuple[RewardFn | JointReward | Reward, Weight]]) -> None:
    if not components:
        raise ValueError("weighted: expected at least one component, as name=(reward function, weight)")
    for name, component in components.items():
        if name in OF_REWARD:
            raise ValueError(
                f"reward {name!r}: expected another name than {', '.join(OF_REWARD)}, which metrics of the "
                f"whole reward have, got {name!r}"
            )
        if not (isinstance(component, tuple) and len(component) == 2 and callable(component[0])):
            raise ValueError(f"reward {name!r}: expected (reward function, weight), got {component!r}")
        check_weight(name, component[1])
    if all(getattr(fn, "held", False) for fn, _ in components.values()):
        raise ValueError(
            f"reward: expected at least one that is learned, got {', '.join(components)}, all of them held"
        )


def _check_batch(prompts: Sequence[Any], completions: Sequence[Any], columns: Columns) -> None:
    """Raise ValueError for lengths that differ and for columns with names that are taken."""
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


def _further(read: Mapping[str, Result]) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Return the metrics and the other values of all rewards, as PART/NAME."""
    metrics: dict[str, Tensor] = {}
    extra: dict[str, list[Any]] = {}
    for part, result in read.items():
        for name, x in result.metrics.items():
            metrics[f"{part}/{name}"] = x
        for name, values in result.extra.items():
            extra[f"{part}/{name}"] = [_readable(x) for x in values]
    return metrics, extra


def _readable(x: Any) -> Any:
    """Return a plain value, or its text: what any process and JSON can take."""
    return x if x is None or isinstance(x, (str, int, float)) else border.printed(x)
