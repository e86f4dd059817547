"""The results of reward functions, in any of the conventions, as numbers."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import border

__all__ = ["Result", "read_result", "spread_result"]


_VALUES = ("rewards", "reward", "scores", "score")  # of a dict for the whole batch, the first that is there
_VALUE = ("score", "reward", "overall")  # of a dict for one completion; the last is EasyR1's


class Result(NamedTuple):
    """The result of a reward function for B completions."""

    values: Tensor  # [B] float32; NaN where it answered None: not applicable
    metrics: dict[str, Tensor]  # name -> [B] float32: further numbers; NaN where there is none
    extra: dict[str, list[Any]]  # name -> B values that are no numbers


def read_result(name: str, result: Any, count: int) -> Result:
    """Read the result of the reward function `name` for `count` completions.

    A list, an array or a tensor with one entry per completion: a finite number, None for "not applicable", or
    a dict with "score" (verl). Or one dict with lists: "rewards" and further entries, those of "extra_logs"
    among them (OpenRLHF). Or a pair of rewards and such entries (LightRFT). Further entries become metrics
    where they are numbers. ValueError for a wrong count and for anything else: nothing is replaced.
    """
    if callable(result):
        made = getattr(result, "__name__", type(result).__name__)
        raise ValueError(
            f"reward {name!r}: expected a list of {count} numbers, got the function {made!r}; if {name!r} "
            "makes reward functions, call it: NAME(), with literal arguments"
        )
    if isinstance(result, Mapping):
        return _of_batch(name, _first(name, result, _VALUES), result, count)
    if isinstance(result, tuple) and len(result) == 2:
        rewards, logs = result
        # else these are the values of two completions
        if isinstance(logs, Mapping) and not isinstance(rewards, (numbers.Real, Mapping, type(None))):
            return _of_batch(name, rewards, logs, count)
    return _of_completions(name, _entries(name, result, count))


def spread_result(result: Result, rows: Sequence[int], count: int) -> Result:
    """Spread the result for some rows over all `count`: NaN and None elsewhere."""
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


def _of_completions(name: str, entries: Sequence[Any]) -> Result:
    """Read numbers or dicts, one per completion."""
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
    return _result(name, values, columns)


def _of_batch(name: str, rewards: Any, logs: Mapping[str, Any], count: int) -> Result:
    """Read the result of a function that answers for the batch as a whole."""
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
    return _result(name, values, columns)


def _further(name: str, key: str, x: Any) -> float:
    """Return a further number, NaN for none. ValueError for one that float32 cannot hold."""
    if x is None or x != x:
        return math.nan
    if not border.is_finite(x):
        raise ValueError(f"reward {name!r}: {key}: expected finite numbers or None, got {border.quoted(x)}")
    return float(x)


def _first(name: str, result: Mapping[str, Any], keys: Sequence[str], where: str = "") -> Any:
    """Return the value of the first key that is there."""
    for key in keys:
        if key in result:
            return result[key]
    known = ", ".join(map(repr, result)) or "nothing"
    raise ValueError(f"reward {name!r}: {where}expected a dict with {keys[0]!r}, got one with {known}")


def _as_list(x: Any) -> Any:
    """Return a tensor or an array as a list, [B, 1] as [B]; anything else unchanged."""
    if not hasattr(x, "tolist"):
        return x
    x = x.tolist()
    if isinstance(x, list) and x and all(isinstance(row, list) and len(row) == 1 for row in x):
        return [row[0] for row in x]
    return x


def _entries(name: str, result: Any, count: int) -> list[Any]:
    """Return the entries of a result, one per completion. ValueError for another count."""
    kind = type(result).__name__
    try:
        entries = list(_as_list(result))
    except TypeError:
        raise ValueError(f"reward {name!r}: expected a list of {count} numbers, got {kind}") from None
    if len(entries) != count:
        raise ValueError(f"reward {name!r}: expected {count} values, got {len(entries)}")
    return entries


def _plain(value: Any) -> Any:
    """Return a tensor or an array of one element as a Python number; anything else unchanged."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:
        return value.item()
    return value


def _number(name: str, index: int, value: Any) -> float:
    """Return one value of a reward: NaN for None, ValueError for anything but a finite float32."""
    plain = _plain(value)
    if plain is None:
        return math.nan
    if isinstance(plain, numbers.Real) and border.is_finite(plain):
        return float(plain)
    raise ValueError(
        f"reward {name!r}: value {index} is {border.quoted(value, 80)}, not a finite number; return a float "
        "for every completion, 0.0 for one that cannot be scored, None where the reward does not apply"
    )


def _result(name: str, values: list[float], columns: Mapping[str, list[Any]]) -> Result:
    """Split further columns into numbers, NaN where there is none, and other values."""
    metrics: dict[str, Tensor] = {}
    extra: dict[str, list[Any]] = {}
    for key, column in columns.items():
        if all(x is None or isinstance(x, numbers.Real) for x in column):
            found = [_further(name, key, x) for x in column]
            metrics[key] = torch.tensor(found, dtype=torch.float32)
        else:
            extra[key] = column
    return Result(torch.tensor(values, dtype=torch.float32), metrics, extra)
