"""The model as a function: `bind` a module, `score` packs with it, `load` one from anywhere."""

from rft_fn.model.bind import Scorer, bind, score
from rft_fn.model.load import cache_dir, load, load_tokenizer, resolve, save
from rft_fn.model.lora import apply_lora_configuration

__all__ = [
    "Scorer",
    "apply_lora_configuration",
    "bind",
    "cache_dir",
    "load",
    "load_tokenizer",
    "resolve",
    "save",
    "score",
]
