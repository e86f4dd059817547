"""Batches of rows of ids, rows that belong together, and rows that packs without media borrow.

Where a batch has media, the towers run in every pack. Models with sharded parts run
alike on all processes, so a tower that only some packs need would stop the others. What is borrowed has
nothing to learn: its mask is False and its w 0, and it is in no row.
"""

import itertools
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rft_fn import check, tree, weight
from rft_fn.types import Experience, Packed
from rft_fn.types.media import Media

__all__ = [
    "conversations", "count_filled", "counts", "members_of", "owners", "placeholder_size",
    "placeholder_units", "rows_to_borrow", "scored", "supervised", "tokens_to_borrow", "total", "unit_of",
    "units_of", "units_to_borrow",
]  # fmt: skip


# ---------- units: sequences that belong together, such as both sides of a pair or all of a ranked list


Unit = int | tuple[int, ...]  # of a pack


def unit_of(b: Packed) -> Tensor:
    """Return the unit of each sequence of a pack, [K] i64.

    Scores of a listwise loss are compared within it: `loss.plackett_luce(score, rank, unit_of(b))`.
    """
    return _numbers(check.units(b.unit, b.num_seqs), b.seq.device)


def _numbers(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return 0 for each member of the first unit, 1 for each of the second, ..., i64."""
    return torch.tensor([u for u, size in enumerate(sizes) for _ in range(size)], device=device).long()


def total(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum x [B] over the members of each unit, [U]."""
    zeros = x.new_zeros(len(sizes))
    return zeros.index_add(0, _numbers(sizes, x.device), x)


def members_of(sizes: Sequence[int], which: Sequence[int]) -> list[int]:
    """Return the members of some units, in that order."""
    ends = list(accumulate(sizes))
    return [i for u in which for i in range(ends[u] - sizes[u], ends[u])]


def units_of(unit: int | Sequence[int], rows: Sequence[int]) -> Unit:
    """Return the units of a pack of `rows`, whole units of a batch, from the units of the batch."""
    if isinstance(unit, int):
        return unit
    starts = dict(zip(accumulate(unit, initial=0), unit))
    return tuple(starts[row] for row in rows if row in starts)


def placeholder_size(unit: int | Sequence[int]) -> int:
    """Return the sequences of a placeholder unit: as many as all have, or one where they differ."""
    return unit if isinstance(unit, int) else 1


def placeholder_units(unit: int | Sequence[int], count: int) -> Unit:
    """Return the units of `count` placeholder sequences."""
    return unit if isinstance(unit, int) else (1,) * count


def count_filled(b: Packed) -> int:
    """Count the units with rows."""
    return sum(end <= len(b.rows) for end in accumulate(check.units(b.unit, b.num_seqs)))


# ---------- rows that packs without media borrow


def counts(media: Media | None) -> dict[str, Tensor]:
    """Return name -> [B] i64, the rows of media of each sequence, of the names that have any."""
    if media is None:
        return {}
    named = {name: media.count(name) for name in media.tensors}
    return {name: count for name, count in named.items() if bool(count.any())}


def _cheapest(count: Mapping[str, Tensor], size: Tensor, have: Sequence[int]) -> list[int]:
    """Choose items to add to `have`, so that there are rows of every name.

    For each name that is missing the item of the smallest `size` above 0; ties go by index.
    """
    chosen: list[int] = []
    for rows in count.values():
        if bool(rows[[*have, *chosen]].any()):
            continue
        able = ((rows > 0) & (size > 0)).nonzero().flatten().tolist()
        sizes = size.tolist()
        chosen += sorted(able, key=lambda i: (sizes[i], i))[:1]
    return chosen


def rows_to_borrow(exp: Experience, rows: Sequence[int]) -> list[int]:
    """Return the rows that a pack of `rows` borrows.

    For each kind of media that the batch has and the pack lacks, the row that has it and the fewest tokens
    that were read, not sampled. A function of numbers only: media need not be held.
    """
    count = counts(exp.media)
    if all(bool(owned[list(rows)].any()) for owned in count.values()):
        return []
    return _cheapest(count, _read(exp), rows)


def _read(exp: Experience) -> Tensor:
    """Count the inputs of each row that were not sampled, [B] i64."""
    inputs = (exp.length - 1).clamp(min=0)
    position = torch.arange(exp.mask.shape[1], device=exp.mask.device)
    return inputs - (exp.mask & (position < inputs[:, None])).sum(-1)


def tokens_to_borrow(exp: Experience, unit: int | Sequence[int]) -> int:
    """Return the most tokens that a pack may borrow: 0 if every unit has all kinds of media."""
    sizes = check.units(unit, len(exp.tokens))
    lacking = [c for c in counts(exp.media).values() if not bool(total(c, sizes).all())]
    if not lacking:
        return 0
    return placeholder_size(unit) * int(_read(exp)[rows_to_borrow(exp, [])].sum())


def owners(exp: Experience, packs: Sequence[Sequence[int]]) -> list[int]:
    """Return the owners of media that packs of these rows read, also of what they borrow."""
    if exp.media is None:
        return []
    rows = [row for pack in packs for row in [*pack, *rows_to_borrow(exp, pack)]]
    of = exp.media.of[rows]
    return of[of >= 0].unique().tolist()


def units_to_borrow(b: Packed, which: Sequence[int]) -> list[int]:
    """Return the smallest units of a pack that supply each kind of media that `which` lack."""
    sizes = check.units(b.unit, b.num_seqs)
    size = total(torch.bincount(b.seq, minlength=b.num_seqs), sizes)
    count = {name: total(c, sizes) for name, c in counts(b.media).items()}
    return _cheapest(count, size, which)


# ---------- batches of rows of ids: what is learned or scored in each row


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
