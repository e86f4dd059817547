"""Small random models that see or hear, by family, and media for them without a processor.

    family = FAMILIES["Qwen2VL"]
    module = family.build()                                       float64, dropout off
    tensors, ids = family.sample(["image", "image"], seed=0)      one prompt: rows of media, expanded tokens

`tensors` are rows as `types.Media` holds them, by the processor's names. `ids` are words with the placeholders
in their places. `batch` makes a few rows of prompts and responses, `alone` calls the plain model with one row.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn.types import Experience, Media

__all__ = ["AUDIO", "FAMILIES", "IMAGE", "VIDEO", "VOCAB", "WORDS", "Family", "alone", "batch"]

VOCAB = 64
WORDS = 50  # ids below this are words, but 0 and 1
IMAGE, VIDEO, AUDIO = 50, 51, 52
SEE, SEEN, HEAR, HEARD = 53, 54, 55, 56  # around media: vision start and end, audio start and end
TOKENS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
TYPES = {IMAGE: 1, VIDEO: 2, AUDIO: 3}

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MARKS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": SEE,
    "vision_end_token_id": SEEN,
}  # fmt: skip

Item = tuple[dict[str, Tensor], list[int]]  # rows of one image, video or audio, and its tokens


class Family(NamedTuple):
    """A small model, and the media that it takes."""

    make: Callable[[], torch.nn.Module]
    items: dict[str, Callable[[random.Random], Item]]  # kind -> one of it
    types: str | None = None  # the keyword of token types that the plain model wants
    leading: tuple[str, ...] = ()  # tensors of which the plain model takes one dimension more

    @property
    def kinds(self) -> list[str]:
        return list(self.items)

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
        """The model, its weights large enough that positions and pixels matter."""
        torch.manual_seed(seed)
        module = self.make().to(dtype).eval()
        with torch.no_grad():
            for p in module.parameters():
                if p.dim() > 1:
                    p.normal_(std=min(0.3, p[0].numel() ** -0.5))
        return module

    def sample(self, kinds: Sequence[str], seed: int = 0) -> Item:
        """(rows of media, tokens) of one prompt with these kinds of media, in order."""
        draw = random.Random(seed)
        tensors: dict[str, list[Tensor]] = {}
        ids = _words(draw)
        for kind in kinds:
            rows, places = self.items[kind](draw)
            for name, x in rows.items():
                tensors.setdefault(name, []).append(x)
            ids += [*places, *_words(draw)]
        return {name: torch.cat(each) for name, each in tensors.items()}, ids


def _words(draw: random.Random) -> list[int]:
    return [draw.randrange(2, WORDS) for _ in range(draw.randint(1, 4))]


def _noise(draw: random.Random, *size: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def batch(family: Family, rows: Sequence[Sequence[str]], seed: int = 0) -> Experience:
    """Rows of a prompt with these kinds of media, and a response of some words."""
    draw = random.Random(seed)
    prompts = [family.sample(kinds, seed=draw.randrange(2**31)) for kinds in rows]
    responses = [[draw.randrange(2, WORDS) for _ in range(draw.randint(2, 5))] for _ in rows]
    length = [len(ids) + len(response) for (_, ids), response in zip(prompts, responses)]
    tokens = torch.zeros(len(rows), max(length), dtype=torch.long)
    mask = torch.zeros(len(rows), max(length), dtype=torch.bool)
    for i, ((_, ids), response) in enumerate(zip(prompts, responses)):
        tokens[i, : length[i]] = torch.tensor(ids + response)
        mask[i, len(ids) : length[i]] = True
    number = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * mask
    return Experience(
        tokens=tokens,
        mask=mask,
        length=torch.tensor(length),
        old_logp=-number,
        adv=number,
        w=number / mask.sum(),
        media=Media.of_prompts([tensors or None for tensors, _ in prompts]),
    )


def alone(family: Family, module: Any, exp: Experience, row: int) -> Any:
    """The plain model's output for one row, as the library's users would call it."""
    ids = exp.tokens[row, : exp.length[row]][None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.types is not None:
        kinds = torch.zeros_like(ids)
        for token, number in TYPES.items():
            kinds[ids == token] = number
        inputs[family.types] = kinds
    if exp.media is not None:
        own = exp.media.take([row])
        for name, x in own.tensors.items():
            if x.shape[0] and name in family.leading:
                x = x[None]
            if x.shape[0]:
                inputs[name] = x
    return module(**inputs, use_cache=False)


# ---------------------------------------------------------------------------------------------- families


def _grid(name: str, grid: str, token: int, width: int, merge: int = 2, marks: bool = True) -> Callable:
    """Patches [t h w, width] of an image of random size, as the Qwen families take them."""

    def item(draw: random.Random) -> Item:
        t = 1
        if token == VIDEO:
            t = draw.randint(1, 3)
        h, w = (merge * draw.randint(1, 3) for _ in range(2))
        places = [token] * (t * h * w // merge**2)
        if marks:
            places = [SEE, *places, SEEN]
        return {name: _noise(draw, t * h * w, width), grid: torch.tensor([[t, h, w]])}, places

    return item


def _qwen2_vl() -> torch.nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **MARKS
    )
    return Qwen2VLForConditionalGeneration(config)


def _mel(draw: random.Random) -> Item:
    """An audio of Qwen2-Audio: a padded spectrogram [1, mel, frames] and which frames are real."""
    frames = draw.choice([16, 22, 32])
    features = _noise(draw, 1, 8, 32)
    features[..., frames:] = 0
    mask = (torch.arange(32) < frames).long()[None]
    tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return {"input_features": features, "feature_attention_mask": mask}, [HEAR, *[AUDIO] * tokens, HEARD]


def _qwen2_audio() -> torch.nn.Module:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    audio = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "num_mel_bins": 8, "max_source_positions": 16, "model_type": "qwen2_audio_encoder",
    }  # fmt: skip
    config = Qwen2AudioConfig(
        text_config=TEXT | {"model_type": "qwen2"}, audio_config=audio, audio_token_index=AUDIO
    )
    return Qwen2AudioForConditionalGeneration(config)


FAMILIES = {
    "Qwen2VL": Family(
        _qwen2_vl,
        {"image": _grid("pixel_values", "image_grid_thw", IMAGE, 3 * 2 * 4 * 4),
         "video": _grid("pixel_values_videos", "video_grid_thw", VIDEO, 3 * 2 * 4 * 4)},
        types="mm_token_type_ids",
    ),
    "Qwen2Audio": Family(_qwen2_audio, {"audio": _mel}),
}  # fmt: skip
