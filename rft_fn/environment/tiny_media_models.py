"""The two built-in tiny models with media: one that sees, and one that hears."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rft_fn.model.processors import PatchProcessor

__all__ = ["AUDIO", "VISION", "Form"]


MEDIA_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% else %}PLACEHOLDERS{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'tool' %}={% endif %}{% endif %}{% endfor %}"
)
MEDIA_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


class Form(NamedTuple):
    """A tiny model with media."""

    task: str
    steps: int  # of the warm-up
    tokens: tuple[str, ...]  # placeholders, and the tokens around them
    template: str  # of chats
    new_processor: Callable[[Any], Any]  # of a tokenizer
    new_model: Callable[[Any], Any]  # for a tokenizer, with weights drawn by torch's global generator


SCALE = 0.1  # deviation of the first weights; with the usual 0.02 layers this narrow learn ten times slower
SIDE = 16  # pixels that images are brought to
PATCH = 2
MERGE = 2  # patches of a side of a token, which is then a cell of 4 x 4 pixels
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _vision_processor(tokenizer: Any) -> PatchProcessor:
    """Return a processor of images of 16 x 16 pixels, which are 16 tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images: Any = Qwen2VLImageProcessorPil
    pixels = SIDE**2
    made = images(patch_size=PATCH, merge_size=MERGE, min_pixels=pixels, max_pixels=pixels)
    return PatchProcessor(made, tokenizer)


def _vision_model(tokenizer: Any) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {"rope_parameters": rope, "initializer_range": SCALE, "vocab_size": len(tokenizer)}
    config = Qwen2VLConfig(
        text_config=MEDIA_TEXT | text,
        vision_config={
            "embed_dim": 32, "hidden_size": 64, "depth": 1, "num_heads": 2, "mlp_ratio": 2,
            "initializer_range": SCALE, "patch_size": PATCH, "spatial_merge_size": MERGE,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config)


VISION = Form(
    task="count_squares",
    steps=95,
    tokens=VISION_TOKENS,
    template=MEDIA_TEMPLATE.replace("PLACEHOLDERS", "<|vision_start|><|{{ p['type'] }}_pad|><|vision_end|>"),
    new_processor=_vision_processor,
    new_model=_vision_model,
)


MELS = 16  # bands of the spectrogram
FRAMES = 100  # of a second


def _audio_processor(tokenizer: Any) -> Any:
    """Return a Qwen2-Audio processor of a second of audio, which is at most 25 tokens."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    features = WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
    return Qwen2AudioProcessor(features, tokenizer, chat_template=AUDIO.template)


def _audio_model(tokenizer: Any) -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    config = Qwen2AudioConfig(
        text_config=MEDIA_TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer)},
        audio_config={
            "model_type": "qwen2_audio_encoder", "d_model": 48, "encoder_layers": 1,
            "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": MELS,
            "max_source_positions": FRAMES // 2,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )  # fmt: skip
    return Qwen2AudioForConditionalGeneration(config)


AUDIO = Form(
    task="tone",
    steps=18,
    tokens=("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"),
    template=MEDIA_TEMPLATE.replace("PLACEHOLDERS", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    new_processor=_audio_processor,
    new_model=_audio_model,
)
