"""The modalities of an actor, and the names of the tensors that each takes."""

import enum
from collections.abc import Iterable

__all__ = ["MODALITY_PARAMETERS", "ActorModality", "get_supported_parameters"]


class ActorModality(enum.Enum):
    """The kind of an actor, by its inputs besides tokens."""

    LANGUAGE_ONLY = "language_only"
    VISION_LANGUAGE = "vision_language"
    AUDIO_LANGUAGE = "audio_language"
    OMNI = "omni"


_VISION = frozenset(
    {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}
)
_AUDIO = frozenset({"input_features", "feature_attention_mask", "audio_values"})

MODALITY_PARAMETERS: dict[ActorModality, frozenset[str]] = {
    ActorModality.LANGUAGE_ONLY: frozenset(),
    ActorModality.VISION_LANGUAGE: _VISION,
    ActorModality.AUDIO_LANGUAGE: _AUDIO,
    ActorModality.OMNI: _VISION | _AUDIO,
}


def get_supported_parameters(modality: ActorModality | str) -> frozenset[str]:
    """The names of the tensors that an actor takes besides tokens.

    ValueError for an unknown modality.
    """
    try:
        return MODALITY_PARAMETERS[ActorModality(modality)]
    except ValueError:
        known = ", ".join(m.value for m in ActorModality)
        raise ValueError(f"modality: expected one of {known}, got {modality!r}") from None


def check_parameters(modality: ActorModality | str, names: Iterable[str]) -> None:
    """ValueError that names the tensors which an actor would not read.

    Nothing is dropped in silence.
    """
    supported = get_supported_parameters(modality)
    unknown = sorted(set(names) - supported)
    if unknown:
        raise ValueError(
            f"media: expected some of {sorted(supported)} for {ActorModality(modality).value}, got {unknown}"
        )
