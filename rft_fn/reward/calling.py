"""Call reward functions: async ones wait for a network while the others compute."""

import asyncio
import concurrent.futures as futures
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rft_fn import border
from rft_fn.reward.event_loop import EventLoop
from rft_fn.reward.signature import RewardFn, asks_for, column_names, required, taken

__all__ = ["Call", "Caller", "Log", "noted"]


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
    """A reward function, and the rows of a batch that it is to score."""

    def __init__(self, name: str, fn: RewardFn, batch: Mapping[str, Any], rows: Sequence[int]):
        self.name = name
        self.fn = fn
        self.log = Log(name, len(rows))
        self._batch = batch
        self._rows = rows

    @property
    def waits(self) -> bool:
        """Return whether the function is async, and so can begin before others compute.

        An object that returns an awaitable from a plain `__call__` says so by its attribute `waits`.
        """
        call = getattr(self.fn, "__call__", None)  # noqa: B004  of an object with one
        asynchronous = inspect.iscoroutinefunction(self.fn) or inspect.iscoroutinefunction(call)
        return asynchronous or getattr(self.fn, "waits", False) is True

    def start(self) -> object:
        """Return the result of the function, an awaitable if it is async."""
        given: dict[str, Any] = {}
        for name, values in self._batch.items():
            given[name] = [values[row] for row in self._rows] if isinstance(values, list) else values
        given |= {"log_metric": self.log.metric, "log_extra": self.log.further}
        for column in required(self.fn):
            if column not in given:
                raise ValueError(
                    f"reward {self.name!r}: column {column!r} is not in the dataset; "
                    f"its columns are: {column_names(given)}"
                )
        arguments = taken(self.fn, given)
        if not asks_for(self.fn, "media"):  # **kwargs is not enough to have files sent along
            arguments.pop("media", None)
        with noted(self.name):
            result = self.fn(**arguments)
            if isinstance(result, Iterator) and not inspect.isawaitable(result):  # computes when it is read
                result = list(result)
        return result


class Caller:
    """Calls the functions of a score, batch after batch, with one event loop for the async ones."""

    def __init__(self) -> None:
        self.running = ""  # the reward that is being computed, or the one that raised
        self._loop = EventLoop()

    def results(
        self, calls: Sequence[Call], meanwhile: Callable[[], Mapping[str, object]]
    ) -> dict[str, object]:
        """Return the results of all functions by name, with those of `meanwhile`.

        Async functions begin first. While they wait, `meanwhile` computes, and then the plain ones, one after
        the other. What any of them raises ends the others.
        """
        waiting: dict[str, futures.Future[object]] = {}
        done: dict[str, object] = {}
        try:
            self._start([call for call in calls if call.waits], done, waiting)
            done |= meanwhile()
            self._start([call for call in calls if not call.waits], done, waiting)
            return done | self._wait(waiting)
        except BaseException:
            self._loop.close()
            raise

    def _start(
        self, calls: Sequence[Call], found: dict[str, object], waiting: dict[str, futures.Future[object]]
    ) -> None:
        """Call functions: put results into `found`, and futures of async ones into `waiting`."""
        for call in calls:
            self.running = call.name
            result = call.start()
            if inspect.isawaitable(result):
                waiting[call.name] = self._loop.start(_awaited(call.name, result))
            else:
                found[call.name] = result

    def _wait(self, waiting: Mapping[str, futures.Future[object]]) -> dict[str, object]:
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

    def close(self) -> None:
        """End the event loop."""
        self._loop.close()


async def _awaited(name: str, result: Awaitable[object]) -> object:
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
