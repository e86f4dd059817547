"""Holds the engine of transformers, in this process."""

from rft_fn.engine.hf.engine import build, check_config, hf

__all__ = ["build", "check_config", "hf"]
