"""Holds the options of an engine, and wraps one so that it is built late, or dead once it has failed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from torch import Tensor

from rft_fn import check, dist, tree
from rft_fn.check import Count, Range, Share, Whole
from rft_fn.engine.requests import BadRequest, given
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Engine, Rollout, Sampling
from rft_fn.types.engine import Delivered, EngineStatus, record

__all__ = ["EngineConfig", "EngineDead", "config_of", "dead_after_failure", "deferred", "on_rank0"]


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

    return Engine(
        generate=lambda *args, **options: engine().generate(*args, **options),
        score=lambda *args, **options: engine().score(*args, **options),
        load=lambda *args, **options: engine().load(*args, **options),
        sleep=lambda: built[0].sleep() if built else None,
        wake=lambda: engine().wake(),
        status=status,
        close=lambda: built[0].close() if built else None,
    )


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
            reason = " ".join(f"{type(error).__name__}: {error}".split())
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
    ) -> Rollout:
        with self.mark_dead("generate") as engine:
            rollout = engine.generate(prompts, keys, n=n, sampling=sampling, **given(max_new, start))
        return tree.replace(rollout, sampling=sampling)

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


T = TypeVar("T")


def on_rank0(f: Callable[[], T]) -> T:
    """Run f on rank 0, and return its result, or raise its exception, on every rank."""
    answer: tuple[T | None, Exception | None] = None, None
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
        timeout=config.engine_timeout,
    )
