"""A prompt with media, by which the memory of images, sounds and videos is estimated."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rft_fn.types import Transform

__all__ = ["Example", "Groups", "Layout", "WrapOptimizer", "largest"]


# ---------- the record in which each backend describes how it lays out a model


class WrapOptimizer(Protocol):
    """Wraps an optimizer as a backend runs it."""

    def __call__(self, tx: Transform, params: Mapping[str, Tensor], /) -> Transform:
        """The transform that updates `params`: `tx`, with clipping or float32 masters around it."""
        ...


class Groups(Protocol):
    """Groups the parameters of a module by when they are used."""

    def __call__(self, root: nn.Module, /) -> Sequence[Sequence[nn.Parameter]]:
        """Parameters that are gathered and reduced together.

        The last group is the root's: it stays gathered from its forward to the end of the backward.
        """
        ...


def _unchanged(tx: Transform, params: Mapping[str, Tensor]) -> Transform:
    return tx


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype


@dataclass(frozen=True)
class Layout:
    """How a backend lays out a model: shards, types, temporary copies, offloading.

    `Layout()` is one process that keeps and computes everything in the module's own types.
    """

    # the number of processes that each of these is sharded over
    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    sequence: int = 1  # the tokens of a pack

    # types of floating-point parameters; None: as the module has them
    kept: torch.dtype | None = None  # while they are trained
    frozen: torch.dtype | None = None  # while they are not
    stepped: torch.dtype | None = None  # in the optimizer
    computed: torch.dtype | None = None  # in forward and backward

    # the optimizer
    wrap_optimizer: WrapOptimizer = _unchanged
    flat_copy: bool = False  # it holds a copy of the parameters that it steps
    sum_dtype: Callable[[torch.dtype], torch.dtype] = _same  # of gradients, by the parameter's

    # copies for the time of a forward and backward
    cast_copy: bool = False  # all parameters in the computed type
    groups: Groups | None = None  # gradients are reduced group by group; None: they stay whole
    gathered: bool = False  # parameters are gathered group by group

    # "parameters", "gradients", "optimizer", "update": what lives in host memory
    on_host: frozenset[str] = frozenset()
    copied_for_update: bool = False  # parameters and gradients go to the host, and updates come back


# ---------- a prompt with media, by which the memory of images, sounds and videos is estimated


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
