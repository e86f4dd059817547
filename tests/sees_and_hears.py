"""Small random models that see or hear, by family, and media for them without a processor.

    family = FAMILIES["Qwen2VL"]
    module = family.build()                                       float64, dropout off
    tensors, ids = family.sample(["image", "image"], seed=0)      one prompt: rows of media, expanded tokens

`tensors` are rows as `types.Media` holds them, by the processor's names. `ids` are words with the
placeholders in their places. `batch` makes a few rows of prompts and responses, `alone` calls the plain model
with one row.
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
    items: dict[str, Callable[[random.Random, int], Item]]  # kind -> one of n of a prompt
    types: str | None = None  # the keyword of types that the plain model wants; "prefix": those of PaliGemma
    counted: bool = False  # whether the plain model wants the number of images of each sequence
    single: bool = False  # whether it computes in float32 only
    leading: tuple[str, ...] = ()  # tensors of which the plain model takes one dimension more

    @property
    def kinds(self) -> list[str]:
        return list(self.items)

    def rows(self) -> list[list[str]]:
        """Prompts with two media, one and none in turn; one of each kind, and one of all kinds."""
        first = self.kinds[0]
        rows = [[first, first], [], [first], [], [first]]
        rows += [[kind] for kind in self.kinds[1:]]
        if len(self.kinds) > 1:
            rows.append(self.kinds)
        return rows

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
            rows, places = self.items[kind](draw, len(kinds))
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
        if family.types == "prefix":
            kinds[:] = exp.mask[row, : exp.length[row]].cumsum(0).clamp(max=1)
        name = {"prefix": "token_type_ids"}.get(family.types, family.types)
        inputs[name] = kinds
    if exp.media is not None:
        own = exp.media.take([row])
        for name, x in own.tensors.items():
            if x.shape[0] and name in family.leading:
                x = x[None]
            if x.shape[0]:
                inputs[name] = x
        if family.counted and "image_sizes" in inputs:
            inputs["batch_num_images"] = torch.tensor([len(inputs["image_sizes"])])
    return module(**inputs, use_cache=False)


# ---------------------------------------------------------------------------------------------- families


def _grid(name: str, grid: str, token: int, width: int, merge: int = 2, marks: bool = True) -> Callable:
    """Patches [t h w, width] of an image of random size, as the Qwen families take them."""

    def item(draw: random.Random, n: int) -> Item:
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
    config = Qwen2VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **MARKS)
    return Qwen2VLForConditionalGeneration(config)


def _mel(draw: random.Random, n: int) -> Item:
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


def _qwen2_5_vl() -> torch.nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "hidden_size": 32, "out_hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 48,
        "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **MARKS)
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(experts: bool = False) -> torch.nn.Module:
    import transformers

    vision = {
        "hidden_size": 32, "out_hidden_size": 32, "depth": 3, "num_heads": 2, "intermediate_size": 48,
        "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = TEXT | {"rope_parameters": rope, "head_dim": 8}
    if experts:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **MARKS)
        return transformers.Qwen3VLMoeForConditionalGeneration(config)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **MARKS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _by_frame(draw: random.Random, n: int) -> Item:
    """A video of Qwen3-VL: its frames stand apart, the time of each written before it."""
    rows, places = _grid("pixel_values_videos", "video_grid_thw", VIDEO, 3 * 2 * 4 * 4)(draw, n)
    t, h, w = rows["video_grid_thw"][0].tolist()
    places = []
    for _ in range(t):
        places += [draw.randrange(2, WORDS), SEE, *[VIDEO] * (h * w // 4), SEEN]
    return rows, places


def _timed(name: str) -> Callable:
    """A video whose frames are a random time apart."""
    video = _grid("pixel_values_videos", "video_grid_thw", VIDEO, 3 * 2 * 4 * 4)

    def item(draw: random.Random, n: int) -> Item:
        rows, places = video(draw, n)
        return rows | {name: torch.tensor([draw.choice([0.5, 1.0, 2.0])])}, places

    return item


def _omni() -> torch.nn.Module:
    import transformers
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    vision = {
        "hidden_size": 32, "out_hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 48,
        "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    audio = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "num_mel_bins": 8, "max_source_positions": 16, "n_window": 8, "output_dim": 32,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = Qwen2_5OmniThinkerConfig(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, audio_config=audio,
        audio_token_index=AUDIO, image_token_index=IMAGE, video_token_index=VIDEO,
        audio_start_token_id=HEAR, audio_end_token_id=HEARD, vision_start_token_id=SEE,
        vision_end_token_id=SEEN,
    )  # fmt: skip
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16,
}  # fmt: skip
CLIP = VISION | {"model_type": "clip_vision_model", "patch_size": 8}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "patch_size": 8, "vision_use_head": False}
LLAMA = TEXT | {"model_type": "llama"}


def _square(tokens: int, size: int = 16) -> Callable:
    """A square image of as many tokens."""

    def item(draw: random.Random, n: int) -> Item:
        return {"pixel_values": _noise(draw, 1, 3, size, size)}, [IMAGE] * tokens

    return item


def _tiles(draw: random.Random, n: int) -> Item:
    """An image in one tile or three, in each of which some rows of pixels are padding."""
    tiles = draw.choice([1, 3])
    mask = torch.ones(tiles, 16, 16, dtype=torch.long)
    mask[-1, draw.choice([8, 12, 16]) :] = 0
    places = []
    for _ in range(tiles):
        places += [SEE, *[IMAGE] * 4]
    return {"pixel_values": _noise(draw, tiles, 3, 16, 16), "pixel_attention_mask": mask}, [*places, SEEN]


def _crops(draw: random.Random, n: int) -> Item:
    """An image in crops, those of smaller images padded; several of a prompt are one crop each."""
    h, w, crops, tokens = draw.choice([(16, 32, 3, 14), (32, 16, 3, 16), (32, 32, 5, 24)])
    pixels = _noise(draw, 1, 5, 3, 16, 16)
    pixels[:, crops:] = 0
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[h, w]])}, [IMAGE] * tokens


def _crops_of_one(draw: random.Random, n: int) -> Item:
    """`_crops` of LLaVA-OneVision, which cuts an image only where it is the only one of a prompt."""
    rows, places = _crops(draw, n)
    if n > 1:
        places = [IMAGE] * 5
    return rows, places


def _patched(draw: random.Random, n: int) -> Item:
    """An image of Pixtral: padded to the largest, its size beside it."""
    h, w = (8 * draw.randint(2, 3) for _ in range(2))
    pixels = torch.zeros(1, 3, 24, 24, dtype=torch.float64)
    pixels[..., :h, :w] = _noise(draw, 1, 3, h, w)
    line = [*[IMAGE] * (w // 8), SEE]
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[h, w]])}, [
        *line * (h // 8 - 1),
        *line[:-1],
        SEEN,
    ]


def _idefics(kind: str) -> Callable:
    def make() -> torch.nn.Module:
        import transformers

        vision = VISION | {"patch_size": 4}
        config = getattr(transformers, f"{kind}Config")(
            text_config=LLAMA, vision_config=vision, image_token_id=IMAGE, scale_factor=2, pad_token_id=0
        )
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)

    return make


def _joined(kind: str, vision: dict, text: dict, **options: Any) -> Callable:
    """A family whose config has a tower and a text model, and a few numbers."""

    def make() -> torch.nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **options)
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)

    return make


def _chunks(draw: random.Random, n: int) -> Item:
    """An audio of Voxtral in chunks of one length."""
    chunks = draw.choice([1, 2])
    return {"input_features": _noise(draw, chunks, 8, 32)}, [HEAR, *[AUDIO] * (4 * chunks)]


def _voxtral() -> torch.nn.Module:
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    audio = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "num_mel_bins": 8, "max_source_positions": 16,
    }  # fmt: skip
    config = VoxtralConfig(text_config=LLAMA, audio_config=audio, audio_token_id=AUDIO)
    return VoxtralForConditionalGeneration(config)


GEMMA = TEXT | {"head_dim": 8, "query_pre_attn_scalar": 8}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
PINS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
QWEN = 3 * 2 * 4 * 4

FAMILIES = {
    "Qwen2VL": Family(
        _qwen2_vl,
        {"image": _grid("pixel_values", "image_grid_thw", IMAGE, QWEN),
         "video": _grid("pixel_values_videos", "video_grid_thw", VIDEO, QWEN)},
        types="mm_token_type_ids",
    ),
    "Qwen2.5VL": Family(
        _qwen2_5_vl,
        {"image": _grid("pixel_values", "image_grid_thw", IMAGE, QWEN),
         "video": _timed("second_per_grid_ts")},
        types="mm_token_type_ids",
    ),
    "Qwen3VL": Family(
        _qwen3_vl,
        {"image": _grid("pixel_values", "image_grid_thw", IMAGE, QWEN), "video": _by_frame},
        types="mm_token_type_ids",
    ),
    "Qwen2.5Omni": Family(
        _omni,
        {"image": _grid("pixel_values", "image_grid_thw", IMAGE, QWEN), "audio": _mel,
         "video": _timed("video_second_per_grid")},
    ),
    "SmolVLM": Family(
        _idefics("SmolVLM"), {"image": _tiles}, leading=("pixel_values", "pixel_attention_mask")
    ),
    "Idefics3": Family(
        _idefics("Idefics3"), {"image": _tiles}, leading=("pixel_values", "pixel_attention_mask")
    ),
    "Llava": Family(_joined("Llava", CLIP, LLAMA, image_token_index=IMAGE), {"image": _square(4)}),
    "LlavaNext": Family(
        _joined("LlavaNext", CLIP, LLAMA, image_token_index=IMAGE, **PINS), {"image": _crops}
    ),
    "LlavaOnevision": Family(
        _joined(
            "LlavaOnevision", SIGLIP, TEXT | {"model_type": "qwen2"}, image_token_index=IMAGE,
            video_token_index=VIDEO, vision_feature_select_strategy="full", **PINS,
        ),
        {"image": _crops_of_one},
        counted=True,
    ),
    "InternVL": Family(
        _joined(
            "InternVL", VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
            TEXT | {"model_type": "qwen2"}, image_token_id=IMAGE,
        ),
        {"image": _square(4)},
    ),
    "Gemma3": Family(
        _joined(
            "Gemma3", SIGLIP | {"patch_size": 4}, GEMMA | SLIDING, image_token_index=IMAGE,
            mm_tokens_per_image=4,
        ),
        {"image": _square(4)},
        types="token_type_ids",
    ),
    "Qwen2Audio": Family(_qwen2_audio, {"audio": _mel}),
    "Voxtral": Family(_voxtral, {"audio": _chunks}),
    "Mistral3": Family(
        _joined(
            "Mistral3", VISION | {"model_type": "pixtral", "patch_size": 4, "head_dim": 8, "image_size": 24},
            TEXT | {"model_type": "mistral", "head_dim": 8}, image_token_index=IMAGE, spatial_merge_size=2,
        ),
        {"image": _patched},
    ),
    "PaliGemma": Family(
        _joined(
            "PaliGemma", SIGLIP, TEXT | {"model_type": "gemma", "head_dim": 8}, image_token_index=IMAGE,
            projection_dim=32, hidden_size=32,
        ),
        {"image": _square(4)},
        types="prefix",
    ),
}  # fmt: skip
