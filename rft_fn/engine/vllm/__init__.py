"""Holds the engine of vLLM, in this process or over the processes of a tensor-parallel group."""

from rft_fn.engine.vllm.engine import build, check_config, check_media

__all__ = ["build", "check_config", "check_media"]
