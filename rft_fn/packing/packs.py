"""Packs: rows of a batch as one flat micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn import check, segment, tree
from rft_fn.packing.units import common_size, placeholder_size, sizes_of, total
from rft_fn.types.batch import Experience, Packed

__all__ = [
    "begins",
    "of_rows",
    "pack",
    "pad",
    "placeholder",
    "real",
    "reset_position_ids",
    "sides",
    "stack",
    "unpack",
]


def reset_position_ids(seq: Tensor) -> Tensor:
    """Return positions that restart at 0 with every sequence, [T] i64.

    `seq` [T] has the sequence numbers, in contiguous runs. The function does not wait for a GPU.
    """
    check.shapes(seq=(seq, "T"))
    index = torch.arange(seq.shape[0], device=seq.device)
    if not seq.numel():
        return index
    return index - torch.where(begins(seq), index, 0).cummax(0).values


def begins(seq: Tensor) -> Tensor:
    """Return whether each token is the first of its sequence, [T] bool."""
    starts = torch.ones_like(seq, dtype=torch.bool)
    starts[1:] = seq[1:] != seq[:-1]
    return starts


_TOKEN_FIELDS = ("old_logp", "adv", "w", "ref_logp", "old_value", "ret", "words", "kept")


def pack(exp: Experience, rows: Sequence[int], *, unit: int | Sequence[int] = 1) -> Packed:
    """Pack rows of a batch into one micro-batch, without media.

    The rows' tokens follow each other. Every auxiliary field is 0 outside mask. `unit` consecutive rows
    belong together (see `media.pack`). With no rows, or no tokens: a `placeholder`. ValueError for units that
    do not make up the rows.
    """
    sizes = check.units(unit, len(rows), " of the pack")
    packed = of_rows(exp, rows, tuple(sizes))
    if len(packed.tokens):
        return packed
    # any token of the batch is one that the model knows
    like = tree.replace(packed, tokens=exp.tokens.flatten()[:1])
    return placeholder(like, size=placeholder_size(unit))


def of_rows(exp: Experience, rows: Sequence[int], unit: tuple[int, ...]) -> Packed:
    """Pack the tokens of some rows, one after the other."""
    device = exp.tokens.device

    # the row and position of each input; its target is one position later
    index = torch.tensor(list(rows), dtype=torch.long, device=device)
    sizes = (exp.length[index] - 1).clamp(min=0)
    seq = torch.repeat_interleave(torch.arange(len(rows), device=device), sizes)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    pos = torch.arange(len(seq), device=device) - starts
    row = index[seq]
    mask = exp.mask[row, pos + 1]

    def labels(x: Tensor) -> Tensor:
        moved = x[row, pos + 1]
        return torch.where(mask.view(-1, *[1] * (moved.dim() - 1)), moved, 0)

    # `labels` shifts by one, so that everything at t is about target[t]
    return Packed(
        tokens=exp.tokens[row, pos],
        target=exp.tokens[row, pos + 1],
        pos=pos,
        seq=seq,
        mask=mask,
        num_seqs=len(rows),
        rows=tuple(rows),
        unit=unit,
        sampling=exp.sampling,
        routing=None if exp.routing is None else exp.routing[row, pos],
        **_carried(exp, labels),
    )


def _carried(exp: Experience, labels: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Move the auxiliary fields of a batch by `labels`."""
    fields = {name: getattr(exp, name) for name in _TOKEN_FIELDS}
    moved: dict[str, Any] = {name: labels(x) for name, x in fields.items() if x is not None}
    if exp.extra is not None:
        moved["extra"] = {name: labels(x) for name, x in exp.extra.items()}
    if exp.temperature is not None:
        moved["temperature"] = labels(exp.temperature.unsqueeze(-1).expand_as(exp.tokens))
    return moved


def placeholder(like: Packed, *, size: int = 0) -> Packed:
    """Return a masked pack that adds nothing.

    It has the fields of `like` but media, with one unit of `size` sequences of one masked token each (the
    first of `like`, if any): by default as many as each unit of `like`, one where they differ. It runs
    forward and backward, and `unpack` puts it nowhere.
    """
    size = size or common_size(like)
    zeros = tree.map(lambda x: x.new_zeros(size, *x.shape[1:]), tree.replace(like, media=None))
    tokens = like.tokens[:1].repeat(size) if like.tokens.numel() else zeros.tokens
    return tree.replace(
        zeros,
        tokens=tokens,
        seq=torch.arange(size, device=tokens.device),
        num_seqs=size,
        rows=(),
        unit=(size,),
        padding=0,
    )


def pad(b: Packed, size: int) -> Packed:
    """Pad a pack with masked tokens to `size` tokens.

    They are at position 0 after the last sequence; in a causal model nothing before them changes. ValueError
    if the pack is larger.
    """
    more = size - b.tokens.shape[0]
    if more < 0:
        raise ValueError(f"size: expected >= {b.tokens.shape[0]}, the tokens of the pack, got {size}")
    longer = tree.map(lambda x: torch.cat([x, x.new_zeros(more, *x.shape[1:])]), tree.replace(b, media=None))
    seq = torch.cat([b.seq, b.seq[-1:].expand(more)])
    return tree.replace(longer, seq=seq, media=b.media, padding=b.padding + more)


def stack(exp: Experience) -> Packed:
    """Pack each row by itself, and stack the packs.

    They are padded to one size, so that every field is [B, T], for `torch.func.vmap` over samples.
    ValueError with media: its rows have no common size.
    """
    if exp.media is not None:
        raise ValueError("media: expected None, got some: rows of media cannot be stacked")
    packs = [tree.replace(pack(exp, [i]), rows=()) for i in range(exp.tokens.shape[0])]
    size = max(b.tokens.shape[0] for b in packs)
    padded = [tree.replace(pad(b, size), padding=0) for b in packs]  # static fields are the same in all
    return tree.map(lambda *x: torch.stack(x), *padded)


def unpack(x: Sequence[Tensor], packs: Sequence[Packed], like: Tensor) -> Tensor:
    """Put values of packs back on their tokens, [B, S, ...].

    Values [T, ...] of each pack are label-aligned; the first two dimensions of the result are as in `like`.
    It has the type of x, and is 0 on tokens for which no pack has a value.
    """
    if len(x) != len(packs):
        raise ValueError(f"x: expected {len(packs)} tensors, one for each pack, got {len(x)}")
    first = x[0] if x else torch.zeros(0)
    out = torch.zeros(*like.shape, *first.shape[1:], dtype=first.dtype, device=like.device)
    for values, p in zip(x, packs):
        number = values[(..., *[0] * (values.dim() - 1))]  # of each token, whatever else there is of it
        check.shapes(x=(number, "T"), target=(p.target, "T"))
        if p.rows:
            # padding and what is borrowed come after the rows
            size = int((p.seq[: p.target.shape[0] - p.padding] < len(p.rows)).sum())
            values, seq, pos = (x[:size].to(like.device) for x in (values, p.seq, p.pos))
            out[torch.tensor(p.rows, device=like.device)[seq], pos + 1] = values
    return out


def real(b: Packed) -> Tensor:
    """Return whether each unit of sequences has targets, [U] bool.

    A target is a token in mask. The other units teach nothing: placeholders, and units that `shard` would
    have left out. A metric of pairs (unit 2) counts only the real ones: `metric.mean(chosen > rejected,
    packing.real(b))`.
    """
    tokens = torch.zeros(b.num_seqs, dtype=torch.long, device=b.mask.device)
    tokens = tokens.index_add(0, b.seq, b.mask.long())
    return total(tokens, sizes_of(b)) > 0


def sides(x: Tensor, b: Packed) -> tuple[Tensor, Tensor]:
    """Sum over both rows of each pair, ([P], [P]).

    x [T] is summed over the tokens in mask. Sums of log-probs are the arguments of losses of pairs. A
    placeholder has sums of 0. ValueError for a pack that was not cut with unit=2.
    """
    sizes = sorted(set(sizes_of(b)))
    if sizes != [2]:
        raise ValueError(f"unit: expected a pack of pairs, shard(..., unit=2), got units of {sizes} rows")
    total = segment.sum(x, b.mask, b.seq, b.num_seqs)
    first, second = total.view(-1, 2).unbind(-1)
    return first, second
