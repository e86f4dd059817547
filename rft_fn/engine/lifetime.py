"""Holds the options of an engine; wraps one to be built late, answer in time, and die once it failed."""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar

from torch import Tensor

from rft_fn import check, dist
from rft_fn.check import Count, Range, Share, Whole, error_text, printable
from rft_fn.engine.requests import BadRequest, drawn_with, given
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus, described, record

__all__ = [
    "EngineConfig", "EngineDead", "config_of", "dead_after_failure", "deferred", "limited", "on_rank0",
    "saving", "time_limit",
]  # fmt: skip


# ---------- limits the time of a block of Python code, also where it waits for a lock, a server or C code


T = TypeVar("T")

OF_A_BATCH = "the limit for a batch, got none; make it faster, or raise the limit"
SAVING = 300.0  # seconds that saving may take before the process ends
GRACE = 10.0  # seconds for a block to give way once it has been interrupted
FAILED = 2  # exit code of an error of the user's
# nothing else uses it on Linux, unlike SIGALRM, which math-verify sets; 0 where a system has neither
SIGNAL: int = getattr(signal, "SIGRTMIN", getattr(signal, "SIGUSR2", 0))


class _Expired(BaseException):
    """Raised inside a block at its time limit. No `Exception`: rewards catch those and try the next one."""


@contextmanager
def time_limit(
    seconds: float,
    name: Callable[[], str],
    *,
    advice: str = OF_A_BATCH,
    before_end: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Interrupt the block after `seconds`.

    It then raises TimeoutError with name(), the limit and `advice`. A thread watches the clock and sends this
    one a signal, and its handler raises: that ends a sleep, a wait for a lock or a blocked read. A block that
    runs for `GRACE` seconds more ends the process, with the stack of all threads and the line. Where C code
    keeps the interpreter from running any thread at all, faulthandler's own thread ends the process after
    another `GRACE` seconds, with only the stack.

    `before_end` is called by the watching thread before it ends the process, to save what can be saved within
    `SAVING` seconds; what it returns ends the line. Outside of the main thread nothing can be interrupted.
    Without `before_end` the line is printed there, and the block is waited for; with it the process ends.
    """
    clock = _Clock(seconds, name, advice, before_end)
    clock.start()
    try:
        try:
            yield
        except BaseException as error:
            if clock.interrupted:  # whatever the block has made of the interruption
                raise TimeoutError(clock.line) from error
            raise
        finally:
            clock.over.set()
    finally:
        clock.stop()
    if clock.interrupted:  # the block has caught even this, and made up a result
        raise TimeoutError(clock.line)


class _Clock:
    """Watches the time of one block of the thread that makes it."""

    def __init__(
        self, seconds: float, name: Callable[[], str], advice: str, before_end: Callable[[], str] | None
    ):
        self.seconds = seconds
        self.name = name
        self.advice = advice
        self.before_end = before_end
        self.line = ""  # written at the limit: later the score may be at its next reward
        self.over = threading.Event()
        self.owner = threading.current_thread()
        self.can_interrupt = bool(SIGNAL) and self.owner is threading.main_thread()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="rft_fn time limit")
        self.handler: Any = None  # of the signal before; None: one that is not Python's

    @property
    def interrupted(self) -> bool:
        """Return whether the block has run into its limit, and was interrupted."""
        return bool(self.line) and self.can_interrupt

    def start(self) -> None:
        """Begin to count."""
        if self.can_interrupt:
            self.handler = signal.signal(SIGNAL, self._interrupt)
            faulthandler.dump_traceback_later(min(self.seconds, 1e6) + 2 * GRACE, exit=True, file=2)
        self.thread.start()

    def stop(self) -> None:
        """Stop to count, and put the signal's handler back."""
        # the handler stays until the thread is done: a late signal must not meet the default one, which kills
        self.over.set()
        self.thread.join()
        if self.can_interrupt:
            faulthandler.cancel_dump_traceback_later()
        if self.handler is not None:
            signal.signal(SIGNAL, self.handler)

    def _watch(self) -> None:
        if self.over.wait(min(self.seconds, threading.TIMEOUT_MAX)):
            return
        self.line = f"{self.name()}: expected a result within {self.seconds:g} s, {self.advice}"
        owner = self.owner.ident
        if self.can_interrupt and owner is not None:
            signal.pthread_kill(owner, SIGNAL)
        elif self.before_end is None:
            print(f"warning: {printable(self.line)}", file=sys.stderr, flush=True)
            return

        # the last resort is the end of the process: the other ranks wait for this one
        if not self.over.wait(GRACE):
            self._end()

    def _end(self) -> None:
        """End the process, after what can be saved was saved."""
        faulthandler.dump_traceback_later(SAVING, exit=True, file=2)  # saving may hang too
        faulthandler.dump_traceback(file=2)
        saved = ""
        if self.before_end is not None:
            try:
                saved = self.before_end()
            except BaseException:
                traceback.print_exc()
        line = printable(f"error: {self.line} (it cannot be interrupted){saved}")
        print(line, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(FAILED)

    def _interrupt(self, *_: Any) -> None:
        if not self.over.is_set():
            raise _Expired(self.line)


# ---------- time limits for the calls of an engine in this process

_ADVICE = "the time of a call, got none; raise engine_timeout, or build another engine"
_savers: list[Callable[[], str]] = []  # of the blocks that are entered


@contextmanager
def saving(save: Callable[[], str]) -> Iterator[None]:
    """Call `save` if an engine hangs in native code within the block, before that ends the process.

    Another thread calls it while the engine hangs. It returns what the last line says of it.
    """
    _savers.append(save)
    try:
        yield
    finally:
        _savers.pop()


def limited(engine: Engine, seconds: float, *, several: bool = False) -> Engine:
    """Return an engine that is dead when a call has taken `seconds`.

    `generate`, `score` and `load` raise TimeoutError then. This interrupts Python. A call that stays in
    native code for some seconds more ends the process, with the stack of all threads and one line, and exit
    code 2; `saving` says what is saved before that. With `several` a load waits for other processes, so it
    has the limit of their group and not this one.
    """
    name = engine.status()["engine"]

    def save() -> str:
        return _savers[-1]() if _savers else ""

    def within(call: str, f: Callable[..., T]) -> Callable[..., T]:
        @wraps(f)
        def call_in_time(*args: Any, **options: Any) -> T:
            with time_limit(seconds, lambda: f"engine {name}, {call}", advice=_ADVICE, before_end=save):
                return f(*args, **options)

        return call_in_time

    return engine._replace(
        generate=within("generate", engine.generate),
        score=within("score", engine.score),
        load=engine.load if several else within("load", engine.load),
    )


# ---------- holds the options of an engine


def deferred(build: Callable[[], Engine]) -> Engine:
    """Return the engine that `build` makes when it is woken or asked for anything but its status.

    Until then it is alive and asleep, and its status says nothing about the model. `sleep` and `close` build
    nothing.
    """
    built: list[Engine] = []

    def engine() -> Engine:
        if not built:
            built.append(build())
        return built[0]

    def status() -> EngineStatus:
        if built:
            return built[0].status()
        return {"engine": "deferred", "alive": True, "version": 0, "asleep": True, "supported": frozenset()}

    functions = Engine(
        generate=lambda *args, **options: engine().generate(*args, **options),
        score=lambda *args, **options: engine().score(*args, **options),
        load=lambda *args, **options: engine().load(*args, **options),
        sleep=lambda: built[0].sleep() if built else None,
        wake=lambda: engine().wake(),
        status=status,
        close=lambda: built[0].close() if built else None,
    )
    return described(functions)


class EngineDead(RuntimeError):
    """A call to an engine that has failed or was closed."""


class _Lifetime:
    """The functions of an engine, with `generate` and `load` fatal where they raise."""

    def __init__(self, engine: Engine):
        self.engine: Engine | None = engine
        self.last: EngineStatus = engine.status()
        self.ended = ""  # why it is not alive; empty while it is

    def running(self) -> Engine:
        """Return the engine itself. EngineDead, with the reason, for one that is not alive."""
        if self.engine is None or self.ended:
            raise EngineDead(
                f"engine {self.last['engine']}: expected one that is alive, got one that {self.ended}; "
                "build another with get_engine"
            )
        return self.engine

    @contextmanager
    def mark_dead(self, name: str) -> Iterator[Engine]:
        """Mark the engine dead if the block raises anything but BadRequest."""
        engine = self.running()
        try:
            yield engine
        except BadRequest:
            raise
        except BaseException as error:
            # only the text: the error itself would keep the tensors of its frames in memory
            reason = f"{type(error).__name__}: {error_text(error)}"
            self.ended = f"failed in {name} ({reason})"
            raise

    def generate(
        self,
        prompts: Sequence[Any],
        keys: Sequence[Any],
        *,
        n: int = 1,
        sampling: Sampling,
        max_new: Sequence[int] | None = None,
        start: Sequence[int] | None = None,
        temperature: Sequence[float] | None = None,
    ) -> Rollout:
        of_rows = given(max_new, start, temperature)
        with self.mark_dead("generate") as engine:
            rollout = engine.generate(prompts, keys, n=n, sampling=sampling, **of_rows)
        return drawn_with(rollout, sampling, temperature)

    def score(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        return self.running().score(rollout, sampling=sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        with self.mark_dead("load") as engine:
            return engine.load(weights, version=version)

    def sleep(self) -> None:
        self.running().sleep()

    def wake(self) -> None:
        self.running().wake()

    def status(self) -> EngineStatus:
        if self.engine is not None:
            self.last = self.engine.status()
        if self.ended:
            self.last["alive"] = False
        return self.last

    def close(self) -> None:
        if self.engine is None:
            return
        self.status()
        engine = self.engine
        self.engine = None
        self.ended = self.ended or "was closed"
        self.last["alive"] = False
        engine.close()


def dead_after_failure(engine: Engine) -> Engine:
    """Return `engine`, dead after an exception out of its `generate` or `load`, and after `close`.

    A BadRequest leaves it alive. What a dead engine holds is freed by `close`, which may be called twice.
    """
    return record(Engine, _Lifetime(engine))


ResultT = TypeVar("ResultT")


def on_rank0(f: Callable[[], ResultT]) -> ResultT:
    """Run f on rank 0, and return its result, or raise its exception, on every rank."""
    answer: tuple[ResultT | None, Exception | None] = None, None
    if dist.is_main():
        try:
            answer = f(), None
        except Exception as error:
            answer = None, error
    result, error = dist.all_gather_object(answer)[0]
    if error is not None:
        raise error
    return result


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine. ValueError for values out of range."""

    type: str = StrategyConfig.engine_type
    """hf: transformers in this process; vllm: vLLM in it; openai: servers of vLLM; sglang: those of SGLang"""
    batch: Count = StrategyConfig.engine_batch
    """sequences sampled at a time"""
    tp_size: Count = StrategyConfig.engine_tp_size
    """processes that share one engine"""
    mem_util: Share = StrategyConfig.engine_mem_util
    """share of the device's memory that the engine may take; 0: as much as it needs"""
    sleep: bool = StrategyConfig.enable_engine_sleep
    """the engine leaves the device while the trainer works"""
    process: bool = StrategyConfig.engine_process
    """the engine has a separate process"""
    fast_linear: bool = StrategyConfig.fast_linear
    """large linear layers by oneDNN, on a CPU where that is faster; only for hf"""
    threads: Whole = StrategyConfig.engine_threads
    """threads of an engine in a separate process; 0: as many as this process has"""
    servers: tuple[str, ...] = StrategyConfig.engine_servers
    """addresses of the servers, http://HOST:PORT each"""
    key_env: str = "RFT_SERVER_KEY"
    """the environment variable with the servers' API key, if they ask for one"""
    timeout: Annotated[float, Range(1)] = StrategyConfig.engine_timeout
    """seconds that one call of the engine may take, or one request to a server"""
    weights: str = StrategyConfig.engine_weights
    """the folder that servers read weights from; if empty, a temporary one of this machine"""
    max_model_len: Whole = StrategyConfig.engine_max_model_len
    """most tokens of a prompt and its response; 0: the model's window"""
    block_size: Whole = StrategyConfig.engine_block_size
    """tokens of a block of the engine's cache; 0: the engine's choice"""
    dtype: str = StrategyConfig.engine_dtype
    """type of the engine's weights; auto: float32 on a CPU, bfloat16 on a GPU"""
    bf16: bool = False
    """weights in bfloat16, as a trainer that computes in it has them; only for hf"""
    alone: bool = False
    """a process asks its servers without the others; their weights stay as they are, and they stay awake"""

    __post_init__ = check.fields


def config_of(config: StrategyConfig) -> EngineConfig:
    """Return the engine's part of a run's options."""
    return EngineConfig(
        type=config.engine_type,
        batch=config.engine_batch,
        tp_size=config.engine_tp_size,
        mem_util=config.engine_mem_util,
        sleep=config.enable_engine_sleep,
        process=config.engine_process,
        fast_linear=config.fast_linear,
        threads=config.engine_threads,
        servers=tuple(config.engine_servers),
        weights=config.engine_weights,
        max_model_len=config.engine_max_model_len,
        block_size=config.engine_block_size,
        dtype=config.engine_dtype,
        bf16=bool(config.bf16 or config.use_mp_opt),
        timeout=config.engine_timeout,
    )
