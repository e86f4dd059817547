"""What samples: an `Engine` record, by its config."""

from typing import Any

from torch import nn

from rft_fn import model as model_lib
from rft_fn.engine.config import EngineConfig, check_config, config_of
from rft_fn.engine.hf import hf
from rft_fn.types import Engine

__all__ = ["Engine", "EngineConfig", "check_config", "config_of", "get_engine", "hf"]


def get_engine(config: EngineConfig | None, model: str | nn.Module, tokenizer: Any = None) -> Engine:
    """The engine of `config` with weights of `model`, a name or a module that it may overwrite.

    ValueError for what `check_config` refuses, before anything is loaded.
    """
    config = config or EngineConfig()
    check_config(config)
    if tokenizer is None and isinstance(model, nn.Module):
        raise ValueError("tokenizer: expected one, got None: a module does not know its tokenizer")
    tokenizer = tokenizer or model_lib.load_tokenizer(str(model))
    return hf(model_lib.load(model, quantize="none"), tokenizer, batch=config.batch, sleep=config.sleep)
