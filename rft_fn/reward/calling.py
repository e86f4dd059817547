"""One call of a reward: its arguments, what it logs, and its name in whatever it raises."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rft_fn import border
from rft_fn.reward.reward_record import Reward

__all__ = ["Call", "Log", "awaited", "listed", "noted"]


class Log:
    """The numbers and values that a reward function logs, by `log_metric` and `log_extra`."""

    def __init__(self, reward: str, count: int):
        self._reward = reward
        self._count = count
        self._numbers: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        """Add a number for the batch; the mean of the numbers with one name is logged.

        ValueError for infinity.
        """
        number = float(value)
        if math.isinf(number):
            raise ValueError(
                f"reward {self._reward!r}: log_metric({name!r}): expected a number, got {number}"
            )
        self._numbers.setdefault(name, []).append(number)

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
        """Return the means by name, as the same number for every completion [B]."""
        return {
            name: torch.full((self._count,), sum(values) / len(values))
            for name, values in self._numbers.items()
        }


class Call:
    """A reward, the rows of a batch that it is to score, and what it logs about them."""

    def __init__(self, reward: Reward, rows: Sequence[int]):
        self.reward = reward
        self.log = Log(reward.name, len(rows))
        self._rows = rows

    def arguments(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reward's arguments out of those of the whole batch. ValueError for a missing one."""
        given: dict[str, Any] = {}
        for name, values in batch.items():
            given[name] = [values[row] for row in self._rows] if isinstance(values, list) else values
        return self.reward.arguments(given | {"log_metric": self.log.metric, "log_extra": self.log.further})


def listed(result: object) -> object:
    """Return the result of a function; an iterator, which computes when it is read, as a list."""
    if isinstance(result, Iterator) and not inspect.isawaitable(result):
        return list(result)
    return result


async def awaited(name: str, result: Awaitable[object]) -> object:
    """Await the result of an async function; see `noted`."""
    with noted(name):
        return await result


@contextmanager
def noted(name: str) -> Iterator[None]:
    """Add a note with the reward's name to any error; what would end the process becomes an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by the reward {name!r}")
        raise
    except BaseException as error:
        if border.is_ours(error):
            raise
        if isinstance(error, SystemExit):
            made: Exception = ValueError(
                f"reward {name!r}: expected a list of numbers, got sys.exit({border.quoted(error.code)}); "
                "raise an error to stop the run, return 0.0 for a completion that cannot be scored"
            )
        elif isinstance(error, asyncio.CancelledError):
            made = ValueError(f"reward {name!r}: expected a list of numbers, got a cancelled task")
        else:
            made = border.contained(error)
        made.add_note(f"raised by the reward {name!r}")
        raise made from error
