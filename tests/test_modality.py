"""Which tensors an actor of each modality reads, and that nothing else is dropped in silence."""

import inspect
import re
from pathlib import Path

import pytest
import tiny
import torch
from each_case import each
from sees_and_hears import FAMILIES as SmallFamilies
from test_probe import quiet

import rft_fn as rft
from rft_fn import model
from rft_fn.modality import (
    MODALITY_PARAMETERS,
    ActorModality,
    auto_class,
    check_parameters,
    class_of,
    get_supported_parameters,
    of_config,
    thinker,
)


def test_omni_reads_what_the_others_read():
    vision, audio = (get_supported_parameters(m) for m in (ActorModality.VISION_LANGUAGE, "audio_language"))
    assert get_supported_parameters("omni") == vision | audio and not vision & audio
    assert get_supported_parameters("language_only") == frozenset()
    assert set(MODALITY_PARAMETERS) == set(ActorModality)


# arguments of the models' forward that are no media: text, outputs, settings of the model, and values that
# are made of the tokens or of other arguments
TEXT = {
    "self", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "labels",
    "use_cache", "cache",
    "logits_to_keep", "kwargs", "rope_deltas", "mm_token_type_ids", "token_type_ids", "mm_encoder_outputs",
    "output_router_logits", "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio",
    "per_layer_inputs", "cross_attention_states", "downsample_mode", "cache_position", "return_dict",
    "output_attentions", "output_hidden_states",
}  # fmt: skip
FAMILIES = {  # by the types of their configs
    ActorModality.VISION_LANGUAGE: ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
        "idefics2", "idefics3", "llava", "llava_next", "llava_next_video", "llava_onevision", "internvl",
        "gemma3", "mistral3", "paligemma", "aya_vision", "glm4v", "mllama", "llama4", "lfm2_vl",
        "cohere2_vision", "aria", "kimi_k25"),
    ActorModality.AUDIO_LANGUAGE: ("qwen2_audio", "voxtral", "granite_speech", "qwen3_asr", "audioflamingo3",
        "musicflamingo"),
    ActorModality.OMNI: ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "gemma3n"),
    ActorModality.LANGUAGE_ONLY: ("llama", "qwen2", "gemma3_text", "llama4_text"),
}  # fmt: skip
KINDS = [(kind, modality) for modality, kinds in FAMILIES.items() for kind in kinds]


def config_of(kind):
    """A config of a type, as small as its defaults allow, without a word about ids beyond a vocabulary."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {kind}")
    return quiet(CONFIG_MAPPING[kind])


@each(("kind", "expected"), KINDS, ids=lambda x: str(getattr(x, "value", x)))
def test_the_modality_of_a_config_is_what_its_model_takes(kind, expected):
    """All arguments of the model's own forward are known: media of the modality, or no media."""
    config = config_of(kind)
    assert of_config(config) is expected
    known = get_supported_parameters(expected)
    found = set(inspect.signature(class_of(config).forward).parameters)
    assert found - TEXT <= known, f"{kind} takes {sorted(found - TEXT - known)} too"
    assert not known & TEXT
    assert bool(found & known) is (expected is not ActorModality.LANGUAGE_ONLY)


def test_a_model_with_towers_is_made_by_a_class_that_takes_media():
    """For every type of config that transformers has, no weights built: the auto class has a class for it."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = dict(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    names |= {kind: auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[kind] for kind in ("audioflamingo3",)}
    seen = 0
    for kind in names:
        config = config_of(kind)
        factory = getattr(transformers, auto_class(config))
        assert factory._model_mapping[type(thinker(config))] is class_of(config), kind
        assert factory is not transformers.AutoModelForCausalLM, kind
        seen += 1
    assert seen > 20


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "t5", "bart", "whisper"])
def test_a_config_without_towers_is_a_causal_language_model(kind):
    assert auto_class(config_of(kind)) == "AutoModelForCausalLM"


def test_no_name_is_one_that_no_model_takes():
    """By the sources of all models in transformers: a name that none takes would never arrive."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    text = "".join(file.read_text() for file in folder.glob("*/modeling_*.py"))
    # audio_values: raw waveforms, as models that bring code of their own call them
    names = get_supported_parameters("omni") - {"audio_values"}
    assert not [name for name in names if not re.search(rf"\b{name}\s*[:=]", text)]


def test_a_tower_that_a_config_leaves_out_is_none():
    config = config_of("gemma3n")
    config.audio_config = None
    assert of_config(config) is ActorModality.VISION_LANGUAGE
    config.vision_config = None
    assert of_config(config) is ActorModality.LANGUAGE_ONLY


def test_a_config_that_names_the_class_of_its_text_model_has_no_towers():
    config = config_of("llama4")
    config.architectures = ["Llama4ForCausalLM"]
    assert of_config(config) is ActorModality.LANGUAGE_ONLY
    config.architectures = ["Llama4ForConditionalGeneration"]
    assert of_config(config) is ActorModality.VISION_LANGUAGE


def test_a_config_from_a_folder_with_code_tells_by_its_towers():
    """transformers knows no class for it."""
    from transformers import PretrainedConfig

    class Own(PretrainedConfig):
        model_type = "own"

    assert of_config(Own()) is ActorModality.LANGUAGE_ONLY
    assert of_config(Own(vision_config={"depth": 1})) is ActorModality.VISION_LANGUAGE
    assert of_config(Own(audio_config={})) is ActorModality.AUDIO_LANGUAGE
    assert of_config(Own(audio_config={}, vision_config={})) is ActorModality.OMNI


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        (None, ["pixel_values"], r"media: expected none for language_only, got \['pixel_values'\]"),
        ("Qwen2Audio", ["pixel_values"], r"some of \['audio_.* for audio_language, got \['pixel_values'\]"),
        ("Qwen2VL", ["pixel_values", "input_features"], r"for vision_language, got \['input_features'\]"),
    ],
)
def test_a_pack_brings_only_what_its_model_reads(kind, names, message):
    """The boundary where packs meet a model: nothing is dropped in silence."""
    lm = tiny.llama()
    if kind:
        lm = SmallFamilies[kind].build(torch.float32)
    apply, params = quiet(model.bind, lm)
    exp = rft.packing.supervised([([5, 6, 7], [8, 9])])
    media = rft.Media.of_prompts([{name: torch.zeros(2, 3) for name in names}])
    exp = rft.tree.replace(exp, media=media)
    with pytest.raises(ValueError, match=message):
        apply(params, rft.packing.pack(exp, [0]))


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
