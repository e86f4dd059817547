"""The process that `rft_fn.engine.process` starts: it builds one engine, and answers calls to it.

A request is pickled (name, args, options), its answer an Answer. Both travel by a socket; weights lie in
memory that both processes share, whose file descriptor follows the request.
"""

import mmap
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.types import Engine
from rft_fn.types.engine import EngineStatus

__all__ = ["Answer", "Place", "main"]

_PARENT_LOOK = 0.5  # s between two looks at whether the parent is alive


class Answer(NamedTuple):
    """What came of a call."""

    value: Any  # None for one that failed
    error: BaseException | None
    trace: str  # the traceback of the error
    status: EngineStatus | None  # of the engine after the call; None before it was built


class Place(NamedTuple):
    """Where a weight lies in the shared memory."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int  # bytes


class _Shared(Iterator[tuple[str, Tensor]]):
    """Weights by name, read in place from shared memory."""

    def __init__(self, places: Sequence[Place], frozen: frozenset[str], descriptor: int):
        self.places = iter(places)
        self.frozen = frozen
        self.memory: Any = b""
        # an engine that keeps a tensor keeps the mapping with it; what it writes there stays its own
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __next__(self) -> tuple[str, Tensor]:
        place = next(self.places)
        count = place.shape.numel()
        if not count:
            return place.name, torch.empty(place.shape, dtype=place.dtype)
        flat = torch.frombuffer(self.memory, dtype=place.dtype, count=count, offset=place.start)
        return place.name, flat.view(place.shape)


def _leave_with(parent: int) -> None:
    """End this process, and all that it started, when its parent has gone."""
    while os.getppid() == parent:
        time.sleep(_PARENT_LOOK)
    os.killpg(0, signal.SIGKILL)


def _build(
    build: Any, config: Any, model: Any, tokenizer: Any, *, threads: int, device: int | None
) -> Engine:
    """The engine, in as many threads and on the device that the parent says."""
    torch.set_num_threads(threads)
    if device is not None:
        torch.cuda.set_device(device)
    return build(config, model, tokenizer)


def _portable(error: BaseException) -> BaseException:
    """The error itself where its type can be sent, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


class _Server:
    """Answers calls to the engine, one after the other."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.engine: Engine | None = None

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The value of one call; the first one builds the engine."""
        if name == "build":
            self.engine = _build(*args, **options)
            return None
        assert self.engine is not None
        if name == "load":
            places, frozen = args
            weights = _Shared(places, frozen, reduction.recv_handle(self.pipe))
            return self.engine.load(weights, **options)
        value = getattr(self.engine, name)(*args, **options)
        if name == "generate":
            value = tree.replace(value, media=None)  # the parent has them
        return value

    def answer(self, request: bytes) -> Answer:
        """The answer to a request, also to one that fails."""
        value, error, trace = None, None, ""
        try:
            value = self.call(*pickle.loads(request))
        except BaseException as found:
            error = _portable(found)
            trace = traceback.format_exc()
        status = None
        if self.engine is not None:
            status = self.engine.status()
        return Answer(value, error, trace, status)


def main() -> None:
    """Serve until the parent closes the socket `sys.argv[2]`; `sys.argv[3]` is the parent's process."""
    descriptor, parent = (int(x) for x in sys.argv[2:4])
    # Ctrl-C is for the parent, which finishes its step with this engine
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()

    pipe = Connection(descriptor)
    server = _Server(pipe)
    while True:
        try:
            request = pipe.recv_bytes()
            pipe.send_bytes(pickle.dumps(server.answer(request)))
        except (EOFError, OSError):
            break
    if server.engine is not None:
        server.engine.close()
