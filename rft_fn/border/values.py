"""Checks of what comes in from outside: JSON, numbers, samples, rollouts, foreign exceptions.

Every number that a server, a file or a user's function gives passes one of these functions before anything
computes with it. Each raises ValueError with one line, "name: expected X, got Y", and returns what it has
checked; a room that has an error of its own for it (a server's Fault, a file's path) puts that around it.
`tests/test_border.py` lists every reader of the package, and feeds each the same lies.
"""

import asyncio
import concurrent.futures
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.foreign_json import parse_json
from rft_fn.text import check_text, error_text
from rft_fn.types import Rollout

__all__ = [
    "LEAST_LOGP", "MASS", "ROUNDING", "contained", "entries", "finite", "integer", "integers", "is_finite",
    "is_ours", "json_rows", "log_probs", "number", "numbers", "numbers_or_none", "object_of", "printed",
    "quoted", "read_json", "rollout_of", "sample", "text", "words",
]  # fmt: skip

ROUNDING = 1e-3  # nats by which a log-prob may be above 0
LEAST_LOGP = -1e5  # nats; servers write -9999 for a word that cannot be
# what K words may have beyond 1, and two log-probs of one word may differ by: the rounding of bfloat16
MASS = 1e-2
_SHOWN = 40  # characters of what came instead
_BEGAN = 60  # of what came instead of JSON
_LARGEST = torch.finfo(torch.float32).max
_INT64 = 2**63


def quoted(x: Any, most: int = _SHOWN) -> str:
    """Return at most so many characters of a value's repr, which is foreign code: its type where it fails."""
    return printed(x, repr)[:most]


def printed(x: Any, how: Callable[[Any], str] = str) -> str:
    """Return the text of a value, which is foreign code; its type where that fails."""
    try:
        return how(x)
    except BaseException as error:  # also of an integer with too many digits
        if is_ours(error):
            raise
        return f"a value of type {type(x).__name__}"


# ---------- JSON


def _refuse(name: str) -> None:
    raise ValueError(f"expected finite numbers, got {name}")


def _finite(text: str) -> float:
    """Return a float. ValueError for one beyond all floats, such as 1e999, which Python reads as infinity."""
    x = float(text)
    if math.isinf(x):
        raise ValueError(f"expected finite numbers, got {text[:_SHOWN]}")
    return x


_FINITE = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def read_json(data: str | bytes) -> Any:
    """Return the value of JSON text.

    ValueError for anything else, for numbers that are not finite (NaN, Infinity, 1e999), for brackets and
    integers beyond Python's limits, and for text that is no Unicode.
    """
    try:
        value = parse_json(data, decoder=_FINITE)
    except (json.JSONDecodeError, UnicodeDecodeError):
        began = data[:_BEGAN]
        began = began.decode(errors="replace") if isinstance(began, bytes) else began
        raise ValueError(f"expected JSON, got {' '.join(began.split())!r}") from None
    check_text(value)
    return value


def object_of(name: str, x: Any) -> dict[str, Any]:
    """Return an object of JSON. ValueError for any other value."""
    if not isinstance(x, dict):
        raise ValueError(f"{name}: expected an object, got {type(x).__name__}")
    return x


def json_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file of a run, up to a line that is not whole; none for a missing file.

    A kill cuts the last line short. A number that is not finite becomes None, as a metric that is not there.
    ValueError for a line that is no object, has no step, or has other values than runs write in such a file.
    """
    check_row = _ROWS.get(path.name, _any_row)
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for i, line in enumerate(path.read_text(errors="replace").split("\n"), 1):  # a text may have U+2028
        try:
            row = parse_json(line, decoder=_ABSENT)
        except ValueError:
            break
        where = f"{path}, line {i}"
        integer(f"{where}: step", object_of(where, row).get("step"), low=0)
        check_row(where, row)
        found.append(row)
    return found


def _absent(_: str) -> None:
    return None


def _or_absent(text: str) -> float | None:
    x = float(text)
    return None if math.isinf(x) else x


_ABSENT = json.JSONDecoder(parse_constant=_absent, parse_float=_or_absent)


def _any_row(where: str, row: dict[str, Any]) -> None:
    """Take every row: its values are shown, and nothing computes with them."""


def _row_of_numbers(where: str, row: dict[str, Any]) -> None:
    """Check a row of metrics.jsonl or timing.jsonl: numbers, None for one that is not there."""
    for name, x in row.items():
        if x is not None and type(x) is not bool:
            number(f"{where}: {quoted(name)}", x)


def _row_of_quantiles(where: str, row: dict[str, Any]) -> None:
    """Check a row of distributions.jsonl: the same number of quantiles of each quantity."""
    sizes = {len(numbers(f"{where}: {quoted(name)}", x)) for name, x in row.items() if name != "step"}
    if sizes - {_QUANTILES}:
        raise ValueError(f"{where}: expected {_QUANTILES} quantiles, got {min(sizes - {_QUANTILES})}")


def _row_of_tokens(where: str, row: dict[str, Any]) -> None:
    """Check a row of tokens.jsonl: the pieces of a response, and as many numbers in each of its lists."""
    pieces = entries(f"{where}: pieces", row.get("pieces"), None)
    for i, piece in enumerate(pieces):
        text(f"{where}: pieces[{i}]", piece)
    numbers_or_none(f"{where}: mask", row.get("mask"), count=len(pieces))
    integer(f"{where}: group", row.get("group"), low=0)
    for name in {"prompt", "name"} & row.keys():
        text(f"{where}: {name}", row[name])
    if row.get("reward") is not None:
        number(f"{where}: reward", row["reward"])
    for name, xs in row.items():
        if isinstance(xs, list) and name not in ("pieces", "media", "conversation"):
            numbers_or_none(f"{where}: {quoted(name)}", xs, count=len(pieces))
    for i, medium in enumerate(entries(f"{where}: media", row.get("media", []), None)):
        entries(f"{where}: media[{i}]", medium, 3)
    for i, turn in enumerate(entries(f"{where}: conversation", row.get("conversation") or [], None)):
        object_of(f"{where}: conversation[{i}]", turn)


def _row_of_options(where: str, row: dict[str, Any]) -> None:
    """Check a row of overrides.jsonl: the option that was changed, and its values."""
    text(f"{where}: name", row.get("name"))
    if not {"old", "new"} <= row.keys():
        raise ValueError(f"{where}: expected old and new, got {', '.join(map(str, row))}")


_QUANTILES = 7  # of each row of distributions.jsonl
_ROWS = {
    "metrics.jsonl": _row_of_numbers,
    "timing.jsonl": _row_of_numbers,
    "distributions.jsonl": _row_of_quantiles,
    "tokens.jsonl": _row_of_tokens,
    "overrides.jsonl": _row_of_options,
}


# ---------- values


def text(name: str, x: Any) -> str:
    """Return a text. ValueError for anything else."""
    if not isinstance(x, str):
        raise ValueError(f"{name}: expected a text, got {quoted(x)}")
    return x


def is_finite(x: Any) -> bool:
    """Return whether a number is finite as a float32."""
    return abs(x) <= _LARGEST  # False for NaN


def finite(name: str, x: Any) -> Any:
    """Return a value of JSON. ValueError for a number inside it that is not finite, which JSON has not."""
    if isinstance(x, Mapping):
        for key, y in x.items():
            finite(f"{name}[{quoted(key)}]", y)
    elif isinstance(x, (list, tuple)):
        for i, y in enumerate(x):
            finite(f"{name}[{i}]", y)
    elif isinstance(x, float) and not math.isfinite(x):
        raise ValueError(f"{name}: expected a finite number, got {x!r}")
    return x


def integer(name: str, x: Any, *, low: int = -_INT64, high: int = _INT64 - 1) -> int:
    """Return a whole number in [low, high], which fits 64 bits. ValueError for another, 3.0, "3" and True."""
    if type(x) is not int or not low <= x <= high:
        raise ValueError(f"{name}: expected a whole number{_limits(low, high)}, got {quoted(x)}")
    return x


def number(name: str, x: Any, *, low: float = -_LARGEST, high: float = _LARGEST) -> float:
    """Return a number in [low, high] that is finite as a float32. ValueError for another, and for True."""
    if type(x) not in (int, float) or not low <= x <= high:
        limits = "" if high == _LARGEST else f" in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: expected a finite number{limits}, got {quoted(x)}")
    return float(x)


def _limits(low: int, high: int) -> str:
    """Return the limits of whole numbers as the end of what is expected."""
    if high < _INT64 - 1:
        return f" from {low} to {high}"
    return f" of at least {low}" if low > -_INT64 else " of 64 bits"


def entries(name: str, xs: Any, count: int | None) -> list[Any]:
    """Return a list of `count` entries, of any number for None. ValueError for anything else."""
    if not isinstance(xs, list):
        wanted = "a list" if count is None else f"a list of {count} entries"
        raise ValueError(f"{name}: expected {wanted}, got {type(xs).__name__}")
    if count is not None and len(xs) != count:
        raise ValueError(f"{name}: expected {count} entries, got {len(xs)}")
    return xs


def integers(
    name: str, xs: Any, *, count: int | None = None, low: int = -_INT64, high: int = _INT64 - 1
) -> list[int]:
    """Return a list of `count` whole numbers in [low, high]. ValueError for anything else."""
    xs = entries(name, xs, count)
    if not {*map(type, xs)} <= {int} or (xs and not low <= min(xs) <= max(xs) <= high):
        at = next(i for i, x in enumerate(xs) if type(x) is not int or not low <= x <= high)
        raise ValueError(f"{name}: expected whole numbers{_limits(low, high)}, got {quoted(xs[at])} at {at}")
    return xs


def numbers(
    name: str, xs: Any, *, count: int | None = None, low: float = -_LARGEST, high: float = _LARGEST
) -> list[float]:
    """Return a list of `count` numbers in [low, high], finite as float32. ValueError for anything else."""
    xs = entries(name, xs, count)
    if not {*map(type, xs)} <= {int, float} or not all(low <= x <= high for x in xs):
        at = next(i for i, x in enumerate(xs) if type(x) not in (int, float) or not low <= x <= high)
        limits = "" if high == _LARGEST else f" in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: expected finite numbers{limits}, got {quoted(xs[at])} at {at}")
    return [float(x) for x in xs]


def numbers_or_none(name: str, xs: Any, *, count: int) -> list[float | None]:
    """Return a list of `count` numbers that are finite as float32, or None. ValueError for anything else."""
    for i, x in enumerate(entries(name, xs, count)):
        if x is not None and (type(x) not in (int, float) or not is_finite(x)):
            raise ValueError(f"{name}: expected finite numbers or null, got {quoted(x)} at {i}")
    return xs


# ---------- what samplers and teachers say


def log_probs(name: str, xs: Any, count: int | None = None) -> list[float]:
    """Return a list of `count` log-probs: finite, and not above 0 by more than rounding."""
    return numbers(name, xs, count=count, low=LEAST_LOGP, high=ROUNDING)


def sample(tokens: Any, logp: Any, *, most: int, vocabulary: int) -> None:
    """Check one sample: 1 to `most` tokens of the vocabulary, each with its log-prob."""
    size = len(integers("tokens", tokens, low=0, high=vocabulary - 1))
    if not 0 < size <= most:
        raise ValueError(f"tokens: expected 1 to {most}, got {size}")
    log_probs("log-probs", logp, size)


def words(
    ids: Any, logp: Any, *, top_k: int, vocabulary: int, tokens: Sequence[int], own: Sequence[float]
) -> None:
    """Check the `top_k` likeliest words [T, K] at the places of `tokens` [T] with log-probs `own` [T].

    Words differ, are of the vocabulary, come in the order of their log-probs, and have no more than all of
    the probability. The token has the log-prob that it has among the words, else at most the least of them.
    """
    count = len(tokens)
    for at, (row, ps) in enumerate(zip(entries("words", ids, count), entries("words", logp, count))):
        integers(f"words[{at}]", row, count=top_k, low=0, high=vocabulary - 1)
        log_probs(f"words[{at}]: log-probs", ps, top_k)
    if not count:
        return

    # the rest in tensors: there may be millions of words
    word = torch.tensor(ids)
    p = torch.tensor(logp, dtype=torch.float64)
    token, theirs = torch.tensor(tokens), torch.tensor(own, dtype=torch.float64)
    same = word == token[:, None]
    least = torch.where(same.any(-1), (p * same).sum(-1), p[:, -1])
    mass = p.exp().sum(-1) + theirs.exp() * ~same.any(-1)
    ordered = word.sort(-1).values

    def refuse(wrong: Tensor, wanted: str, got: Tensor) -> None:
        """Raise ValueError for the first place that is wrong."""
        if len(places := wrong.nonzero()[:, 0]):
            at = int(places[0])
            raise ValueError(f"words[{at}]: expected {wanted}, got {quoted(got[at].tolist())}")

    refuse((ordered[:, 1:] == ordered[:, :-1]).any(-1), f"{top_k} words that differ", word)
    refuse((p[:, 1:] > p[:, :-1]).any(-1), "the likeliest first, by log-probs", p)
    refuse(mass > 1 + MASS, "a probability of at most 1 together", mass)
    refuse(same.any(-1) & ((theirs - least).abs() > MASS), "the log-prob that the token itself has", least)
    refuse(theirs > least + MASS, "no word that is likelier than these, for the token's log-prob", theirs)


# ---------- rollouts of files


_FIELDS: dict[str, tuple[torch.dtype, str]] = {
    "tokens": (torch.int64, "B S"),
    "mask": (torch.bool, "B S"),
    "logp": (torch.float32, "B S"),
    "length": (torch.int64, "B"),
    "truncated": (torch.bool, "B"),
    "group": (torch.int64, "B"),
    "version": (torch.int64, "B"),
    "temperature": (torch.float32, "B"),
    "reward": (torch.float32, "N G"),
}


def rollout_of(tensors: Mapping[str, Tensor], *, vocabulary: int | None = None) -> tuple[Rollout, Tensor]:
    """Return the rollout and the rewards [N, G] that named tensors are.

    ValueError unless every field has its type and shape, tokens are ids (of the vocabulary, where one is
    given), the mask lies within the lengths and behind the first token, log-probs are finite, none above 0
    and 0 outside mask, each of N prompts has G rows, one after the other, and rewards are finite.
    """
    unknown = sorted(set(tensors) - set(_FIELDS))
    missing = sorted(set(_FIELDS) - set(tensors) - {"temperature"})
    if unknown or missing:
        raise ValueError(
            f"expected the tensors {', '.join(_FIELDS)}, got {', '.join(sorted(tensors)) or 'none'}"
        )
    for name, x in tensors.items():
        if x.dtype != _FIELDS[name][0]:
            raise ValueError(f"{name}: expected {_FIELDS[name][0]}, got {x.dtype}")
    sizes = check.shapes(
        **{name: (tensors[name], dims) for name, (_, dims) in _FIELDS.items() if name in tensors}
    )
    fields: dict[str, Any] = dict(tensors)
    reward: Tensor = fields.pop("reward")
    found = Rollout(**fields)
    rows, size, prompts, each = (sizes[dim] for dim in "BSNG")
    if not rows or rows != prompts * each:
        raise ValueError(
            f"reward: expected {rows} numbers, one for each response, got {prompts} times {each}"
        )

    most = _INT64 - 1 if vocabulary is None else vocabulary - 1
    _within("tokens", found.tokens, 0, most)
    _within("length", found.length, 1, size)
    _within("version", found.version, 0, _INT64 - 1)
    groups = torch.arange(prompts).repeat_interleave(each)
    if not torch.equal(found.group, groups):
        raise ValueError(
            f"group: expected {each} rows of each of {prompts} prompts in order, got "
            f"{quoted(found.group.tolist())}"
        )
    place = torch.arange(size)
    if bool((found.mask & ((place == 0) | (place >= found.length[:, None]))).any()):
        raise ValueError("mask: expected tokens behind the first and within the length, got others")
    _within("logp", found.logp, LEAST_LOGP, ROUNDING)
    if bool(found.logp[~found.mask].any()):
        raise ValueError("logp: expected 0 outside mask, got other numbers")
    _within("reward", reward, -_LARGEST, _LARGEST)
    if found.temperature is not None and not bool(
        (found.temperature.isfinite() & (found.temperature > 0)).all()
    ):
        raise ValueError("temperature: expected finite numbers above 0, got others")
    return found, reward


def _within(name: str, x: Tensor, low: float, high: float) -> None:
    """Raise ValueError for a number of a tensor outside of [low, high]; NaN is outside."""
    wrong = x[~((x >= low) & (x <= high))]
    if len(wrong):
        limits = f"of at least {low}" if high == _INT64 - 1 else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: expected numbers {limits}, got {wrong[0].item()}")


# ---------- what foreign code raises


def is_ours(error: BaseException) -> bool:
    """Return whether an exception is no answer of the foreign code that it comes out of.

    It is a person's Ctrl-C, which only the main thread gets, the end of a generator, or the end of a task
    that this package has cancelled.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if isinstance(error, asyncio.CancelledError):
        with suppress(RuntimeError):  # no event loop runs here
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
        return False
    return isinstance(error, GeneratorExit)


def contained(error: BaseException) -> Exception:
    """Return what foreign code raised, as an exception that ends no server, thread or rank.

    SystemExit, CancelledError, a KeyboardInterrupt of the code's own, a panic of Rust and the like derive
    from BaseException, and StopIteration passes through no future: each becomes RuntimeError with its name.
    """
    stopping = StopIteration, StopAsyncIteration, concurrent.futures.CancelledError
    if isinstance(error, Exception) and not isinstance(error, stopping):
        return error
    made = RuntimeError(f"{type(error).__name__}: {error_text(error)}")
    for note in getattr(error, "__notes__", ()):
        made.add_note(str(note))
    made.__cause__ = error
    return made
