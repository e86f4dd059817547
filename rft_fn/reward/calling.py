"""Call reward functions: async ones wait for a network while the others compute."""

import asyncio
import concurrent.futures as futures
import inspect
import io
import math
import mimetypes
import threading
import wave
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rft_fn import border
from rft_fn.data.decode import image
from rft_fn.data.medium import Content, Medium, label, read
from rft_fn.reward.signature import RewardFn, asks_for, column_names, required, taken

__all__ = ["Call", "Caller", "EventLoop", "Log", "in_thread", "media_records", "noted"]


T = TypeVar("T")


# ---------- one event loop for all async functions of a kind


_PATIENCE = 2.0  # seconds for coroutines to end once they are cancelled
_ANSWERS = 0.5  # seconds in which a loop that nothing blocks does anything


class EventLoop:
    """Runs coroutines, all of them in one event loop."""

    def __init__(self) -> None:
        self._thread: _Thread | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine, and return the future of its result."""
        future = self._thread.submit(coroutine) if self._thread is not None else None
        if future is None:  # a task that exits ends its thread
            self._thread = _Thread()
            self._thread.start()
            weakref.finalize(self, self._thread.end)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop)
        return future

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine, and return its result; on failure or interruption cancel all others."""
        try:
            return self.start(coroutine).result()
        except BaseException:
            self.close()
            raise

    def leave_if_blocked(self) -> threading.Thread | None:
        """Leave a loop that a coroutine blocks, and return its thread; the next start makes another."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return None
        answered = threading.Event()
        thread.loop.call_soon_threadsafe(answered.set)
        if answered.wait(_ANSWERS) or self._thread is not thread:
            return None
        self._thread = None
        thread.loop.call_soon_threadsafe(thread.loop.stop)
        return thread

    def close(self) -> None:
        """Cancel everything that has not ended, and end the loop; the next start makes another."""
        if self._thread is not None:
            self._thread.end()
        self._thread = None


async def in_thread(call: Callable[[], T], interrupt: Callable[[], None]) -> T:
    """Run a plain function that waits for a network in a new thread, and return its result.

    Where this is cancelled, it calls `interrupt`, which must make the function return or raise. Nobody waits
    for the thread, not even the end of the process.
    """
    future: Future[T] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled under this thread
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(border.contained(error))

    threading.Thread(target=work, daemon=True, name="rft_fn waiting reward").start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        interrupt()
        raise


class _Thread(threading.Thread):
    """A thread that runs an event loop until its end."""

    def __init__(self) -> None:
        super().__init__(name="rft_fn event loop", daemon=True)
        self.loop = asyncio.new_event_loop()
        self._taking = True  # what comes later would wait for ever in a loop that has stopped
        self._lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Start the coroutine; None where the loop has stopped."""
        with self._lock:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop) if self._taking else None

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            try:
                with suppress(SystemExit):  # of a task, which ends the others and not the process
                    self.loop.run_forever()
            finally:
                with self._lock:
                    self._taking = False
            self.loop.run_until_complete(asyncio.sleep(0))  # one that never ran could not end what it awaits
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def end(self) -> None:
        """End the loop; a blocked one is left running, for it cannot be interrupted."""
        if self.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.join(_PATIENCE)


# ---------- calls of reward functions


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


# ---------- the media of prompts as rewards get them


_BEGINNINGS = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"fLaC": "audio/flac",
    b"ID3": "audio/mpeg",
    b"OggS": "audio/ogg",
}
"""How files of a type begin."""


def media_records(media: Sequence[Medium]) -> list[dict[str, Any]]:
    """Return one record for each medium, in their order: its kind, its type, and the bytes of its file.

    {"kind": "image", "mime": "image/png", "bytes": ...}; of a URL, which is not fetched, {"kind", "mime",
    "url"}. The kind is image, video or audio; an unknown type is application/octet-stream. An array becomes a
    PNG or a WAV file, a video of frames an animated PNG. ValueError as the data's own reader raises it.
    """
    records: list[dict[str, Any]] = []
    for medium in media:
        name = label(medium.source)
        if name.startswith(("http://", "https://")):
            records.append({"kind": medium.kind, "mime": _mime(b"", name), "url": name})
        else:
            file = _file(medium.kind, read(medium))
            records.append({"kind": medium.kind, "mime": _mime(file, name), "bytes": file})
    return records


def _file(kind: str, content: Content) -> bytes:
    """Return the content of a medium as a file."""
    if isinstance(content, bytes):
        return content
    if kind == "audio":
        return _wav(content)
    pictures = [image(frame)[0] for frame in ([content] if kind == "image" else content)]
    file = io.BytesIO()
    pictures[0].save(file, "PNG", save_all=len(pictures) > 1, append_images=pictures[1:])
    return file.getvalue()


def _wav(content: Any) -> bytes:
    """Return (samples [n] or [n, channels] in [-1, 1], rate) as a WAV file of 16 bits."""
    if not isinstance(content, tuple):
        raise ValueError("audio: expected a file, or {'array', 'sampling_rate'}: an array has no rate")
    samples = np.asarray(content[0], dtype=np.float64)
    samples = samples.reshape(len(samples), -1)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(samples.shape[1])
        out.setsampwidth(2)
        out.setframerate(content[1])
        out.writeframes((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


def _mime(file: bytes, name: str) -> str:
    """Return the type of a file, by how it begins, else by its name."""
    for beginning, mime in _BEGINNINGS.items():
        if file.startswith(beginning):
            return mime
    if file.startswith(b"RIFF"):
        return {b"WAVE": "audio/wav", b"WEBP": "image/webp"}.get(file[8:12], "video/x-msvideo")
    return mimetypes.guess_type(name)[0] or "application/octet-stream"
