"""Batches of rows of ids: what is learned or scored in each row."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree, weight
from rft_fn.types import Experience
from rft_fn.types.media import Media

__all__ = ["conversations", "scored", "supervised"]

Part = Mapping[str, Tensor] | None  # the media of a row


def supervised(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Experience:
    """Make a supervised batch of prompts and responses.

    Each row is (prompt ids, response ids). The responses are in mask and w is the mean over their tokens;
    old_logp and adv are 0. ValueError without rows.
    """
    if not rows:
        raise ValueError("rows: expected at least one (prompt ids, response ids), got none")
    return conversations([([*p, *r], [False] * len(p) + [True] * len(r)) for p, r in rows])


def conversations(rows: Sequence[Sequence[Any]]) -> Experience:
    """Make a supervised batch of tokens and masks.

    Each row is (ids, mask), or (ids, mask, media) with the tensors of its media or None. Any tokens may be in
    mask, such as all turns of one speaker. w is the mean over the tokens in the masks. ValueError without
    rows, for a mask of another length than its ids, and for one that holds the first token, which nothing
    predicts.
    """
    if not rows:
        raise ValueError("rows: expected at least one (ids, mask), got none")

    ids = [row[0] for row in rows]
    for i, row in enumerate(rows):
        learned = row[1]
        if len(ids[i]) != len(learned):
            raise ValueError(
                f"rows: expected a mask of {len(ids[i])} in row {i}, as its ids, got {len(learned)}"
            )
        if learned and learned[0]:
            raise ValueError(f"rows: expected a token before the first one in mask in row {i}, got none")
    exp = _batch(ids, [row[1] for row in rows], [next(iter(row[2:]), None) for row in rows])
    return tree.replace(exp, w=weight.token_mean(exp.mask))


def scored(rows: Sequence[Any], *, ends: Sequence[Sequence[int]] | None = None) -> Experience:
    """Make a batch of texts for reward models, which score whole texts or their steps.

    Each row is ids, or (ids, media) with the tensors of its media or None. A pack has no input for the last
    token of a row, which nothing follows: so the last token is appended once more, as a target that
    nobody learns. `mask` is True on the token after each one that is scored: the appended one, or with
    `ends` the one after the end of each step. `ends` has for each row the positions of the last tokens of
    its steps, in rising order. So a pack has mask[t] where the score of the sequence up to input t is
    asked for. A model takes targets in mask for text: no placeholder of an image or a sound may follow
    the end of a step.

    w is 1 / rows on every token in mask: the sum over the scores of a row, the mean over rows. Without ends
    a row can have none, and is left out of packs. ValueError without rows, for a row without a token, and
    for ends that do not rise or lie outside their row.
    """
    if not rows:
        raise ValueError("rows: expected at least one row of ids, got none")
    parts = [_ids_and_media(row) for row in rows]
    sizes = [len(ids) for ids, _ in parts]
    if not all(sizes):
        raise ValueError(f"rows: expected at least one token in row {sizes.index(0)}, got none")
    if ends is None:
        ends = [[size - 1] for size in sizes]
    _check_ends(ends, sizes)

    # the score after position e is asked for where the target is e + 1
    masks = []
    for size, at in zip(sizes, map(set, ends)):
        masks.append([s - 1 in at for s in range(size + 1)])
    exp = _batch([[*ids, ids[-1]] for ids, _ in parts], masks, [media for _, media in parts])
    return tree.replace(exp, w=weight.seq_sum(exp.mask))


def _ids_and_media(row: Any) -> tuple[Sequence[int], Part]:
    """Return the ids of a row, and its media; plain numbers are ids."""
    ids, media = row, None
    if len(row) and torch.as_tensor(row[0]).dim():
        ids, media = row
    return [int(token) for token in ids], media


def _check_ends(ends: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
    """Raise ValueError for ends of steps that are no rising positions of each row."""
    if len(ends) != len(sizes):
        raise ValueError(f"ends: expected those of {len(sizes)} rows, got {len(ends)}")
    for i, (at, size) in enumerate(zip(ends, sizes)):
        rising = all(a < b for a, b in itertools.pairwise(at))
        if not rising or any(not 0 <= e < size for e in at):
            raise ValueError(
                f"ends: expected rising positions from 0 to {size - 1} in row {i}, got {list(at)}"
            )


def _batch(
    ids: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], media: Sequence[Part]
) -> Experience:
    """Right-pad rows of ids with their masks and media, as an engine's rollouts are; w is 0."""
    length = torch.tensor([len(row) for row in ids])
    tokens = torch.zeros(len(ids), int(length.max()), dtype=torch.long)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (row, learned) in enumerate(zip(ids, masks)):
        tokens[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = torch.tensor(learned)

    zero = torch.zeros(tokens.shape)
    return Experience(
        tokens=tokens,
        mask=mask,
        length=length,
        old_logp=zero,
        adv=zero,
        w=zero,
        media=Media.of_prompts(media),
    )
