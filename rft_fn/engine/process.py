"""Runs an engine in a separate process, so that it samples while this process trains.

The process is started fresh and imports nothing of the script, so scripts need no `__main__` guard. Requests
and rollouts are pickled; weights are written once, one tensor after the other, into memory that both
processes share and that disappears with them. The process ends with `close`, at the first failure, and when
it finds that its parent has gone, however that ended.
"""

import json
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import tree
from rft_fn.border import contained
from rft_fn.engine import prompt_media
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.lifetime import EngineCore, EngineDead, supervised
from rft_fn.engine.requests import Request
from rft_fn.model.lora_alone import are_adapters
from rft_fn.text import error_text
from rft_fn.types import Engine, Media, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus, OnRow

__all__ = ["Answer", "Place", "main", "own_process"]


# ---------- the started process: it builds one engine, and answers calls to it

_PARENT_LOOK = 0.5  # s between two looks at whether the parent is alive


class Answer(NamedTuple):
    """The result of a call."""

    value: Any  # None for one that failed
    error: BaseException | None
    trace: str  # the traceback of the error
    status: EngineStatus | None  # of the engine after the call; None before it was built


class RowEnded(NamedTuple):
    """A row that has ended, in the middle of a call: the arguments of `OnRow`."""

    number: int
    tokens: Sequence[int]
    ended: bool


class Place(NamedTuple):
    """The place of a weight in the shared memory."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int  # bytes


class _Shared(Iterator[tuple[str, Tensor]]):
    """Weights by name, read in place from shared memory."""

    def __init__(self, places: Sequence[Place], frozen: frozenset[str], descriptor: int):
        self.places = iter(places)
        self.frozen = frozen
        self.adapters = are_adapters(place.name for place in places)
        self.memory: Any = b""
        # an engine that keeps a tensor keeps the mapping with it; what it writes there is private
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


def _portable(error: BaseException) -> BaseException:
    """Return the error itself where its type can be sent and ends no process, else its text."""
    found = contained(error)
    try:
        pickle.loads(pickle.dumps(found))
        return found
    except BaseException:  # how it is pickled is foreign code, too
        return RuntimeError(f"{type(error).__name__}: {error_text(error)}")


class _Server:
    """Answers calls to the engine, one after the other."""

    def __init__(self, pipe: Connection, aside: Connection | None = None):
        self.pipe = pipe
        self.aside = aside  # for loads in the middle of other calls; None without any
        self.engine: Engine | None = None
        self.telling = threading.Lock()  # rows of servers end in several threads

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return the value of one call; the first one builds the engine."""
        if name == "build":
            torch.set_num_threads(options["threads"])
            if options["device"] is not None:
                torch.cuda.set_device(options["device"])
            build, config, model, tokenizer = args
            self.engine = supervised(partial(build, config, model, tokenizer))
            if self.aside is not None:
                loads = _Server(self.aside)
                loads.engine = self.engine
                threading.Thread(target=loads.serve, daemon=True).start()
            return None
        assert self.engine is not None
        if name == "load":
            places, frozen = args
            weights = _Shared(places, frozen, reduction.recv_handle(self.pipe))
            return self.engine.load(weights, **options)
        if name == "generate":
            (request,) = args
            if options["rows"]:
                request = request._replace(on_row=self.tell)
            return tree.replace(request.ask(self.engine), media=None)  # the parent has them
        return getattr(self.engine, name)(*args, **options)

    def tell(self, *row: Any) -> None:
        """Send a row that has ended, before the answer."""
        with self.telling:
            self.pipe.send_bytes(pickle.dumps(RowEnded(*row)))

    def answer(self, request: bytes) -> Answer:
        """Return the answer to a request, also to one that fails."""
        value, error, trace = None, None, ""
        try:
            value = self.call(*pickle.loads(request))
        except BaseException as raised:
            error = _portable(raised)
            trace = traceback.format_exc()
        status: EngineStatus | None = None
        try:
            status = self.engine.status() if self.engine is not None else None
        except BaseException as raised:
            error = error or _portable(raised)
        return Answer(value, error, trace, status)

    def packed(self, request: bytes) -> bytes:
        """Return the answer to a request as bytes; an answer that cannot be sent is an error."""
        found = self.answer(request)
        try:
            return pickle.dumps(found)
        except BaseException as raised:
            return pickle.dumps(Answer(None, _portable(raised), traceback.format_exc(), found.status))

    def serve(self) -> None:
        """Answer until the parent closes the socket."""
        with suppress(EOFError, OSError):
            while True:
                request = self.pipe.recv_bytes()
                self.pipe.send_bytes(self.packed(request))


def main() -> None:
    """Serve until the parent closes the socket `sys.argv[3]`; `sys.argv[2]` is the parent's process.

    `sys.argv[4]` is another socket, for loads in the middle of other calls, if there are any.
    """
    parent, *descriptors = (int(x) for x in sys.argv[2:])
    # Ctrl-C is for the parent, which finishes its step with this engine
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()

    server = _Server(*map(Connection, descriptors))
    server.serve()
    if server.engine is not None:
        server.engine.close()


# ---------- the calls to it

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rft_fn.engine.process import main; main()"
)
_LOOK = 0.2  # s between two looks at whether the process is alive
_GOODBYE = 5.0  # s for the process to end by itself
_ALIGN = 64  # bytes
# an engine is not one of the processes that torchrun started
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


def own_process(
    build: Callable[[EngineConfig, Any, Any], EngineCore | Engine],
    config: EngineConfig,
    model: str | nn.Module,
    tokenizer: Any,
) -> Engine:
    """Build an engine in a separate process; each call has `config.timeout` seconds.

    It computes in `config.threads` threads, or in as many as this process does. A module is copied there; it
    and `build` must be picklable. EngineDead with one line if the process is killed or gives no answer in
    time; what an engine raises is raised here, with its traceback as the cause. Either ends the process,
    except for a refused request.
    """
    engine = _Process(config)
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    with engine.end_on_failure("build"):
        engine.call("build", build, config, model, tokenizer, threads=engine.threads, device=device)
    return supervised(lambda: engine)


class _RemoteTraceback(Exception):
    """The traceback of an error in the engine's process, as the cause of the error here."""


class _Process:
    """The process of an engine, and the calls to it, one at a time."""

    def __init__(self, config: EngineConfig):
        self.timeout = config.timeout
        self.threads = config.threads or torch.get_num_threads()
        self.last: EngineStatus = {
            "engine": config.type,
            "alive": True,
            "version": 0,
            "asleep": False,
            "supported": frozenset(),
        }
        self.ended = ""  # how the process ended; empty while it runs
        self.busy = threading.Lock()
        self.loading = threading.Lock() if config.in_flight else self.busy

        # a separate group: Ctrl-C and torchrun's signals are for this process, which still needs the engine
        self.pipe, *theirs = Pipe()
        self.aside = self.pipe  # of loads
        if config.in_flight:
            self.aside, more = Pipe()
            theirs.append(more)
        descriptors = [x.fileno() for x in theirs]
        arguments = [json.dumps(sys.path), str(os.getpid()), *map(str, descriptors)]
        environment = {
            name: x
            for name, x in os.environ.items()
            if name not in _TORCHRUN and not name.startswith(_TORCHRUN_PREFIXES)
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments],
            pass_fds=descriptors,
            env=environment | {"OMP_NUM_THREADS": str(self.threads)},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        for x in theirs:
            x.close()

    # ---- the functions of the engine

    def sample(self, request: Request) -> Rollout:
        """Send tokens, and the media of each prompt once; none come back."""
        sent = prompt_media.to_send(request.prompts)
        asked = request._replace(prompts=sent, keys=list(request.keys), on_row=None)
        rows = request.on_row is not None
        with self.end_on_failure("generate"):
            rollout = self.call("generate", asked, rows=rows, on_row=request.on_row)
        media = [p.media if isinstance(p, prompt_media.Sent) else None for p in sent]
        return tree.replace(rollout, media=Media.of_prompts(media, request.n))

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        with self.end_on_failure("score"):
            return self.call("score", rollout, sampling=sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Write weights into shared memory, which is freed when the engine has read it."""
        began = time.perf_counter()
        with self.end_on_failure("load", self.loading), _shared_memory() as memory:
            places = _write(memory, weights)
            frozen = frozenset(getattr(weights, "frozen", ()))
            delivered = self.call(
                "load", places, frozen, version=version, descriptor=memory.fileno(), aside=True
            )
        return delivered._replace(seconds=time.perf_counter() - began)

    def sleep(self) -> None:
        with self.end_on_failure("sleep"):
            self.call("sleep")

    def wake(self) -> None:
        with self.end_on_failure("wake"):
            self.call("wake")

    def status(self) -> EngineStatus:
        """Return the state after the last call; the engine itself may be busy."""
        alive = not self.ended and self.process.poll() is None
        return {**self.last, "alive": alive and self.last["alive"]}

    def close(self) -> None:
        """End the process: by itself if it is idle, at once if it is in the middle of a call."""
        locks = {self.busy, self.loading}
        calling = [lock for lock in locks if not lock.acquire(blocking=False)]
        if calling:
            self.end("was closed")
        for lock in calling:
            lock.acquire()  # the thread that waits for an answer ends too
        self.pipe.close()
        self.aside.close()
        for lock in locks:
            lock.release()
        self.wait()
        self.end("was closed")

    # ---- calls

    @contextmanager
    def end_on_failure(self, name: str, busy: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """End the process if the block raises and leaves an engine that cannot be called again."""
        try:
            with busy or self.busy:
                yield
        except _Refused as refused:
            raise refused.error from _RemoteTraceback(refused.trace)
        except EngineDead:
            raise
        except BaseException as error:
            self.end(f"failed in {name} ({type(error).__name__}: {error_text(error)})")
            raise

    def call(
        self,
        name: str,
        *args: Any,
        descriptor: int | None = None,
        on_row: OnRow | None = None,
        aside: bool = False,
        **options: Any,
    ) -> Any:
        """Return the value of one call of the engine. EngineDead if the process is gone, or too slow."""
        pipe = self.aside if aside else self.pipe
        if self.ended:
            raise self.dead(self.ended)
        try:
            pipe.send_bytes(pickle.dumps((name, args, options)))
            if descriptor is not None:
                reduction.send_handle(pipe, descriptor, self.process.pid)
            answer = self.receive(name, pipe)
            while isinstance(answer, RowEnded):
                if on_row is not None:
                    on_row(*answer)
                answer = self.receive(name, pipe)
        except (EOFError, OSError):
            self.end(f"{self.wait()} in {name}")
            raise self.dead(self.ended) from None
        if answer.status is not None:
            self.last = answer.status
        if answer.error is None:
            return answer.value
        if answer.status is not None and answer.status["alive"]:
            raise _Refused(answer.error, answer.trace)
        raise answer.error from _RemoteTraceback(answer.trace)

    def receive(self, name: str, pipe: Any) -> Answer | RowEnded:
        """Return the next message of a call. EOFError where the process has ended without one."""
        deadline = time.monotonic() + self.timeout
        while not pipe.poll(_LOOK):
            if self.process.poll() is not None:
                raise EOFError
            if time.monotonic() > deadline:
                self.end(f"gave no answer to {name} within {self.timeout:g} s")
                raise self.dead(self.ended)
        return pickle.loads(pipe.recv_bytes())

    def wait(self) -> str:
        """Return how the process ended, by itself and within a short time."""
        try:
            code = self.process.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def end(self, why: str) -> None:
        """Kill the process and all that it started, unless that was done before."""
        if self.ended:
            return
        self.ended = why
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def dead(self, why: str) -> EngineDead:
        """Return the error of an engine after the end of its process."""
        name = self.last["engine"]
        return EngineDead(
            f"engine {name}: its process {self.process.pid} {why}; build another with get_engine"
        )


class _Refused(Exception):
    """An error after which the engine is alive: a request that was refused."""

    def __init__(self, error: BaseException, trace: str):
        super().__init__(error_text(error))
        self.error = error
        self.trace = trace


@contextmanager
def _shared_memory() -> Iterator[IO[bytes]]:
    """Open a file without a name, in memory where the system can."""
    # not in /dev/shm: containers often give that 64 MB
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            yield file
        return
    with os.fdopen(os.memfd_create("rft_fn weights"), "wb") as file:
        yield file


def _write(memory: IO[bytes], weights: Iterable[tuple[str, Tensor]]) -> list[Place]:
    """Write the weights one after the other, and return the place of each."""
    places = []
    for name, x in weights:
        start = -(-memory.tell() // _ALIGN) * _ALIGN
        memory.seek(start)
        plain = x.detach().cpu().contiguous().flatten()
        memory.write(plain.view(torch.uint8).numpy().data)
        places.append(Place(name, x.dtype, x.shape, start))
    memory.flush()
    return places
