"""More of the families that see or hear, for the table of docs/multimodal.md."""

import random
from collections.abc import Callable
from typing import Any

import torch
from sees_and_hears import (
    AUDIO,
    CLIP,
    HEAR,
    HEARD,
    IMAGE,
    LLAMA,
    MARKS,
    QWEN,
    SEE,
    SEEN,
    SIGLIP,
    TEXT,
    VIDEO,
    VISION,
    Family,
    Item,
    _grid,
    _joined,
    _noise,
    _qwen3_vl,
    _square,
    _tiles,
)

__all__ = ["MORE"]

ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
GRID = _grid("pixel_values", "image_grid_thw", IMAGE, QWEN)
EYES = {"hidden_size": 32, "out_hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 48}


def _glm4v() -> torch.nn.Module:
    import transformers

    vision = EYES | {"patch_size": 4, "image_size": 32}
    config = transformers.Glm4vConfig(
        text_config=TEXT | {"rope_parameters": ROPE, "head_dim": 8}, vision_config=vision,
        image_token_id=IMAGE, video_token_id=VIDEO, image_start_token_id=SEE, image_end_token_id=SEEN,
        video_start_token_id=57, video_end_token_id=58,
    )  # fmt: skip
    return transformers.Glm4vForConditionalGeneration(config)


def _qwen3_5() -> torch.nn.Module:
    import transformers

    vision = EYES | {"patch_size": 4, "num_position_embeddings": 16}
    text = TEXT | {
        "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}, "head_dim": 8, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **MARKS)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _paddle() -> torch.nn.Module:
    import transformers

    vision = VISION | {"patch_size": 4, "image_size": 32}
    config = transformers.PaddleOCRVLConfig(
        text_config=TEXT | {"rope_parameters": ROPE, "head_dim": 8}, vision_config=vision, **MARKS
    )
    return transformers.PaddleOCRVLForConditionalGeneration(config)


def _paddled(draw: random.Random, n: int) -> Item:
    """An image of PaddleOCR-VL: patches [n, 3, 4, 4]."""
    rows, places = _grid("pixel_values", "image_grid_thw", IMAGE, 3 * 4 * 4)(draw, n)
    return rows | {"pixel_values": rows["pixel_values"].view(-1, 3, 4, 4)}, places


def _by_size(kind: str, tower: dict, **options: Any) -> Callable:
    """A family of audio whose config has a tower and a text model."""

    def make() -> torch.nn.Module:
        import transformers

        text = TEXT | {"model_type": options.get("text", "qwen2")}
        config = getattr(transformers, f"{kind}Config")(
            text_config=text, audio_config=tower, audio_token_id=AUDIO
        )
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)

    return make


def _idefics2() -> torch.nn.Module:
    import transformers

    perceiver = {
        "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
        "resampler_head_dim": 16, "num_key_value_heads": 2,
    }  # fmt: skip
    config = transformers.Idefics2Config(
        text_config=TEXT | {"model_type": "mistral"}, vision_config=VISION | {"patch_size": 4},
        perceiver_config=perceiver, image_token_id=IMAGE,
    )  # fmt: skip
    return transformers.Idefics2ForConditionalGeneration(config)


def _heard(frames: int, tokens: Callable[[int], int]) -> Callable:
    """A spectrogram [1, 8, frames] of which some are real, and `input_features_mask`."""

    def item(draw: random.Random, n: int) -> Item:
        real = draw.choice([frames // 2, frames])
        features = _noise(draw, 1, 8, frames)
        features[..., real:] = 0
        mask = (torch.arange(frames) < real).long()[None]
        places = [HEAR, *[AUDIO] * tokens(real), HEARD]
        return {"input_features": features, "input_features_mask": mask}, places

    return item


def _janus() -> torch.nn.Module:
    import transformers

    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
        "patch_size": 8, "projection_dim": 32, "mlp_ratio": 2, "num_image_tokens": 4,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32,
        "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 8, "projection_dim": 32,
        "image_token_embed_dim": 32,
    }  # fmt: skip
    config = transformers.JanusConfig(
        text_config=LLAMA, vision_config=vision, vq_config=vq, image_token_id=IMAGE
    )
    return transformers.JanusForConditionalGeneration(config)


def _llama4() -> torch.nn.Module:
    import transformers

    vision = VISION | {
        "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        "intermediate_size": 128,
    }  # fmt: skip
    text = TEXT | {
        "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 64,
        "num_experts_per_tok": 1,
    }  # fmt: skip
    config = transformers.Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return transformers.Llama4ForConditionalGeneration(config)


def _ovis2() -> torch.nn.Module:
    import transformers

    vision = VISION | {
        "patch_size": 4, "vocab_size": 24, "num_visual_indicator_tokens": 5, "hidden_stride": 2,
    }  # fmt: skip
    config = transformers.Ovis2Config(
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=vision, image_token_id=IMAGE,
        visual_indicator_token_ids=[57, 58, 59, 60, 61], vocab_size=64, hidden_size=32,
    )  # fmt: skip
    return transformers.Ovis2ForConditionalGeneration(config)


def _kimi() -> torch.nn.Module:
    import transformers

    vision = VISION | {"patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4}
    config = transformers.Kimi_K25Config(
        text_config=LLAMA, vision_config=vision, projection_hidden_size=32, **MARKS
    )
    return transformers.Kimi_K25ForConditionalGeneration(config)


def _granite() -> torch.nn.Module:
    import transformers

    encoder = {
        "input_dim": 8, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 2,
        "dim_head": 16, "output_dim": 6, "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3,
    }  # fmt: skip
    projector = {
        "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
    }  # fmt: skip
    config = transformers.GraniteSpeechConfig(
        text_config=TEXT | {"model_type": "granite"}, encoder_config=encoder, projector_config=projector,
        audio_token_index=AUDIO, has_lora_adapter=False, downsample_rate=2, window_size=4,
    )  # fmt: skip
    return transformers.GraniteSpeechForConditionalGeneration(config)


def _granite_sound(draw: random.Random, n: int) -> Item:
    """Frames [1, 16, 8] of Granite, of windows of 4 that make 2 tokens each."""
    tokens = draw.choice([4, 8])
    mask = (torch.arange(8) < tokens)[None]
    return {"input_features": _noise(draw, 1, 16, 8), "input_features_mask": mask}, [AUDIO] * tokens


def _conformer(real: int) -> int:
    """The tokens of real frames in towers that halve them twice."""
    return ((real - 1) // 2 + 1 - 2) // 2 + 1


COHERE = TEXT | {"model_type": "cohere2"}

MORE = {
    "AudioFlamingo3": Family(
        _by_size(
            "AudioFlamingo3",
            {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
                "num_mel_bins": 8, "max_source_positions": 16,
            },
        ),
        {"audio": _heard(32, _conformer)},
    ),
    "AyaVision": Family(
        _joined(
            "AyaVision", SIGLIP | {"patch_size": 4}, COHERE, image_token_index=IMAGE,
            alignment_intermediate_size=48,
        ),
        {"image": _square(4)},
    ),
    "Cohere2Vision": Family(
        _joined(
            "Cohere2Vision", SIGLIP | {"patch_size": 4}, COHERE, image_token_id=IMAGE,
            alignment_intermediate_size=48,
        ),
        {"image": _square(4)},
    ),
    "GlmAsr": Family(
        _by_size(
            "GlmAsr",
            {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                "num_mel_bins": 8, "max_position_embeddings": 16,
            },
            text="llama",
        ),
        {"audio": _heard(32, lambda real: ((real - 1) // 2 + 1 - 4) // 4 + 1)},
    ),
    "Glm4v": Family(_glm4v, {"image": GRID}, types="mm_token_type_ids"),
    "GraniteSpeech": Family(_granite, {"audio": _granite_sound}),
    "Idefics2": Family(_idefics2, {"image": _tiles}, leading=("pixel_values", "pixel_attention_mask")),
    "Janus": Family(_janus, {"image": _square(4)}),
    "KimiK25": Family(_kimi, {"image": _paddled}),
    "Llama4": Family(_llama4, {"image": _square(4)}),
    "Ovis2": Family(_ovis2, {"image": _square(4)}),
    "PaddleOCRVL": Family(_paddle, {"image": _paddled}, types="mm_token_type_ids"),
    "Qwen3.5": Family(_qwen3_5, {"image": GRID}, types="mm_token_type_ids"),
    "Qwen3VLMoe": Family(
        lambda: _qwen3_vl(experts=True), {"image": GRID}, types="mm_token_type_ids", single=True
    ),
    "VipLlava": Family(
        _joined("VipLlava", CLIP, LLAMA, image_token_index=IMAGE, vision_feature_layers=[-2, -1]),
        {"image": _square(4)},
    ),
}  # fmt: skip
