"""A model as vLLM reads it: a folder, what its weights are called, and where its responses end."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn.engine import requests
from rft_fn.engine.arrival import Manifest, manifest
from rft_fn.engine.served import stored_tensors
from rft_fn.model.media import placeholder_ids
from rft_fn.model.save import save
from rft_fn.model.stored import folder_of

__all__ = ["ModelFolder"]


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
