"""A prompt with media, by which the memory of images, sounds and videos is estimated."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Example", "largest"]


class Example(NamedTuple):
    """The tokens of a prompt, placeholders included, and its media by the processor's names."""

    ids: Sequence[int]
    media: Mapping[str, Tensor]
    prompts: int = 0  # such prompts in a step; one process holds their media

    @property
    def nbytes(self) -> int:
        """Return the media of one prompt [bytes]."""
        return sum(x.numel() * x.element_size() for x in self.media.values())

    def copies(self, tokens: int) -> int:
        """Return how many of it fill a pack of `tokens`: one at least."""
        return max(tokens // len(self.ids), 1)

    def repeated(self, n: int) -> tuple[list[int], dict[str, Tensor]]:
        """Return (tokens, media) of n of it in a row; float tensors are on the meta device."""
        media = {}
        for name, x in self.media.items():
            row = torch.empty_like(x, device="meta") if x.is_floating_point() else x
            media[name] = torch.cat([row] * n)
        return list(self.ids) * n, media


def largest(prompts: Iterable[Any], count: int = 0) -> Example | None:
    """Return the prompt (a record with `ids` and `media`) with the most media, None if none has any."""
    with_media = [prompt for prompt in prompts if getattr(prompt, "media", None)]
    examples = [Example(prompt.ids, prompt.media, count) for prompt in with_media]
    return max(examples, key=lambda example: example.nbytes, default=None)
