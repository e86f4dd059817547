"""Holds the options of an engine, and finds them among the options of a run."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from rft_fn import limits
from rft_fn.limits import Count, Range, Share, Whole
from rft_fn.strategy.config import Adapters, StrategyConfig, Transfer

__all__ = ["EngineConfig", "config_of"]


# options of a run that are called otherwise than engine_NAME, and those that no run has
_OF_A_RUN = {
    "sleep": "enable_engine_sleep",
    "fast_linear": "fast_linear",
    "routing": "replay_routing",
    "kept": "replay_kept",
}
_OF_NO_RUN = ("key_env", "bf16", "alone", "lora_rank", "base", "in_flight", "run", "follows")


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine; most are options of a run. ValueError for values out of range."""

    type: str = StrategyConfig.engine_type
    """hf: transformers in this process; vllm: vLLM in it; openai, sglang: servers; ray: either in actors"""
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
    actors: Count = StrategyConfig.engine_actors
    """actors of Ray for each process of the trainer; only for ray"""
    actor_type: Literal["hf", "vllm"] = StrategyConfig.engine_actor_type
    """the engine in each actor; only for ray"""
    key_env: str = "RFT_SERVER_KEY"
    """the environment variable with the servers' API key, if they ask for one"""
    timeout: Annotated[float, Range(1)] = StrategyConfig.engine_timeout
    """seconds that one call of the engine may take, or one request to a server"""
    weights: str = StrategyConfig.engine_weights
    """the folder that servers read weights from; if empty, a temporary one of this machine"""
    transfer: Transfer = StrategyConfig.engine_transfer
    """how servers get weights: by the channel rft, by a folder, or by the better one that a server has"""
    adapters: Adapters = StrategyConfig.engine_adapters
    """how trained adapters come: alone, merged into whole weights, or auto, where alone is faster"""
    lora_rank: Whole = 0
    """rank of the trained adapters, if nothing else is trained and engines can hold their base; 0: none"""
    base: Literal["", "int8"] = ""
    """precision of the base below adapters that come alone, as the trainer has it; empty: full"""
    max_model_len: Whole = StrategyConfig.engine_max_model_len
    """most tokens of a prompt and its response; 0: the model's window"""
    block_size: Whole = StrategyConfig.engine_block_size
    """tokens of a block of the engine's cache; 0: the engine's choice"""
    dtype: str = StrategyConfig.engine_dtype
    """type of the engine's weights; auto: float32 on a CPU, bfloat16 on a GPU"""
    routing: bool = StrategyConfig.replay_routing
    """rollouts have the experts that each token went to; only for hf"""
    speculative: str = StrategyConfig.engine_speculative
    """speculative decoding: the engine's own config, as JSON or a file of it; empty: none; only for vllm"""
    kept: bool = StrategyConfig.replay_kept
    """rollouts have the words that top_p and top_k left at each token; only for hf"""
    fused: bool = StrategyConfig.engine_fused
    """on CUDA new tokens are read by fused kernels, in models that they fit; only for hf"""
    bf16: bool = False
    """weights in bfloat16, as a trainer that computes in it has them; only for hf"""
    alone: bool = False
    """a process asks its servers without the others; their weights stay as they are, and they stay awake"""

    in_flight: bool = False
    """requests under way go on with new weights, and rollouts have the version of each token"""
    run: str = ""
    """a name that engines of the same servers share, of which one loads weights; empty: there is one"""
    follows: bool = False
    """another engine of the run loads the servers, and has done so when this one is to"""

    __post_init__ = limits.fields


def config_of(config: StrategyConfig) -> EngineConfig:
    """Return the engine's part of a run's options."""
    names = [x.name for x in fields(EngineConfig) if x.name not in _OF_NO_RUN]
    options = {name: getattr(config, _OF_A_RUN.get(name, f"engine_{name}")) for name in names}
    options["servers"] = tuple(options["servers"])
    return EngineConfig(**options, bf16=bool(config.bf16 or config.use_mp_opt))
