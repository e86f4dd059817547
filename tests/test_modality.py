"""Which tensors an actor of each modality reads, and that nothing else is dropped in silence."""

import pytest

from rft_fn.modality import MODALITY_PARAMETERS, ActorModality, check_parameters, get_supported_parameters


def test_omni_reads_what_the_others_read():
    vision, audio = (get_supported_parameters(m) for m in (ActorModality.VISION_LANGUAGE, "audio_language"))
    assert get_supported_parameters("omni") == vision | audio and not vision & audio
    assert get_supported_parameters("language_only") == frozenset()
    assert set(MODALITY_PARAMETERS) == set(ActorModality)


def test_names_are_those_of_the_models():
    """The keyword arguments of the models' own forward: a name that none of them takes would never arrive."""
    import inspect

    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2AudioForConditionalGeneration

    vision = inspect.signature(Qwen2_5_VLForConditionalGeneration.forward).parameters
    audio = inspect.signature(Qwen2AudioForConditionalGeneration.forward).parameters
    assert get_supported_parameters("vision_language") <= set(vision)
    # audio_values: raw waveforms, as models that bring code of their own call them
    assert get_supported_parameters("audio_language") - {"audio_values"} <= set(audio)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: get_supported_parameters("smell"),
            "modality: expected one of language_only, .* got 'smell'",
        ),
        (
            lambda: check_parameters("language_only", ["pixel_values"]),
            r"for language_only, got \['pixel_values'\]",
        ),
        (lambda: check_parameters("vision_language", ["pixel_values", "pixels"]), r"got \['pixels'\]"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    check_parameters("omni", ["pixel_values", "input_features"])
