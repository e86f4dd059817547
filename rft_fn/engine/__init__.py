"""Engines, which sample from the policy: one table of them by name.

A new engine is one file beside `hf`, with a `build` and a `check_config`, and a row of `ENGINES`. What all
engines share: `requests` (checks of prompts, assembly of a Rollout), `stop` (where a response ends),
`arrival` (checks of the weights that are loaded), `lifetime` (dead after a failure), `deadline` (the time of
a call in this process). `openai` and `sglang` are dialects of `servers`, over `pool` (retries) and `http`
(deadlines). An engine that only one script needs can do without a row: every function that takes an Engine
takes any such record.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import nn

from rft_fn import check, dist
from rft_fn import model as model_lib
from rft_fn.engine import openai, sglang, vllm
from rft_fn.engine.hf import build as build_hf
from rft_fn.engine.hf import check_config as check_hf
from rft_fn.engine.hf import hf
from rft_fn.engine.lifetime import EngineConfig, EngineDead, config_of, dead_after_failure
from rft_fn.engine.pool import refuse_media
from rft_fn.engine.process import own_process
from rft_fn.engine.requests import BadRequest
from rft_fn.engine.time_limit import limited
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Engine

__all__ = ["ENGINES", "BadRequest", "Engine", "EngineConfig", "EngineDead", "config_of", "get_engine", "hf"]


class Build(Protocol):
    """Builds an engine."""

    def __call__(self, config: EngineConfig, model: str | nn.Module, tokenizer: Any) -> Engine:
        """The engine of a config that `CheckConfig` has passed, with weights of `model`, a name or a module.

        It ends with `dead_after_failure`.
        """
        ...


class CheckConfig(Protocol):
    """Refuses the options that an engine cannot honour."""

    def __call__(self, config: EngineConfig) -> None:
        """ValueError for such an option. Builds and imports nothing."""
        ...


class CheckMedia(Protocol):
    """Refuses prompts with media that an engine cannot take."""

    def __call__(self, config: EngineConfig, model: str) -> None:
        """ValueError where it cannot take those of the model of this name. Loads no weights."""
        ...


def _any_media(config: EngineConfig, model: str) -> None:
    """The prompts of every model are taken, or refused one by one."""


class EngineType(NamedTuple):
    """A row of the table of engines."""

    build: Build
    check_config: CheckConfig
    overtime: float | None = None  # seconds beyond its time limit that a call may take; None: no matter
    check_media: CheckMedia = _any_media


ENGINES: dict[str, EngineType] = {
    "hf": EngineType(build_hf, check_hf, overtime=0.0),
    "openai": EngineType(openai.build, openai.check_config, check_media=refuse_media),
    "sglang": EngineType(sglang.build, sglang.check_config, check_media=refuse_media),
    "vllm": EngineType(vllm.build, vllm.check_config, overtime=10.0, check_media=vllm.check_media),
}


def check_config(config: EngineConfig) -> None:
    """ValueError for an engine that does not exist, or an option that it cannot honour. Builds nothing."""
    for server in config.servers:
        instead = f"a server's key belongs into the environment variable {config.key_env}"
        check.no_secret("engine_servers", server, instead)
    if config.type not in ENGINES:
        raise ValueError(f"engine type: expected {', '.join(ENGINES)}, got {config.type!r}")
    if config.process and config.tp_size != 1:
        raise ValueError(
            f"engine_process, engine_tp_size: expected one process for an engine that has its own, got "
            f"{config.tp_size}: the ranks that share an engine sample together"
        )
    ENGINES[config.type].check_config(config)


def check_media(config: EngineConfig, model: str) -> None:
    """ValueError for an engine that cannot take the prompts with media of a model. Loads no weights."""
    ENGINES[config.type].check_media(config, model)


def get_engine(
    config: EngineConfig | StrategyConfig | None, model: str | nn.Module, tokenizer: Any = None
) -> Engine:
    """The engine of `config` with weights of `model`, a name or a module that it may overwrite.

    Of a StrategyConfig the options that begin with `engine_` are read. ValueError for what `check_config`
    refuses, before anything is loaded.
    """
    if isinstance(config, StrategyConfig):
        config = config_of(config)
    config = config or EngineConfig()
    check_config(config)
    if tokenizer is None and isinstance(model, nn.Module):
        raise ValueError("tokenizer: expected one, got None: a module does not know its tokenizer")
    tokenizer = tokenizer or model_lib.load_tokenizer(str(model))
    build, overtime = ENGINES[config.type].build, ENGINES[config.type].overtime
    if config.process:
        return own_process(build, config, model, tokenizer)
    engine = build(config, model, tokenizer)

    # the ranks that share an engine wait for each other, which is for their process group to limit
    if overtime is None or config.tp_size > 1:
        return engine
    return limited(engine, config.timeout + overtime, several=dist.started() > 1)


if not TYPE_CHECKING:  # where every name would be an attribute

    def __getattr__(name: str) -> Any:
        """Return `gather_and_generate` of `collect`, which programs call by this name."""
        if name == "gather_and_generate":
            from rft_fn import collect  # to the right, and only when somebody asks for it

            return collect.gather_and_generate
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
