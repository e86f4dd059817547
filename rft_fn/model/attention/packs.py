"""The boundaries of the sequences of a pack."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SequenceBounds"]


class SequenceBounds:
    """Where the sequences of a pack lie: sizes in tokens, in order, on the device of the pack.

    `calls` counts the attention layers that got it, so that a model that drops it is found out. `sequence` is
    the axis over which the tokens are split (its heads and tokens exchange them), if they are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | str = "cpu", *, sequence: Any = None):
        self.sizes, self.sequence = list(sizes), sequence
        self.longest, self.calls, self.device = max(self.sizes), 0, device
        self._made: dict[str, Tensor] = {}
        self._cut: tuple[Tensor | None, bool, Tensor] | None = None
        groups: dict[int, list[int]] = {}
        for i, size in enumerate(self.sizes):
            groups.setdefault(size, []).append(i)
        # reordering copies q, k, v: it pays where sequences of one length are many
        self.groups = groups if 2 * len(groups) <= len(self.sizes) else None

    @property
    def cu(self) -> Tensor:
        """[K + 1] i32: where each sequence begins, and the end."""
        if "cu" not in self._made:
            ends = torch.tensor([0, *self.sizes]).cumsum(0)
            self._made["cu"] = ends.to(self.device, torch.int32)
        return self._made["cu"]

    @property
    def order(self) -> Tensor:
        """[T] i64: the tokens, those of sequences of one length together."""
        if "order" not in self._made:
            starts = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
            token = [
                t for g in (self.groups or {}).values() for i in g for t in range(starts[i], starts[i + 1])
            ]
            self._made["order"] = torch.tensor(token).to(self.device)
        return self._made["order"]

    @property
    def inverse(self) -> Tensor:
        """[T] i64: the place of each token in `order`."""
        if "inverse" not in self._made:
            self._made["inverse"] = self.order.argsort()
        return self._made["inverse"]

    @property
    def same(self) -> Tensor:
        """[T, T] bool: whether two tokens are of one sequence. For layers that this module cannot serve."""
        if "same" not in self._made:
            seq = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))
            seq = seq.to(self.device)
            self._made["same"] = seq[:, None] == seq
        return self._made["same"]

    def cut(self, mask: Tensor | None, *, causal: bool) -> Tensor:
        """`mask` [1, 1, T, T], or what None stands for, less the pairs of two sequences. Kept for the next
        layer, which mostly has the same mask."""
        if self._cut is None or self._cut[0] is not mask or self._cut[1] != causal:
            same = self.same[None, None]
            if mask is None:
                new = same.tril() if causal else same
            elif mask.dtype == torch.bool:
                new = mask & same
            else:
                new = mask.masked_fill(~same, torch.finfo(mask.dtype).min)
            self._cut = (mask, causal, new)
        return self._cut[2]
