"""The model that servers hold: its names and sizes, not its weights."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn.engine import requests
from rft_fn.engine.arrival import Manifest, manifest
from rft_fn.model import quantize
from rft_fn.model.convert import converted
from rft_fn.model.stored import Stored, slices

__all__ = ["ServedModel", "served_model", "stored_tensors"]


class ServedModel(NamedTuple):
    """Facts of a model."""

    manifest: Manifest
    ends: frozenset[int]  # tokens that end a response
    window: int | None  # tokens
    vocabulary: int
    source: nn.Module  # of weights that are not sent; its own may have no memory

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The weights of these names, as the model was before any training."""
        source = getattr(self.source, "rft_weights", None)
        if source is not None:
            yield from stored_tensors(source.stored, names)
            return
        own = dict(self.source.named_parameters(remove_duplicate=False))
        for name in names:
            yield name, own[name].detach()


def stored_tensors(stored: Stored, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these names, read from a model's files."""
    wanted = set(names)
    for made, group in stored.groups.items():
        if not wanted & set(made):
            continue
        with slices(stored, group) as read:
            for name, x in converted(group, read, stored.skeleton).items():
                if name in wanted:
                    yield name, x[...]  # of a slice, which is read only now


def served_model(model: str | nn.Module, tokenizer: Any) -> ServedModel:
    """The facts of a model, a name or a module. A named one is made without memory for its weights."""
    lm: Any = model
    if isinstance(model, str):
        lm = _outline(model)
    quantize.require_whole(lm, "an engine")
    config = lm.config.get_text_config()
    return ServedModel(
        manifest=manifest(lm),
        ends=requests.end_tokens(lm, tokenizer),
        window=getattr(config, "max_position_embeddings", None),
        vocabulary=config.vocab_size,
        source=lm,
    )


def _outline(name: str) -> Any:
    """The model of a name on the meta device, with its generation config.

    Adapters are merged, which takes their memory, since weights arrive by the plain model's names.
    """
    from transformers import GenerationConfig

    folder = model_lib.resolve(name)
    if Path(folder, "adapter_config.json").is_file():
        merged: Any = model_lib.load(folder, quantize="none")
        return merged.merge_and_unload()
    lm: Any = model_lib.load(folder, meta=True)
    with suppress(OSError):  # a model without one
        lm.generation_config = GenerationConfig.from_pretrained(folder)
    return lm
