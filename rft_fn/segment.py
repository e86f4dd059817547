"""Reductions over the sequences of a flat stream, and their results back on its positions.

Each reduction takes x [T], mask [T] bool, the sequence number seq [T] of each position, and the number of
sequences K = num_seqs, and returns [K]. Positions outside `mask` do not exist. A sequence without a position
in mask gives 0 and no gradient, never NaN.
"""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.precision import widen

__all__ = ["max", "mean", "spread", "sum"]


def sum(x: Tensor, mask: Tensor, seq: Tensor, num_seqs: int) -> Tensor:
    """Sum over the positions in mask of each sequence."""
    check.shapes(x=(x, "T"), mask=(mask, "T"), seq=(seq, "T"))
    x = widen(x)  # a sum of ones in bfloat16 stops at 256
    return x.new_zeros(num_seqs).index_add(0, seq, torch.where(mask, x, 0))


def mean(x: Tensor, mask: Tensor, seq: Tensor, num_seqs: int) -> Tensor:
    """Average over the positions in mask of each sequence."""
    return sum(x, mask, seq, num_seqs) / sum(mask.to(x.dtype), mask, seq, num_seqs).clamp(min=1)


def max(x: Tensor, mask: Tensor, seq: Tensor, num_seqs: int) -> Tensor:
    """Return the maximum over the positions in mask of each sequence."""
    check.shapes(x=(x, "T"), mask=(mask, "T"), seq=(seq, "T"))
    low = torch.where(mask, x, -torch.inf)
    top = x.new_full((num_seqs,), -torch.inf).scatter_reduce(0, seq, low, "amax")
    return torch.where(top == -torch.inf, 0, top)


def spread(x: Tensor, seq: Tensor) -> Tensor:
    """Put the number of each sequence on its positions: x [K], seq [T] -> [T].

    A loss per sequence as a loss per token, with the gradients of a sequence's tokens added up. Positions
    outside a mask get the number too; `w` is 0 there. With `seq // 2` x has a number for each pair.
    """
    check.shapes(x=(x, "K"), seq=(seq, "T"))
    return x[seq]
