"""Holds the engines, which sample from the policy: one table of them by name.

A new engine is one file next to `hf`, with a `build` and a `check_config`, and a row of `ENGINES`. All
engines share `requests` (checks of prompts, the end of a response, assembly of a Rollout), `weight_folder`
(checks of the weights that are loaded), `lifetime` (in time, dead after a failure, and built again) and
`time_limit` (the time of a call in this process). `openai` and `sglang` are protocols of `servers`, over
`pool` (retries), `server_protocol` (requests with deadlines) and `weight_delivery` (weights by channels and
folders). `ray` is other engines in actors, over the same `pool`. An engine that only one script needs can
do without a row: every function that takes an Engine takes any such record.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from rft_fn import dist
from rft_fn import model as model_lib
from rft_fn.engine import openai, ray_actors, sglang, vllm
from rft_fn.engine.engine_config import EngineConfig, config_of
from rft_fn.engine.global_batch import gather_and_generate
from rft_fn.engine.hf import build as build_hf
from rft_fn.engine.hf import check_config as check_hf
from rft_fn.engine.hf import hf
from rft_fn.engine.lifetime import EngineCore, EngineDead, dead_after_failure, supervised
from rft_fn.engine.pool import check_servers, refuse_media
from rft_fn.engine.process import own_process
from rft_fn.engine.requests import BadRequest
from rft_fn.strategy.config import StrategyConfig
from rft_fn.text import no_secret
from rft_fn.types import Engine

__all__ = ["ENGINES", "BadRequest", "Engine", "EngineConfig", "EngineDead", "config_of", "get_engine", "hf"]


# (config, model, tokenizer) -> an engine with weights of `model`, a name or a module; cores get `supervised`
Build = Callable[[EngineConfig, str | nn.Module, Any], EngineCore | Engine]


class EngineType(NamedTuple):
    """A row of the table of engines.

    `check_config` raises ValueError for an option that the engine cannot honour; it builds and imports
    nothing. `check_media`, given a model's name, raises it where the engine takes none of its media; it loads
    no weights.
    """

    build: Build
    check_config: Callable[[EngineConfig], None]
    overtime: float | None = None  # seconds beyond its time limit that a call may take; None: no matter
    check_media: Callable[[EngineConfig, str], None] = lambda config, model: None


ENGINES: dict[str, EngineType] = {
    "hf": EngineType(build_hf, check_hf, overtime=0.0),
    "openai": EngineType(openai.build, check_servers, check_media=refuse_media),
    "ray": EngineType(ray_actors.build, ray_actors.check_config),
    "sglang": EngineType(sglang.build, check_servers, check_media=refuse_media),
    "vllm": EngineType(vllm.build, vllm.check_config, overtime=10.0, check_media=vllm.check_media),
}


def check_config(config: EngineConfig) -> None:
    """Raise ValueError for an engine that does not exist, or an option that it cannot honour."""
    for server in config.servers:
        instead = f"a server's key belongs into the environment variable {config.key_env}"
        no_secret("engine_servers", server, instead)
    if config.type not in ENGINES:
        raise ValueError(f"engine type: expected {', '.join(ENGINES)}, got {config.type!r}")
    if config.process and config.tp_size != 1:
        raise ValueError(
            f"engine_process, engine_tp_size: expected one process for an engine that has its own, got "
            f"{config.tp_size}: the ranks that share an engine sample together"
        )
    if config.routing and config.type != "hf":
        raise ValueError(
            f"replay_routing: expected engine_type hf, which tells the experts of a token, got {config.type}"
        )
    if config.kept and config.type != "hf":
        raise ValueError(
            f"replay_kept: expected engine_type hf, which tells the words that were left, got {config.type}"
        )
    if config.in_flight and config.type not in ("hf", "openai"):
        raise ValueError(
            "in_flight: expected engine_type hf or openai, whose requests go on with new weights, got "
            f"{config.type}"
        )
    if config.base and (config.type not in ("openai", "vllm") or config.adapters != "alone"):
        raise ValueError(
            f"engine: a base in {config.base}: expected engine_type vllm or openai, engine_adapters alone, "
            f"got {config.type} and {config.adapters}"
        )
    if config.base and config.tp_size != 1:
        raise ValueError(
            f"engine_tp_size: expected 1 for a base in {config.base}, got {config.tp_size}: each rank would "
            "find the scales of its own parts of rows"
        )
    if (config.actors, config.actor_type) != (1, "hf") and config.type != "ray":
        raise ValueError(
            f"engine_actors, engine_actor_type: expected 1 and hf for {config.type}, which has no actors, "
            f"got {config.actors} and {config.actor_type}"
        )
    ENGINES[config.type].check_config(config)


def check_media(config: EngineConfig, model: str) -> None:
    """Raise ValueError for an engine that takes no media of a model. Loads no weights."""
    ENGINES[config.type].check_media(config, model)


def get_engine(
    config: EngineConfig | StrategyConfig | None, model: str | nn.Module, tokenizer: Any = None
) -> Engine:
    """Build the engine of `config` with weights of `model`, a name or a module that it may overwrite.

    Only the options of a StrategyConfig that begin with `engine_` are read. ValueError for what
    `check_config` refuses, before anything is loaded.
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

    # the ranks that share an engine wait for each other, which is for their process group to limit
    timeout = None if overtime is None or config.tp_size > 1 else config.timeout + overtime
    engine = build(config, model, tokenizer)
    if isinstance(engine, Engine) and timeout is None:
        return engine
    return supervised(lambda: engine, timeout=timeout, loads_together=dist.started() > 1)
