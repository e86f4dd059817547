"""The memory of engines in the trainer's process, by the models that they copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from rft_fn.model import quantize
from rft_fn.model.quantize import is_plain

__all__ = ["Sampler", "attempt", "size_of", "stays", "weights_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class Sampler:
    """An engine in the trainer's process, with its own copy of a model's weights."""

    batch: int  # sequences sampled at a time
    length: int = 0  # tokens of the longest; 0 leaves out the cache
    sleeps: bool = True  # its weights leave the device while the trainer works
    packs: bool = False  # its large weights are a second time in memory, where `model.linear` packs them


def attempt(name: str, f: Callable[[], T], default: T, unknown: list[str]) -> T:
    """f(), or the default and a line in `unknown`.

    Custom models and transforms may read values, which the meta device has not; an estimate must not stop a
    run.
    """
    try:
        return f()
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        unknown.append(f"{name}: {lines[0]}")
        return default


def _itemsize(kind: str) -> int:
    """Bytes per number of an engine: bfloat16 on a GPU, float32 on a CPU."""
    if kind == "cuda":
        return 2
    return 4


def weights_of(module: nn.Module, kind: str) -> int:
    """The weights of an engine of this process, in full precision [bytes]."""
    total = 0
    for p in module.parameters():
        size = p.element_size()
        if p.is_floating_point() or quantize.is_low(p):
            size = _itemsize(kind)
        total += quantize.count(p) * size
    return total


def _cache(module: nn.Module, kind: str, sampler: Sampler) -> int:
    """The keys and values of the sequences that an engine samples [bytes]."""
    if not sampler.length or not hasattr(module, "config"):
        return 0
    config: Any = module.config
    text = config.get_text_config()
    length = min(sampler.length, getattr(text, "max_position_embeddings", sampler.length))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width  # keys and values
    return _itemsize(kind) * token * length * sampler.batch


def _packs(module: nn.Module, kind: str) -> int:
    """The second copies of an engine's weights, in oneDNN's order [bytes]."""
    from rft_kernels import products

    if kind != "cpu":
        return 0
    least = products.packing().elements
    # the engine's own layers are in full precision, whatever those of the trainer are
    packed = 0
    for layer in module.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not (is_plain(layer) or quantize.is_low(weight)):
            continue
        if quantize.count(weight) >= least:
            packed += quantize.count(weight)
    return _itemsize(kind) * packed


def stays(samplers: Sequence[Sampler | None], kind: str) -> bool:
    """Whether the weights of engines never leave the device, as on a CPU."""
    found = [sampler for sampler in samplers if sampler is not None]
    return any(kind == "cpu" or not sampler.sleeps for sampler in found)


def size_of(module: nn.Module, kind: str, sampler: Sampler, unknown: list[str]) -> int:
    """The weights and the cache of an engine, and its packs [bytes]."""
    packs = 0
    if sampler.packs:
        packs = _packs(module, kind)
    cache = attempt("cache of the engine", partial(_cache, module, kind, sampler), 0, unknown)
    return weights_of(module, kind) + packs + cache
