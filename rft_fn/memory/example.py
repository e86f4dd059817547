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
    prompts: int = 0  # such prompts in a step, whose media one process holds

    @property
    def nbytes(self) -> int:
        """The media of one prompt [bytes]."""
        return sum(x.numel() * x.element_size() for x in self.media.values())

    def copies(self, tokens: int) -> int:
        """How many of it fill a pack of `tokens`: one at least."""
        return max(tokens // len(self.ids), 1)

    def repeated(self, n: int) -> tuple[list[int], dict[str, Tensor]]:
        """(tokens, media) of n of it, one after the other; numbers that are no whole ones have no values."""
        media = {}
        for name, x in self.media.items():
            if x.is_floating_point():
                x = torch.empty_like(x, device="meta")
            media[name] = torch.cat([x] * n)
        return list(self.ids) * n, media


def largest(prompts: Iterable[Any], count: int = 0) -> Example | None:
    """The prompt with the most media, None where none has any. `count` prompts are in a step.

    Prompts are records with `ids` and `media`, as `data.take` gives them.
    """
    found: Example | None = None
    for prompt in prompts:
        media = getattr(prompt, "media", None)
        if not media:
            continue
        example = Example(prompt.ids, media, count)
        if found is None or example.nbytes > found.nbytes:
            found = example
    return found
