"""The tiny model that sees: Qwen2-VL with 0.12 M parameters, for images of 16 x 16 pixels."""

from typing import Any

from rft_fn.model.patches import PatchProcessor

__all__ = ["SIDE", "STEPS", "TASK", "TEMPLATE", "TOKENS", "new_model", "new_processor"]

TASK = "count_squares"
STEPS = 95  # of the warm-up
SCALE = 0.1  # deviation of the first weights; with the usual 0.02 layers this narrow learn ten times slower
SIDE = 16  # pixels that images are brought to
PATCH = 2
MERGE = 2  # patches of a side of a token, which is then a cell of 4 x 4 pixels
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% else %}<|vision_start|><|{{ p['type'] }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'tool' %}={% endif %}{% endif %}{% endfor %}"
)
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "initializer_range": SCALE,
}  # fmt: skip
VISION = {
    "embed_dim": 32, "hidden_size": 64, "depth": 1, "num_heads": 2, "mlp_ratio": 2,
    "initializer_range": SCALE,
}  # fmt: skip


def new_processor(tokenizer: Any) -> PatchProcessor:
    """A processor of images of 16 x 16 pixels, which are 16 tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes: dict[str, Any] = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "min_pixels": SIDE**2,
        "max_pixels": SIDE**2,
    }
    return PatchProcessor(Qwen2VLImageProcessorPil(**sizes), tokenizer)


def new_model(tokenizer: Any) -> Any:
    """A Qwen2-VL for the tokens of a tokenizer, its weights drawn by torch's global generator."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    start, end, image, video = tokenizer.convert_tokens_to_ids(list(TOKENS))
    config = Qwen2VLConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer)},
        vision_config=VISION | {"patch_size": PATCH, "spatial_merge_size": MERGE},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
    )
    return Qwen2VLForConditionalGeneration(config)
