"""Draws of tokens: numerically stable, by uniform numbers of each row's own stream."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rft_fn import logprob, rng, tree
from rft_fn.engine.requests import Row
from rft_fn.types import Sampling

__all__ = ["draw", "draw_token", "kept_words", "numbers_per_draw", "uniform_numbers"]


def numbers_per_draw(vocab: int) -> int:
    """Return how many uniform numbers one draw from `vocab` tokens takes: ceil(log2(vocab))."""
    return (vocab - 1).bit_length()


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Draw one of V tokens with the probabilities p / p.sum(-1): p [B, V], u [B, D] -> token [B].

    u are uniform numbers in [0, 1), float64; the first `numbers_per_draw(V)` are read. A token of
    probability 0 is never drawn. Sums are formed element by element, so that a row gives the same token in
    any batch.
    """
    # a level is the one below it, folded in the middle: y[j] = x[j] + x[j + half]
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


def draw_token(
    logits: Tensor,
    u: Tensor,
    sampling: Sampling,
    temperature: Tensor | None = None,
    process: Callable[..., Tensor] = logprob.process_logits,
    by: Callable[[Tensor, Tensor], Tensor] = draw,
) -> tuple[Tensor, Tensor]:
    """Return (token [B], logp [B]) drawn by uniform numbers u [B, D]; the likeliest at temperature 0.

    `temperature` [B] is one for each row, in place of that of `sampling`. `process` is called as
    `logprob.process_logits` is, `by` as `draw`.
    """
    if temperature is not None:
        likeliest, likeliest_logp = draw_token(
            logits, u, tree.replace(sampling, temperature=0), process=process
        )
        warm = temperature > 0
        own = torch.where(warm, temperature, 1)
        token, logp = _drawn(process(logits, sampling, temperature=own), u, by)
        return torch.where(warm, token, likeliest), torch.where(warm, logp, likeliest_logp)
    z = process(logits, sampling)
    if sampling.temperature == 0:
        largest, token = z.max(-1)
        return token, largest - z.logsumexp(-1)
    return _drawn(z, u, by)


def kept_words(logits: Tensor, sampling: Sampling, temperature: Tensor | None = None) -> Tensor:
    """Return the words that `draw_token` may give, [B, V] bool; a greedy token is one of those at 1."""
    own = None if temperature is None else torch.where(temperature > 0, temperature, 1)
    return logprob.process_logits(logits, sampling, temperature=own) > -torch.inf


def _drawn(z: Tensor, u: Tensor, by: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return (token [B], logp [B]) drawn from logits [B, V]."""
    p = z.softmax(-1)
    token = by(p, u)
    return token, p.gather(-1, token.unsqueeze(-1)).squeeze(-1).log()


def uniform_numbers(rows: Sequence[Row], longest: int, vocab: int) -> Tensor:
    """Return the uniform numbers of each row's tokens: [R, `longest`, D] float64, D for each token.

    They are the row's stream from its start to its limit, then 0. They are drawn at once, so that no row
    depends on when another one ends.
    """
    depth = numbers_per_draw(vocab)
    drawn = max(row.start + row.max_new for row in rows)
    streams = rng.uniform([row.key for row in rows], drawn * depth)
    u = torch.zeros(len(rows), longest, depth, dtype=torch.float64)
    for r, (row, stream) in enumerate(zip(rows, streams.unflatten(-1, (drawn, depth)))):
        u[r, : row.max_new] = stream[row.start : row.start + row.max_new]
    return u
