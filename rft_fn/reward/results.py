"""Reads the results of reward functions, in any of the conventions."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Result", "read", "spread"]

_VALUES = ("rewards", "reward", "scores", "score")  # of a dict for the whole batch, the first that is there
_VALUE = ("score", "reward")  # of a dict for one completion


class Result(NamedTuple):
    """The result of a reward function for B completions."""

    values: Tensor  # [B] float32; NaN where it answered None: not applicable
    metrics: dict[str, Tensor]  # name -> [B] float32: further numbers; NaN where there is none
    extra: dict[str, list[Any]]  # name -> B values that are no numbers


def read(name: str, result: Any, count: int) -> Result:
    """The result of the reward function `name` for `count` completions.

    A list, an array or a tensor with one entry per completion: a finite number, None for "not applicable", or
    a dict with "score" (verl). Or one dict with lists: "rewards" and further entries, those of "extra_logs"
    among them (OpenRLHF). Or a pair of rewards and such entries (LightRFT). Further entries become metrics
    where they are numbers. Raises ValueError for a wrong count and for anything else: nothing is replaced.
    """
    if callable(result):
        made = getattr(result, "__name__", type(result).__name__)
        raise ValueError(
            f"reward {name!r}: expected a list of {count} numbers, got the function {made!r}; if {name!r} "
            "makes reward functions, call it: NAME(), with literal arguments"
        )
    if isinstance(result, Mapping):
        return _of_batch(name, _first(name, result, _VALUES), result, count)
    if isinstance(result, tuple) and len(result) == 2 and _is_rewards_and_logs(*result):
        rewards, logs = result
        return _of_batch(name, rewards, logs, count)
    return _of_completions(name, _entries(name, result, count))


def spread(result: Result, rows: Sequence[int], count: int) -> Result:
    """The result for some rows of a batch as one for all `count`: NaN and None elsewhere."""
    if len(rows) == count:
        return result

    def numbers_of(x: Tensor) -> Tensor:
        return torch.full((count,), math.nan).index_copy(0, torch.tensor(rows), x)

    extra: dict[str, list[Any]] = {}
    for name, values in result.extra.items():
        whole: list[Any] = [None] * count
        for row, value in zip(rows, values, strict=True):
            whole[row] = value
        extra[name] = whole
    metrics = {name: numbers_of(x) for name, x in result.metrics.items()}
    return Result(numbers_of(result.values), metrics, extra)


def _is_rewards_and_logs(rewards: Any, logs: Any) -> bool:
    """Whether a pair is the rewards of a batch and its logs.

    Otherwise it is the values of two completions.
    """
    return isinstance(logs, Mapping) and not isinstance(rewards, (numbers.Real, Mapping, type(None)))


def _of_completions(name: str, entries: Sequence[Any]) -> Result:
    """The result of numbers or dicts, one per completion."""
    values: list[float] = []
    columns: dict[str, list[Any]] = {}
    for i, entry in enumerate(entries):
        value = entry
        if isinstance(entry, Mapping):
            value = _first(name, entry, _VALUE, f"value {i}: ")
            # further entries; completions without one have None there
            for key, x in entry.items():
                if key not in _VALUE:
                    columns.setdefault(str(key), [None] * len(entries))[i] = _plain(x)
        values.append(_number(name, i, value))
    return _result(values, columns)


def _of_batch(name: str, rewards: Any, logs: Mapping[str, Any], count: int) -> Result:
    """The result of a function that answers for the batch as a whole."""
    entries = _entries(name, rewards, count)
    values = [_number(name, i, entry) for i, entry in enumerate(entries)]
    columns: dict[str, list[Any]] = {}
    for key, column in {**logs, **(logs.get("extra_logs") or {})}.items():
        if key == "extra_logs" or column is rewards:
            continue
        plain = _as_list(column)
        if isinstance(plain, list) and len(plain) == count:
            columns[str(key)] = [_plain(x) for x in plain]
        else:  # one value for the whole batch
            columns[str(key)] = [_plain(column)] * count
    return _result(values, columns)


def _first(name: str, result: Mapping[str, Any], keys: Sequence[str], where: str = "") -> Any:
    """The value of the first of the keys that is there."""
    for key in keys:
        if key in result:
            return result[key]
    known = ", ".join(map(repr, result)) or "nothing"
    raise ValueError(f"reward {name!r}: {where}expected a dict with {keys[0]!r}, got one with {known}")


def _as_list(x: Any) -> Any:
    """A tensor or an array as a list, [B, 1] as [B].

    Anything else is unchanged.
    """
    if not hasattr(x, "tolist"):
        return x
    x = x.tolist()
    if isinstance(x, list) and x and all(isinstance(row, list) and len(row) == 1 for row in x):
        return [row[0] for row in x]
    return x


def _entries(name: str, result: Any, count: int) -> list[Any]:
    """The entries of a result, one per completion. ValueError for another count."""
    kind = type(result).__name__
    try:
        entries = list(_as_list(result))
    except TypeError:
        raise ValueError(f"reward {name!r}: expected a list of {count} numbers, got {kind}") from None
    if len(entries) != count:
        raise ValueError(f"reward {name!r}: expected {count} values, got {len(entries)}")
    return entries


def _plain(value: Any) -> Any:
    """A tensor or an array of one element as a Python number.

    Anything else is unchanged.
    """
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:
        return value.item()
    return value


def _number(name: str, index: int, value: Any) -> float:
    """One value of a reward: NaN for None.

    ValueError for anything else but a finite float32.
    """
    plain = _plain(value)
    if plain is None:
        return math.nan
    if isinstance(plain, numbers.Real) and _is_finite(plain):
        return float(plain)
    raise ValueError(
        f"reward {name!r}: value {index} is {value!r:.80}, not a finite number; return a float for every "
        "completion, 0.0 for one that cannot be scored, None where the reward does not apply"
    )


def _is_finite(x: Any) -> bool:
    """Whether a number is finite as a float32; False for NaN."""
    return abs(x) <= torch.finfo(torch.float32).max


def _result(values: list[float], columns: Mapping[str, list[Any]]) -> Result:
    """Splits further columns into numbers and other values."""
    metrics: dict[str, Tensor] = {}
    extra: dict[str, list[Any]] = {}
    for key, column in columns.items():
        if all(x is None or isinstance(x, numbers.Real) for x in column):
            metrics[key] = torch.tensor([_metric(x) for x in column], dtype=torch.float32)
        else:
            extra[key] = column
    return Result(torch.tensor(values, dtype=torch.float32), metrics, extra)


def _metric(x: float | None) -> float:
    """A number to log; NaN for None."""
    if x is None:
        return math.nan
    return float(x)
