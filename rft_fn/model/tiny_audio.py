"""The tiny model that hears: Qwen2-Audio with 0.12 M parameters, for up to a second of audio."""

from typing import Any

__all__ = ["STEPS", "TASK", "TEMPLATE", "TOKENS", "new_model", "new_processor"]

TASK = "tone"
STEPS = 18  # of the warm-up
MELS = 16  # bands of the spectrogram
FRAMES = 100  # of a second
TOKENS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% else %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'tool' %}={% endif %}{% endif %}{% endfor %}"
)
TEXT = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
AUDIO = {
    "model_type": "qwen2_audio_encoder", "d_model": 48, "encoder_layers": 1, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "num_mel_bins": MELS, "max_source_positions": FRAMES // 2,
}  # fmt: skip


def new_processor(tokenizer: Any) -> Any:
    """A Qwen2-Audio processor of a second of audio, which is at most 25 tokens."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    features = WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
    return Qwen2AudioProcessor(features, tokenizer, chat_template=TEMPLATE)


def new_model(tokenizer: Any) -> Any:
    """A Qwen2-Audio for the tokens of a tokenizer, its weights drawn by torch's global generator."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    config = Qwen2AudioConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer)},
        audio_config=AUDIO,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return Qwen2AudioForConditionalGeneration(config)
