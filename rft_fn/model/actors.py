"""Actors by what they read: text, and images, audio or both.

    module, modality = model.ActorVL("Qwen/Qwen2-VL-2B-Instruct", freeze=("visual",))

An actor is a module and its modality. Binding, scoring and training are the same for all of them.
"""

from pathlib import Path
from typing import Any

from torch import nn

from rft_fn import modality
from rft_fn.modality import ActorModality
from rft_fn.model.load import load, read_config
from rft_fn.model.parts import inside_adapters

__all__ = ["ActorAL", "ActorLanguage", "ActorOmni", "ActorVL"]

Actor = tuple[nn.Module, ActorModality]

_NAMES = {
    ActorModality.LANGUAGE_ONLY: "ActorLanguage",
    ActorModality.VISION_LANGUAGE: "ActorVL",
    ActorModality.AUDIO_LANGUAGE: "ActorAL",
    ActorModality.OMNI: "ActorOmni",
}


def ActorLanguage(path_or_module: str | Path | nn.Module, **options: Any) -> Actor:
    """(module, modality) of a model that reads text.

    `options` are those of `load`. ValueError for a model that sees or hears.
    """
    return _actor(path_or_module, ActorModality.LANGUAGE_ONLY, options)


def ActorVL(path_or_module: str | Path | nn.Module, **options: Any) -> Actor:
    """(module, modality) of a model that reads text, images and videos.

    `options` are those of `load`. ValueError for a model that does not see, and for one that hears too.
    """
    return _actor(path_or_module, ActorModality.VISION_LANGUAGE, options)


def ActorAL(path_or_module: str | Path | nn.Module, **options: Any) -> Actor:
    """(module, modality) of a model that reads text and audio.

    `options` are those of `load`. ValueError for a model that does not hear, and for one that sees too.
    """
    return _actor(path_or_module, ActorModality.AUDIO_LANGUAGE, options)


def ActorOmni(path_or_module: str | Path | nn.Module, **options: Any) -> Actor:
    """(module, modality) of a model that reads text, images, videos and audio.

    `options` are those of `load`. ValueError for a model that does not both see and hear.
    """
    return _actor(path_or_module, ActorModality.OMNI, options)


def _actor(source: str | Path | nn.Module, expected: ActorModality, options: dict[str, Any]) -> Actor:
    # The config is read first: a model of another kind is not loaded.
    if isinstance(source, nn.Module):
        config: Any = getattr(inside_adapters(source), "config", None)
        name = type(source).__name__
    else:
        config = read_config(source, trust_remote_code=options.get("trust_remote_code", False))
        name = str(source)
    found = ActorModality.LANGUAGE_ONLY
    if config is not None:
        found = modality.of_config(config)
    if found is not expected:
        raise ValueError(
            f"model: expected {expected.value} for {_NAMES[expected]}, got {name}, which is {found.value}; "
            f"{_NAMES[found]} takes it"
        )
    return load(source, **options), found
