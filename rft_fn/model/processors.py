"""Processors of images, frames and audio that need no torchvision and no package of another vendor."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn.model.pretrained import from_pretrained

__all__ = ["MARK", "ChunkProcessor", "PatchProcessor"]


# ---------- images and frames as patches


MARK = "rft_fn_processor.json"  # the file that tells a folder with a PatchProcessor


def _widened(text: str, token: str, counts: Sequence[int]) -> str:
    """Repeat each placeholder `token` of a text as often as its medium has tokens."""
    parts = text.split(token)
    if len(parts) != len(counts) + 1:
        raise ValueError(f"expected {len(counts)} places {token}, got {len(parts) - 1}")
    return parts[0] + "".join(token * n + part for n, part in zip(counts, parts[1:]))


class PatchProcessor:
    """Cuts images and frames of videos into patches as Qwen's VL models want; called as transformers'."""

    image_token = "<|image_pad|>"
    video_token = "<|video_pad|>"

    def __init__(self, image_processor: Any, tokenizer: Any):
        """Take a Qwen2VLImageProcessor by PIL."""
        self.image_processor = image_processor
        self.video_processor = image_processor  # a video is its frames, by twos
        self.tokenizer = tokenizer

    @property
    def chat_template(self) -> str | None:
        """Return the template of the tokenizer."""
        return self.tokenizer.chat_template

    def __call__(
        self,
        text: Sequence[str],
        images: Sequence[Any] | None = None,
        videos: Sequence[Sequence[Any]] | None = None,
        *,
        return_tensors: str = "pt",
        add_special_tokens: bool = False,
    ) -> dict[str, Tensor]:
        """Return input_ids [1, n] of one text, and the tensors of its media.

        pixel_values [patches, dim] and image_grid_thw [images, 3], alike for videos. Each placeholder is
        widened to the tokens of its image or video: patches / merge_size^2.
        """
        (whole,) = text
        found: dict[str, Tensor] = {}
        if images:
            out = self.image_processor(list(images), return_tensors=return_tensors)
            found |= {"pixel_values": out["pixel_values"], "image_grid_thw": out["image_grid_thw"]}
            whole = _widened(whole, self.image_token, self._tokens(found["image_grid_thw"]))
        if videos:
            patches, grids = zip(*(self._frames(video) for video in videos))
            found |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.stack(grids)}
            whole = _widened(whole, self.video_token, self._tokens(found["video_grid_thw"]))
        ids = self.tokenizer.encode(whole, add_special_tokens=add_special_tokens)
        return {"input_ids": torch.tensor([ids]), **found}

    def _tokens(self, grids: Tensor) -> list[int]:
        """Return the tokens of each image or video, by their grids [n, 3]."""
        return (grids.prod(-1) // self.image_processor.merge_size**2).tolist()

    def _frames(self, frames: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return (patches [n, dim], grid [3]) of one video.

        A patch spans `temporal_patch_size` frames; the last frame is repeated to fill it up.
        """
        size = self.image_processor.temporal_patch_size
        frames = [*frames, *[frames[-1]] * (-len(frames) % size)]
        out = self.image_processor(frames, return_tensors="pt")
        _, height, width = out["image_grid_thw"][0].tolist()

        # an image fills all of a patch's frames with itself: take frame k of a patch from the k-th image
        each = out["pixel_values"].view(len(frames) // size, size, height * width, 3, size, -1)
        spans = torch.stack([each[:, k, :, :, k] for k in range(size)], 3)
        grid = torch.tensor([len(frames) // size, height, width])
        return spans.reshape(-1, out["pixel_values"].shape[-1]), grid

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the processor, with its tokenizer, for `from_pretrained`."""
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)
        Path(folder, MARK).write_text(json.dumps({"processor": "PatchProcessor"}) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "PatchProcessor":
        """Load the processor of a folder of ours, or of a Qwen VL model."""
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        tokenizer = from_pretrained(AutoTokenizer, str(folder), what="tokenizer")
        return cls(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer)


# ---------- audio in chunks of one length


_FRAMES = 8  # of the spectrogram that are a token: the tower's stride of 2, and four in a row


class ChunkProcessor:
    """Cuts audio of any length as Voxtral wants it: chunks of 30 s, the last one filled with silence.

    It is called as other processors of transformers are, while VoxtralProcessor itself takes audio only
    with messages, by a tokenizer of another package.
    """

    in_chunks = True  # audio may be longer than what the feature extractor reads at a time

    def __init__(self, whole: Any):
        """Take a VoxtralProcessor with a chat template in its tokenizer."""
        self.whole = whole
        self.feature_extractor = whole.feature_extractor
        self.tokenizer = whole.tokenizer
        self.audio_token = whole.audio_token

    def __call__(
        self,
        text: Sequence[str],
        audio: Sequence[Any] | None = None,
        *,
        sampling_rate: int | None = None,
        return_tensors: str = "pt",
        add_special_tokens: bool = False,
    ) -> dict[str, Tensor]:
        """Return input_ids [1, n] of one text, and input_features [chunks, mels, frames] of its audio.

        Each placeholder is widened to the tokens of its audio: frames / 8 for each chunk.
        """
        (written,) = text
        found: dict[str, Tensor] = {}
        if audio:
            chunks = [self._chunks(samples, sampling_rate, return_tensors) for samples in audio]
            found["input_features"] = torch.cat(chunks)
            counts = [len(x) * (x.shape[-1] // _FRAMES) for x in chunks]
            written = _widened(written, self.audio_token, counts)
        ids = self.tokenizer.encode(written, add_special_tokens=add_special_tokens)
        return {"input_ids": torch.tensor([ids]), **found}

    def _chunks(self, samples: Any, rate: int | None, tensors: str) -> Tensor:
        """Return the spectrogram [chunks, mels, frames] of one audio."""
        extractor = self.feature_extractor
        made = extractor(
            samples,
            sampling_rate=rate,
            return_tensors=tensors,
            padding=True,
            truncation=False,
            pad_to_multiple_of=extractor.n_samples,
        )["input_features"]
        return made.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the processor as transformers does, with its tokenizer."""
        self.whole.save_pretrained(folder)
