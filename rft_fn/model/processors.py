"""A processor of images and frames as patches, which needs no torchvision."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn.model.pretrained import from_pretrained

__all__ = ["MARK", "ChunkProcessor", "PatchProcessor"]


# ---------- a processor of images and frames as patches, which needs no torchvision


MARK = "rft_fn_processor.json"
"""The file that tells a folder with such a processor."""


class PatchProcessor:
    """Images and frames of videos as patches, as models of Qwen's VL families want them.

    It is called as the processors of transformers are.
    """

    image_token = "<|image_pad|>"
    video_token = "<|video_pad|>"

    def __init__(self, image_processor: Any, tokenizer: Any):
        """`image_processor` is a Qwen2VLImageProcessor by PIL."""
        self.image_processor = image_processor
        self.video_processor = image_processor  # a video is its frames, by twos
        self.tokenizer = tokenizer

    @property
    def chat_template(self) -> str | None:
        """That of the tokenizer."""
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
        """input_ids [1, n] of one text, and the tensors of its media.

        pixel_values [patches, dim] and image_grid_thw [images, 3], alike for videos. Each place is widened to
        the tokens of its medium: patches / merge_size^2.
        """
        (whole,) = text
        found: dict[str, Tensor] = {}
        if images:
            out = self.image_processor(list(images), return_tensors=return_tensors)
            found |= {"pixel_values": out["pixel_values"], "image_grid_thw": out["image_grid_thw"]}
            whole = self._widened(whole, self.image_token, found["image_grid_thw"])
        if videos:
            patches, grids = zip(*(self._frames(video) for video in videos))
            found |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.stack(grids)}
            whole = self._widened(whole, self.video_token, found["video_grid_thw"])
        ids = self.tokenizer.encode(whole, add_special_tokens=add_special_tokens)
        return {"input_ids": torch.tensor([ids]), **found}

    def _widened(self, text: str, token: str, grids: Tensor) -> str:
        """The text with each place as often as its medium has tokens."""
        parts = text.split(token)
        if len(parts) != len(grids) + 1:
            raise ValueError(f"expected {len(grids)} places {token}, got {len(parts) - 1}")
        counts = (grids.prod(-1) // self.image_processor.merge_size**2).tolist()
        return parts[0] + "".join(token * n + part for n, part in zip(counts, parts[1:]))

    def _frames(self, frames: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """(patches [n, dim], grid [3]) of one video.

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
        """The processor of a folder of ours, or of a Qwen VL model."""
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        tokenizer = from_pretrained(AutoTokenizer, str(folder), what="tokenizer")
        return cls(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer)


# ---------- a processor of audio in chunks of one length, beside text that holds its places


_FRAMES = 8  # of the spectrogram that are a token: the tower's stride of 2, and four in a row


class ChunkProcessor:
    """Audio of any length as Voxtral wants it: chunks of 30 s, the last one filled up with silence.

    It is called as other processors of transformers are, while VoxtralProcessor itself takes audio only with
    messages, by a tokenizer of another package.
    """

    in_chunks = True
    """Whether audio may be longer than what the feature extractor reads at a time."""

    def __init__(self, whole: Any):
        """`whole` is a VoxtralProcessor, whose tokenizer has a chat template."""
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
        """input_ids [1, n] of one text, and input_features [chunks, mels, frames] of its audio.

        Each place is widened to the tokens of its audio: frames / 8 for each chunk.
        """
        (written,) = text
        found: dict[str, Tensor] = {}
        if audio:
            chunks = [self._chunks(samples, sampling_rate, return_tensors) for samples in audio]
            found["input_features"] = torch.cat(chunks)
            written = self._widened(written, [len(x) * (x.shape[-1] // _FRAMES) for x in chunks])
        ids = self.tokenizer.encode(written, add_special_tokens=add_special_tokens)
        return {"input_ids": torch.tensor([ids]), **found}

    def _chunks(self, samples: Any, rate: int | None, tensors: str) -> Tensor:
        """The spectrogram [chunks, mels, frames] of one audio."""
        extractor = self.feature_extractor
        how = {"sampling_rate": rate, "return_tensors": tensors}
        fill = {"padding": True, "truncation": False, "pad_to_multiple_of": extractor.n_samples}
        made = extractor(samples, **how, **fill)["input_features"]
        return made.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1)

    def _widened(self, text: str, counts: Sequence[int]) -> str:
        """The text with each place as often as its audio has tokens."""
        parts = text.split(self.audio_token)
        if len(parts) != len(counts) + 1:
            raise ValueError(f"expected {len(counts)} places {self.audio_token}, got {len(parts) - 1}")
        return parts[0] + "".join(self.audio_token * n + part for n, part in zip(counts, parts[1:]))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the processor as transformers does, with its tokenizer."""
        self.whole.save_pretrained(folder)
