"""The modalities of an actor, and the names of the tensors that each takes."""

import enum
import inspect
from collections.abc import Iterable
from typing import Any

__all__ = ["MODALITY_PARAMETERS", "ActorModality", "get_supported_parameters", "of_config"]


class ActorModality(enum.Enum):
    """The kind of an actor, by its inputs besides tokens."""

    LANGUAGE_ONLY = "language_only"
    VISION_LANGUAGE = "vision_language"
    AUDIO_LANGUAGE = "audio_language"
    OMNI = "omni"


# The keyword arguments of the models' own forward. Positions, token types and precomputed features are no
# media: they are made of these and of the tokens.
_IMAGES = {
    "pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "pixel_mask",
    "image_position_ids", "image_pixel_values", "image_attention_mask", "image_patches", "spatial_shapes",
    "target_sizes", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask", "batch_num_images",
    "pixel_values_images",
}  # fmt: skip
_VIDEOS = {
    "pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid",
    "image_sizes_videos", "video_position_ids", "num_frames_per_video", "target_sizes_videos",
    "use_audio_in_video",
}  # fmt: skip
_AUDIO = frozenset(
    {
        "input_features", "feature_attention_mask", "input_features_mask", "audio_feature_lengths",
        "audio_input_features", "audio_embed_sizes", "audio_attention_mask", "audio_values",
    }
)  # fmt: skip
_VISION = frozenset(_IMAGES | _VIDEOS)

MODALITY_PARAMETERS: dict[ActorModality, frozenset[str]] = {
    ActorModality.LANGUAGE_ONLY: frozenset(),
    ActorModality.VISION_LANGUAGE: _VISION,
    ActorModality.AUDIO_LANGUAGE: _AUDIO,
    ActorModality.OMNI: _VISION | _AUDIO,
}


def get_supported_parameters(modality: ActorModality | str) -> frozenset[str]:
    """Return the names of tensors that an actor takes besides tokens. ValueError for an unknown modality."""
    try:
        return MODALITY_PARAMETERS[ActorModality(modality)]
    except ValueError:
        known = ", ".join(m.value for m in ActorModality)
        raise ValueError(f"modality: expected one of {known}, got {modality!r}") from None


def check_parameters(modality: ActorModality | str, names: Iterable[str]) -> None:
    """Raise ValueError that names the tensors which an actor would not read."""
    supported = get_supported_parameters(modality)
    unknown = sorted(set(names) - supported)
    if not unknown:
        return
    known = f"some of {sorted(supported)}" if supported else "none"
    raise ValueError(f"media: expected {known} for {ActorModality(modality).value}, got {unknown}")


def of_config(config: Any) -> ActorModality:
    """Return the modality of the model that `model.load` makes of a config of transformers.

    It depends on the arguments of the model's forward and on the towers that the config describes.
    """
    kind = class_of(config)
    names = frozenset() if kind is None else _read_by(kind, thinker(config))
    if kind is None:  # by the towers in the config
        names |= _VISION if getattr(config, "vision_config", None) is not None else frozenset()
        names |= _AUDIO if getattr(config, "audio_config", None) is not None else frozenset()
    sees = bool(names & _VISION)
    hears = bool(names & _AUDIO)
    if sees and hears:
        return ActorModality.OMNI
    if sees:
        return ActorModality.VISION_LANGUAGE
    if hears:
        return ActorModality.AUDIO_LANGUAGE
    return ActorModality.LANGUAGE_ONLY


def thinker(config: Any) -> Any:
    """Return the config of the part that reads and writes text, in a model that also speaks."""
    return getattr(config, "thinker_config", None) or config


def class_of(config: Any) -> type | None:
    """Return the class of transformers for a config: one that sees or hears, else a causal language model.

    None for a config that transformers does not know: its folder has Python code. A checkpoint of only the
    text model stays one: its config has the text model's type, or names the text model's class.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = type(thinker(config))
    text: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    tables = [table.get(kind, None) for table in _tables(thinker(config)).values()]
    whole = next((cls for cls in tables if cls is not None), None)
    named = getattr(config, "architectures", None) or []
    is_text = whole is None or (text is not None and text.__name__ in named)
    return text if is_text else whole


def auto_class(config: Any) -> str:
    """Return the name of transformers' auto class that makes the model of a config."""
    kind = class_of(config)
    for name, table in _tables(thinker(config)).items():
        if kind is not None and table.get(type(thinker(config)), None) is kind:
            return name
    return "AutoModelForCausalLM"  # a folder with Python code has its own table


def _tables(config: Any) -> dict[str, Any]:
    """Return transformers' tables of models that see or hear, by the auto class that reads each.

    Some models that hear, such as Audio Flamingo 3, are only among those of sequence to sequence, where
    the rest are encoders with decoders.
    """
    from transformers.models.auto import modeling_auto as auto

    tables: dict[str, Any] = {"AutoModelForMultimodalLM": auto.MODEL_FOR_MULTIMODAL_LM_MAPPING}
    towers = [getattr(config, name, None) for name in ("vision_config", "audio_config")]
    has_text = getattr(config, "text_config", None) is not None
    if has_text and any(tower is not None for tower in towers) and not config.is_encoder_decoder:
        tables["AutoModelForSeq2SeqLM"] = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return tables


def _read_by(kind: type, config: Any) -> frozenset[str]:
    """Return the media that a class takes, without the media of a tower that its config leaves out."""
    names = frozenset(inspect.signature(kind.forward).parameters)  # type: ignore[attr-defined]
    seen = frozenset() if getattr(config, "vision_config", config) is None else names & _VISION
    heard = frozenset() if getattr(config, "audio_config", config) is None else names & _AUDIO
    return seen | heard
