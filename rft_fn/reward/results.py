"""What a reward function may return, in any of the conventions, as one number a completion."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Result", "read"]

_VALUES = ("rewards", "reward", "scores", "score")  # of a dict for the whole batch, the first that is there
_VALUE = ("score", "reward")  # of a dict for one completion


class Result(NamedTuple):
    """What a reward function says of B completions."""

    values: Tensor  # [B] float32; NaN where it answered None: not applicable
    metrics: dict[str, Tensor]  # name -> [B] float32: further numbers; NaN where there is none
    extra: dict[str, list[Any]]  # name -> B values that are no numbers


def read(name: str, result: object, count: int) -> Result:
    """The result of the reward function `name` for `count` completions.

    A list, an array or a tensor with one entry a completion: a finite number, None for "not applicable", or a
    dict with "score" (verl). Or one dict with lists: "rewards" and further entries, those of "extra_logs"
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
    if isinstance(result, tuple) and len(result) == 2 and _is_pair(*result):
        return _of_batch(name, result[0], result[1], count)

    entries = _entries(name, result, count)
    values, further = [], []
    for i, entry in enumerate(entries):
        row = {}
        if isinstance(entry, Mapping):
            row = {str(k): _plain(v) for k, v in entry.items() if k not in _VALUE}
            entry = _first(name, entry, _VALUE, f"value {i}: ")
        values.append(_number(name, i, entry))
        further.append(row)
    names = dict.fromkeys(k for row in further for k in row)
    columns = {k: [row.get(k) for row in further] for k in names}
    return _result(values, columns)


def _is_pair(rewards: object, logs: object) -> bool:
    """Whether these are the rewards of a batch and its logs, not the values of two completions."""
    return isinstance(logs, Mapping) and not isinstance(rewards, (numbers.Real, Mapping, type(None)))


def _of_batch(name: str, rewards: object, logs: Mapping[str, Any], count: int) -> Result:
    """The result of a function that answers for the batch as a whole."""
    entries = _entries(name, rewards, count)
    values = [_number(name, i, entry) for i, entry in enumerate(entries)]
    columns: dict[str, list[Any]] = {}
    for key, column in {**logs, **(logs.get("extra_logs") or {})}.items():
        if key == "extra_logs" or column is rewards:
            continue
        plain = _listed(column)
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


def _listed(x: object) -> object:
    """A tensor or an array as a list, [B, 1] as [B]; anything else as it is."""
    if not hasattr(x, "tolist"):
        return x
    x = x.tolist()
    if isinstance(x, list) and x and all(isinstance(row, list) and len(row) == 1 for row in x):
        return [row[0] for row in x]
    return x


def _entries(name: str, result: object, count: int) -> list[Any]:
    """The entries of what a function returned, one a completion. ValueError for another count."""
    kind = type(result).__name__
    try:
        entries = list(_listed(result))
    except TypeError:
        raise ValueError(f"reward {name!r}: expected a list of {count} numbers, got {kind}") from None
    if len(entries) != count:
        raise ValueError(f"reward {name!r}: expected {count} values, got {len(entries)}")
    return entries


def _plain(value: Any) -> Any:
    """A tensor or an array of one element as a number of Python; anything else as it is."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:
        return value.item()
    return value


def _number(name: str, index: int, value: object) -> float:
    """One value of a reward: NaN for None. ValueError for anything else but a finite float32."""
    plain = _plain(value)
    if plain is None:
        return math.nan
    if isinstance(plain, numbers.Real) and abs(plain) <= torch.finfo(torch.float32).max:  # False for NaN
        return float(plain)
    raise ValueError(
        f"reward {name!r}: value {index} is {value!r:.80}, not a finite number; return a float for every "
        "completion, 0.0 for one that cannot be scored, None where the reward does not apply"
    )


def _result(values: list[float], columns: Mapping[str, list[Any]]) -> Result:
    """Splits further columns into those of numbers and others."""
    metrics, extra = {}, {}
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
