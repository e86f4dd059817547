"""New weights in a running vLLM model, counted as they arrive in its layers.

vLLM leaves out in silence what it does not recognise, and a layer that got a part of its weights keeps
uninitialised memory in the rest. Its layerwise reload counts the elements that each layer got, so a drop is
found exactly: a count that differs from that of the first whole load.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn.engine import requests
from rft_fn.engine.dialect import stored_tensors
from rft_fn.engine.vllm.surroundings import part
from rft_fn.engine.weight_folder import Arrival, Manifest, manifest
from rft_fn.model.materialize import folder_of
from rft_fn.model.media_inputs import placeholder_ids
from rft_fn.model.save import save

__all__ = ["ModelFolder", "Short", "arriving", "replace"]


# ---------- a model as vLLM reads it: a folder, what its weights are called, and where its responses end


class ModelFolder:
    """The folder of a model, which is written first where there is only a module, or adapters."""

    def __init__(self, model: str | nn.Module, tokenizer: Any):
        from transformers import GenerationConfig

        self.temporary: TemporaryDirectory[str] | None = None
        self.path = self._path(model)
        skeleton: Any = model_lib.load(str(self.path), meta=True)
        self.skeleton = skeleton  # the model without weights
        self.places = placeholder_ids(skeleton.config)  # of media; empty for a text model
        self.config: Any = skeleton.config.get_text_config()
        self.manifest: Manifest = manifest(skeleton)
        if (self.path / "generation_config.json").exists():
            skeleton.generation_config = GenerationConfig.from_pretrained(str(self.path))
        self.ends: frozenset[int] = requests.end_tokens(skeleton, tokenizer)
        self.stored = skeleton.rft_weights.stored

    def _path(self, model: str | nn.Module) -> Path:
        if isinstance(model, str):
            found = folder_of(model_lib.resolve(model))
            if not (found / "adapter_config.json").exists():
                return found
            model = model_lib.load(model, quantize="none", device="cpu")
        self.temporary = TemporaryDirectory(prefix="rft_fn_vllm_")
        return save(Path(self.temporary.name) / "model", model, merge=True)

    def window(self, limit: int) -> int | None:
        """The most tokens that the model reads, None without a limit; `limit` may lower it, 0 does not."""
        own = getattr(self.config, "max_position_embeddings", None)
        found = [x for x in (own, limit) if x]
        return min(found, default=None)

    def cache_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Memory of the keys and values of `tokens` tokens in all layers."""
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        return 2 * tokens * self.config.num_hidden_layers * kv_heads * width * dtype.itemsize

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of these names, read from the files."""
        return stored_tensors(self.stored, names)

    def close(self) -> None:
        """Remove a folder that was written here."""
        if self.temporary is not None:
            self.temporary.cleanup()


# ---------- new weights in a running vLLM model, counted as they arrive in its layers


Short = dict[str, tuple[int, int]]  # layers that got fewer elements than they hold: (got, held)


def arriving(
    arrival: Arrival, weights: Iterable[tuple[str, Tensor]], kept: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Check weights on their way, and give a tied one by all of its names; those in `kept` come last.

    vLLM may hold a packed copy of a tied head, which only the head's own name renews. ValueError for a tensor
    that the model does not have, that comes twice or not at all, or that has NaN or inf.
    """
    tied = _ties(arrival.expected)
    for name, x in weights:
        if name in arrival.names:
            raise ValueError(f"weights: {name}: expected it once, got it twice")
        arrival.take(name, x)
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise ValueError(f"weights: {name}: expected finite numbers, got NaN or inf")
        for each in tied.get(name, (name,)):
            yield each, x
    arrival.finish(0)  # names a weight that is missing, which vLLM's layer would not
    for name, x in kept:
        for each in tied.get(name, (name,)):
            yield each, x


def _ties(expected: Manifest) -> dict[str, Sequence[str]]:
    """All names of each tied weight, by each of them."""
    ties: dict[str, Sequence[str]] = {}
    for names in expected.required.values():
        if len(names) > 1:
            ties |= dict.fromkeys(names, sorted(names))
    return ties


@torch.no_grad()
def replace(worker: Any, weights: Iterable[tuple[str, Tensor]], expected: Short | None) -> Short:
    """Load weights into a worker's model; returns the layers that stayed short.

    Some always do: those with padding, scales and rotary tables. ValueError if they are not those of
    `expected`, from the first whole load. After any error the model must not be used again.
    """
    layerwise = part("model_executor.model_loader.reload.layerwise")
    model = worker.get_model()
    with part("config").set_current_vllm_config(worker.vllm_config):
        layerwise.initialize_layerwise_reload(model)
        model.load_weights(weights)
        short = _short(model, layerwise)
        if expected is not None and short != expected:
            raise ValueError(_difference(short, expected))
        layerwise.finalize_layerwise_reload(model, worker.model_runner.model_config)
    return short


def _short(model: Any, layerwise: Any) -> Short:
    """The layers that have not got all of their elements yet."""
    short: Short = {}
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.load_numel < info.load_numel_total:
            short[name] = info.load_numel, info.load_numel_total
    return short


def _difference(short: Short, expected: Short) -> str:
    """The first layer that did not get what it got in the first load."""
    names = sorted(name for name in short.keys() | expected.keys() if short.get(name) != expected.get(name))
    first = names[0]
    total = (short.get(first) or expected[first])[1]
    want = expected.get(first, (total, total))[0]
    got = short.get(first, (total, total))[0]
    return (
        f"weights: {first}: expected {want} elements to arrive in vLLM's layer, got {got} "
        f"({len(names)} layers differ from the first load)"
    )
