"""Keeps the tensors of fixed decoding steps, and the CUDA graphs that read them, from call to call.

A graph reads its tensors where they were when it was captured. So every tensor of a step has a lasting place,
as large as the largest that was asked for, of which smaller ones are a part. Where a place has to grow, the
graphs are captured anew.
"""

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rft_fn.engine.hf.shared_prefix import SharedPrefixes

__all__ = ["StepMemory"]

_MOST = 256  # graphs: a temperature that changes with every call would make ever more


class StepMemory:
    """The tensors of fixed steps by name, and a graph for each shape of a step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Give all memory back."""
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.prompts: SharedPrefixes | None = None
        self._places: dict[Hashable, Tensor] = {}

    def zeros(
        self, name: Hashable, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return zeros on the device of `like` in the place of a name, and forget what is there."""
        dtype = dtype or like.dtype
        size = math.prod(shape)
        place = self._places.get(name)
        if place is None or len(place) < size or place.dtype != dtype or place.device != like.device:
            self.graphs.clear()
            place = like.new_empty(size, dtype=dtype)
            self._places[name] = place
        return place[:size].view(*shape).zero_()

    def keep(self, step: Hashable, graph: "torch.cuda.CUDAGraph") -> None:
        """Keep the graph of a step."""
        if len(self.graphs) >= _MOST:
            self.graphs.clear()
        self.graphs[step] = graph

    def keep_prompts(self, prompts: "SharedPrefixes") -> None:
        """Keep prompts in lasting tensors; graphs that read others are forgotten."""
        if prompts is not self.prompts:
            self.graphs.clear()
        self.prompts = prompts
