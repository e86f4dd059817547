"""A processor of images and frames as patches, which needs no torchvision."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn.model.pretrained import from_pretrained

__all__ = ["MARK", "PatchProcessor"]

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
