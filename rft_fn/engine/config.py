"""The options of an engine."""

from dataclasses import dataclass
from typing import Annotated

from rft_fn import check
from rft_fn.check import Count, Range, Share, Whole
from rft_fn.strategy.config import StrategyConfig

__all__ = ["EngineConfig", "config_of"]


@dataclass(frozen=True)
class EngineConfig:
    """The engine that samples. ValueError for values out of range."""

    type: str = StrategyConfig.engine_type
    """hf: transformers in this process; openai: servers of vLLM; sglang: servers of SGLang"""
    batch: Count = StrategyConfig.engine_batch
    """sequences sampled at a time"""
    tp_size: Count = StrategyConfig.engine_tp_size
    """processes that share one engine"""
    mem_util: Share = StrategyConfig.engine_mem_util
    """share of the device's memory that the engine may take; 0: as much as it needs"""
    sleep: bool = StrategyConfig.enable_engine_sleep
    """the engine leaves the device while the trainer works"""
    process: bool = StrategyConfig.engine_process
    """the engine has a process of its own"""
    threads: Whole = StrategyConfig.engine_threads
    """threads of an engine in a process of its own; 0: as many as this process has"""
    servers: tuple[str, ...] = StrategyConfig.engine_servers
    """addresses of the servers, http://HOST:PORT each"""
    timeout: Annotated[float, Range(1)] = StrategyConfig.engine_timeout
    """seconds that a call of an engine in a process of its own may take, or a request to a server"""
    weights: str = StrategyConfig.engine_weights
    """the folder that servers read weights from; if empty, a temporary one of this machine"""

    __post_init__ = check.fields


def config_of(config: StrategyConfig) -> EngineConfig:
    """The engine's part of a run's options."""
    return EngineConfig(
        type=config.engine_type,
        batch=config.engine_batch,
        tp_size=config.engine_tp_size,
        mem_util=config.engine_mem_util,
        sleep=config.enable_engine_sleep,
        process=config.engine_process,
        threads=config.engine_threads,
        servers=tuple(config.engine_servers),
        timeout=config.engine_timeout,
        weights=config.engine_weights,
    )
