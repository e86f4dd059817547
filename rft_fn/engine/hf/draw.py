"""Draws from a categorical distribution that hardly change when its probabilities hardly do.

The same row in another batch has logits that differ by rounding. Inverse CDF in the order of the vocabulary
adds that rounding up over all tokens before the one that is drawn, which is more than a rare token's own
probability: in a vocabulary of 49,152 about one draw in 1,000 changed (measured). Here a tree of sums is
descended from its root, and each choice between two halves depends on the ratio of their masses alone.
"""

import torch
from torch import Tensor

__all__ = ["draw", "numbers_per_draw"]


def numbers_per_draw(vocab: int) -> int:
    """The uniform numbers that one draw from `vocab` tokens takes: ceil(log2(vocab))."""
    return (vocab - 1).bit_length()


def draw(p: Tensor, u: Tensor) -> Tensor:
    """p [B, V], u [B, D] -> token [B]: one of V tokens with the probabilities p / p.sum(-1).

    u are uniform numbers in [0, 1), float64, of which the first `numbers_per_draw(V)` are read. A token of
    probability 0 is never drawn. Sums are formed element by element, so that a row gives the same token in
    any batch.
    """
    # the nodes of a level are those below it, folded in the middle: y[j] = x[j] + x[j + half]
    levels = [p]
    while levels[-1].shape[-1] > 1:
        below = levels[-1]
        half = (below.shape[-1] + 1) // 2
        pairs = below.shape[-1] - half
        above = below[:, :pairs] + below[:, half:]
        if pairs < half:  # the node in the middle has none
            above = torch.cat([above, below[:, pairs:half]], -1)
        levels.append(above)

    # from the root, which is one node, to a token
    node = torch.zeros(len(p), 1, dtype=torch.long, device=p.device)
    for depth, level in enumerate(reversed(levels[:-1])):
        half = (level.shape[-1] + 1) // 2
        other = node + half
        exists = other < level.shape[-1]
        first = level.gather(-1, node).double()
        second = level.gather(-1, other.clamp(max=level.shape[-1] - 1)).double() * exists
        node = torch.where(u[:, depth : depth + 1] * (first + second) < first, node, other)
    return node.squeeze(-1)
