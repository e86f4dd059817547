"""Placeholders: tokens that a model replaces by a feature of an image, a video or an audio.

Its config tells which tokens they are.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.parts import find, inside_adapters

__all__ = ["TYPES", "placeholder_ids", "placeholders", "sees_or_hears", "token_types"]


TYPES = {"image": 1, "video": 2, "audio": 3}  # the types of tokens, as transformers counts them
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")


def placeholders(config: Any) -> dict[int, str]:
    """Return the placeholders of a model, id -> "image", "video" or "audio"; none for a text model."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    found: dict[int, str] = {}
    for part in (config, *parts):
        for name, value in getattr(part, "__dict__", {}).items():
            match = _PLACEHOLDER.fullmatch(name)
            if match and isinstance(value, int):
                found.setdefault(value, match[1])
    return found


def placeholder_ids(config: Any) -> frozenset[int]:
    """Return the placeholder tokens of media, which may not be sampled.

    Sampled, one would ask for a feature that is not there: an engine ends the response with it. The same
    holds for tokens around images that a model embeds in its own way in any pack with images (Ovis 2).
    """
    around = getattr(config, "visual_indicator_token_ids", None) or ()
    return frozenset(placeholders(config)) | frozenset(around)


def sees_or_hears(lm: nn.Module) -> bool:
    """Return whether a model puts features of media in the place of tokens.

    A model that attends to them across layers does not: all sequences of a pack would see them.
    """
    model = inside_adapters(lm)
    if not placeholders(getattr(model, "config", None)):
        return False
    across = any(name.startswith("cross_attention") for name in inspect.signature(model.forward).parameters)
    return bool(find(model).towers) and not across


def token_types(ids: Tensor, places: Mapping[int, str]) -> Tensor:
    """Return 0 for text, 1 for images, 2 for videos and 3 for audios, in the shape of `ids`."""
    types = torch.zeros_like(ids)
    for token, kind in places.items():
        types = torch.where(ids == token, TYPES[kind], types)
    return types
