"""The parts of a model of transformers: decoder, text model, towers, head."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from rft_fn.model.bounds import SequenceAxis
from rft_fn.model.quantize import is_plain

__all__ = ["Parts", "find", "inside_adapters", "outside_layers", "path_of", "text_config", "text_model"]


_TEXT = ("language_model", "text_model")
_TOWERS = {
    "audio_encoder", "audio_model", "audio_tower", "connector", "image_tower", "merger",
    "multi_modal_projector", "speech_encoder", "vision_encoder", "vision_model", "vision_tower", "visual",
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """The parts of one model: no part is a copy.

    The `text` of a model that only reads is the decoder or inside of it, and there are no towers.
    """

    model: Any  # the model of transformers, inside its adapters if it has some
    decoder: Any  # the part whose output is the hidden states [1, T, D]; adapters stay inside
    text: Any  # the part of the decoder that reads embedded tokens
    towers: tuple[nn.Module, ...]  # the parts that see or hear, and what joins them to the text model
    head: Any  # the layer that makes logits of hidden states, or None
    sequence: SequenceAxis | None = None  # over which the tokens of a pack are split

    @property
    def has_linear_head(self) -> bool:
        """Return whether the head is one matrix, without adapters on it, apart from the decoder."""
        return is_plain(self.head) and self.decoder is not self.model


def find(module: nn.Module) -> Parts:
    """Return the parts of a model, with or without adapters; a `Reader` (see `reader`) has its own.

    A module that is not from transformers is its own decoder and has no head; its text model is the part
    called language_model or text_model, else the module itself.
    """
    known = getattr(module, "parts", None)
    if isinstance(known, Parts):
        return known
    model = inside_adapters(module)
    decoder = _decoder(model)
    text = _text(model, decoder)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return Parts(model, decoder, text, _towers(model, decoder, text), head)


def inside_adapters(module: Any) -> Any:
    """Return the model of transformers inside of peft's, or the module itself."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def outside_layers(name: str) -> str:
    """Return the name that a parameter has without peft's layers, one or several, around its module."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def text_config(module: nn.Module) -> Any:
    """Return the config of a model's text model, which may be nested in the model's."""
    return inside_adapters(module).config.get_text_config()


def text_model(root: nn.Module) -> nn.Module:
    """Return the text model of a model that sees or hears, else the module itself."""
    parts = find(root)
    return parts.text if parts.towers else root


def path_of(part: nn.Module, module: nn.Module) -> str:
    """Return the name of a part inside a module; "" for the module itself, and for a part outside."""
    return next((name for name, m in module.named_modules() if m is part), "")


def _decoder(model: Any) -> Any:
    base = getattr(model, "base_model", model)
    if base is not model:
        return base
    # The name that a class gives is not always that of the attribute (Llama 4): take the one model inside.
    inside = [m for m in model.children() if hasattr(m, "base_model")]
    return inside[0] if len(inside) == 1 else model


def _text(model: Any, decoder: Any) -> Any:
    for name, m in decoder.named_modules():
        if name.rpartition(".")[2] in _TEXT:
            return m
    # A family may have its own rule. It answers with the whole model where it knows of no part.
    if hasattr(model, "get_decoder"):
        found = model.get_decoder()
        if any(m is found for m in decoder.modules()):
            return found
    return decoder


def _towers(model: Any, decoder: Any, text: Any) -> tuple[nn.Module, ...]:
    """Return the parts next to the text model on the way to it, or by the usual names of towers."""
    path = path_of(text, decoder).split(".")
    if path[-1] not in _TEXT:
        return tuple(m for name, m in model.named_modules() if name.rpartition(".")[2] in _TOWERS)
    found = []
    parent = decoder
    for step in path:
        found += [m for name, m in parent.named_children() if name != step]
        parent = parent.get_submodule(step)
    return tuple(m for m in found if any(True for _ in m.parameters()))
