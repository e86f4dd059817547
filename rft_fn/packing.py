"""From rows to packs and back: the only place where anything is shifted by one.

`Experience` is [B, S] and token-aligned, `Packed` is flat [T] and label-aligned: row i of length L gives L -
1 inputs tokens[:-1] with targets tokens[1:], and every auxiliary field moves with its *target*. Everything
here is a pure function of the global batch, so every rank computes the same plan and takes its own part of
it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rft_fn import check, rng, segment, tree, weight
from rft_fn.types import Experience, Packed, Rollout

__all__ = [
    "assign", "conversations", "left_out", "minibatches", "pack", "pad", "real", "reset_position_ids",
    "shard", "sides", "stack", "supervised", "take", "unpack", "waste",
]  # fmt: skip

Batch = TypeVar("Batch", Experience, Rollout)
_TOKEN_FIELDS = ("old_logp", "adv", "w", "ref_logp", "old_value", "ret")


def reset_position_ids(seq: Tensor) -> Tensor:
    """seq [T], sequence numbers in contiguous runs -> [T] i64: positions that restart at 0
    with every run. No host sync."""
    check.shapes(seq=(seq, "T"))
    index = torch.arange(seq.shape[0], device=seq.device)
    starts = torch.ones_like(seq, dtype=torch.bool)
    starts[1:] = seq[1:] != seq[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values if seq.numel() else index


def assign(sizes: Sequence[int], budget: int, *, most: int = 0) -> list[list[int]]:
    """Items of `sizes` [tokens] into packs of at most `budget` tokens (and `most` items, if not 0): best fit
    decreasing, ties by index.

    Each pack is a list of indices; items of size 0 are in none. ValueError for an item that is larger than
    the budget. Never needs more than 11/9 of the fewest possible packs + 1 (Johnson 1973); on GSM8K's lengths
    it leaves under 1 % of the tokens empty.
    """
    order = sorted((i for i, n in enumerate(sizes) if n), key=lambda i: (-sizes[i], i))
    packs: list[list[int]] = []
    room: list[int] = []
    for i in order:
        if sizes[i] > budget:
            raise ValueError(
                f"budget: expected at least {sizes[i]} tokens, the size of row {i}, got {budget}; "
                "raise the budget or shorten max_new"
            )
        free = [k for k in range(len(packs)) if not most or len(packs[k]) < most]
        fits = [(room[k] - sizes[i], k) for k in free if room[k] >= sizes[i]]
        if fits:
            _, k = min(fits)
            packs[k].append(i)
            room[k] -= sizes[i]
        else:
            packs.append([i])
            room.append(budget - sizes[i])
    return packs


def waste(sizes: Sequence[int], packs: Sequence[Sequence[int]], budget: int) -> float:
    """The share of the packs' budget that holds no token."""
    return 1 - sum(sizes[i] for p in packs for i in p) / max(budget * len(packs), 1)


def pack(exp: Experience, rows: Sequence[int], *, unit: int = 1) -> Packed:
    """The rows of `exp`, one after the other, as one micro-batch; every auxiliary field is 0 outside mask.

    `unit` consecutive rows belong together, 2 for losses of pairs. Without rows it is a masked placeholder of
    `unit` sequences of one token: it runs forward and backward and adds nothing, so that all ranks run
    equally many packs. ValueError for a unit that does not divide the rows.
    """
    if unit < 1 or len(rows) % unit:
        raise ValueError(f"unit: expected a divisor of the {len(rows)} rows of the pack, got {unit}")
    device = exp.tokens.device
    index = torch.tensor(list(rows), dtype=torch.long, device=device)
    sizes = (exp.length[index] - 1).clamp(min=0)
    total = int(sizes.sum())
    if total == 0:
        return _empty(exp, unit)
    seq = torch.repeat_interleave(torch.arange(len(rows), device=device), sizes)
    pos = torch.arange(total, device=device) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    row = index[seq]
    mask = exp.mask[row, pos + 1]

    def labels(x: Tensor) -> Tensor:
        moved = x[row, pos + 1]
        return torch.where(mask.view(-1, *[1] * (moved.dim() - 1)), moved, 0)

    return Packed(
        tokens=exp.tokens[row, pos],
        target=exp.tokens[row, pos + 1],
        pos=pos,
        seq=seq,
        mask=mask,
        num_seqs=len(rows),
        rows=tuple(rows),
        unit=unit,
        **_carried(exp, labels, rows),
    )


def _carried(exp: Experience, labels: Callable[[Tensor], Tensor], rows: Sequence[int]) -> dict[str, Any]:
    """What an experience brings besides tokens, where it has it: each field as `labels` moves it, and the
    media of `rows`."""
    fields = {name: getattr(exp, name) for name in _TOKEN_FIELDS}
    found: dict[str, Any] = {name: labels(x) for name, x in fields.items() if x is not None}
    if exp.extra is not None:
        found["extra"] = {name: labels(x) for name, x in exp.extra.items()}
    if exp.media is not None:
        found["media"] = exp.media.take(list(rows))
    return found


def _empty(exp: Experience, unit: int) -> Packed:
    """`unit` sequences, each of one masked token, with no row behind them: `unpack` puts them nowhere."""
    zero = exp.tokens.new_zeros(unit)
    tokens = zero
    if exp.tokens.numel():
        tokens = exp.tokens[:1, 0].repeat(unit)
    return Packed(
        tokens=tokens,
        target=zero,
        pos=zero,
        seq=torch.arange(unit, device=zero.device),
        mask=torch.zeros_like(zero, dtype=torch.bool),
        num_seqs=unit,
        rows=(),
        unit=unit,
        **_carried(exp, lambda x: x.new_zeros(unit, *x.shape[2:]), []),
    )


def real(b: Packed) -> Tensor:
    """[K / unit] bool: which units (pairs, where unit is 2) of a pack have a token in mask.

    The others teach nothing: placeholders, and what `shard` would have left out. A metric of pairs counts
    only the real ones: `metric.mean(chosen > rejected, packing.real(b))`.
    """
    tokens = torch.zeros(b.num_seqs // b.unit, dtype=torch.long, device=b.mask.device)
    return tokens.index_add(0, b.seq // b.unit, b.mask.long()) > 0


def sides(x: Tensor, b: Packed) -> tuple[Tensor, Tensor]:
    """([P], [P]): sums of x [T] over the tokens in mask of the first and the second row of each pair.

    Of log-probs they are what losses of pairs take. A placeholder has sums of 0. ValueError for a pack that
    was not cut with unit=2.
    """
    if b.unit != 2:
        raise ValueError(f"unit: expected a pack of pairs, shard(..., unit=2), got unit = {b.unit}")
    total = segment.sum(x, b.mask, b.seq, b.num_seqs).view(-1, 2)
    return total[:, 0], total[:, 1]


def pad(b: Packed, size: int) -> Packed:
    """`b` with masked tokens at position 0 after its last sequence, up to `size` tokens: in a causal model
    nothing before them changes. ValueError if `b` is larger."""
    more = size - b.tokens.shape[0]
    if more < 0:
        raise ValueError(f"size: expected >= {b.tokens.shape[0]}, the tokens of the pack, got {size}")
    longer = tree.map(lambda x: torch.cat([x, x.new_zeros(more, *x.shape[1:])]), tree.replace(b, media=None))
    seq = torch.cat([b.seq, b.seq[-1:].expand(more)])
    return tree.replace(longer, seq=seq, media=b.media, padding=b.padding + more)


def stack(exp: Experience) -> Packed:
    """Each row as a pack of its own, padded to one size and stacked: every field [B, T], for
    `torch.func.vmap` over samples. ValueError with media, whose rows have no common size."""
    if exp.media is not None:
        raise ValueError("media: expected None, got some: rows of media cannot be stacked")
    packs = [tree.replace(pack(exp, [i]), rows=()) for i in range(exp.tokens.shape[0])]
    size = max(b.tokens.shape[0] for b in packs)
    padded = [tree.replace(pad(b, size), padding=0) for b in packs]  # static fields are the same in all
    return tree.map(lambda *x: torch.stack(x), *padded)


def _spread(sizes: Sequence[int], budget: int, count: int, most: int) -> list[list[int]] | None:
    """Items of `sizes` > 0 over `count` packs of nearly equal size, the largest first, each to the emptiest
    pack that has fewer than `most` (if not 0); None if that makes a pack larger than the budget."""
    packs: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in sorted((i for i, n in enumerate(sizes) if n), key=lambda i: (-sizes[i], i)):
        k = min((k for k in range(count) if not most or len(packs[k]) < most), key=lambda k: (load[k], k))
        packs[k].append(i)
        load[k] += sizes[i]
    return packs if max(load) <= budget else None


def _learns(exp: Experience, unit: int) -> Tensor:
    """[B / unit] bool: which units of rows have a token in mask."""
    rows = exp.tokens.shape[0]
    if unit < 1 or rows % unit:
        raise ValueError(f"unit: expected a divisor of the {rows} rows, got {unit}")
    return exp.mask[:, 1:].any(-1).view(-1, unit).any(-1)


def left_out(exp: Experience, *, unit: int = 1) -> list[int]:
    """The numbers of the units of rows that `shard` leaves out, because none of their tokens is in mask: to
    count them in a metric, or to find what is wrong with them. ValueError for a unit that does not divide the
    rows."""
    return (~_learns(exp, unit)).nonzero()[:, 0].tolist()


def _sizes(exp: Experience, unit: int) -> list[int]:
    """Inputs of each unit of rows; 0 where none of its tokens is in mask."""
    learns = _learns(exp, unit)
    return torch.where(learns, (exp.length - 1).clamp(min=0).view(-1, unit).sum(-1), 0).tolist()


def shard(
    exp: Experience, budget: int, world: int = 1, *, unit: int = 1, most: int = 0
) -> list[list[Packed]]:
    """The batch as packs of at most `budget` tokens (0: of any size) for each of `world` ranks: the same
    number of packs for every rank.

    Units without a token in mask have nothing to learn from and are left out (`left_out` names them). `unit`
    consecutive rows stay together in one pack, in order: 2 for losses of pairs. `most` bounds the rows of a
    pack, if not 0. There are as few packs as best fit needs, rounded up to a multiple of `world`; rows are
    spread over them evenly where the budget allows it, and packs are dealt out from the largest to the
    smallest, each to the rank with the fewest tokens that still takes one. ValueError for a row (a unit) that
    is larger than the budget, a unit that does not divide the rows, or a `most` below it.
    """
    if most and most < unit:
        raise ValueError(f"most: expected >= unit = {unit} rows a pack, got {most}")
    sizes = _sizes(exp, unit)
    most //= unit  # from here on, of units
    budget = budget or sum(sizes)
    packs = assign(sizes, budget, most=most)
    each = max(-(-len(packs) // world), 1)
    packs = _spread(sizes, budget, each * world, most) or packs
    packs = packs + [[] for _ in range(each * world - len(packs))]
    load = [0] * world
    share: list[list[list[int]]] = [[] for _ in range(world)]
    for p in sorted(packs, key=lambda p: -sum(sizes[i] for i in p)):
        rank = min((r for r in range(world) if len(share[r]) < each), key=lambda r: (load[r], r))
        share[rank].append(p)
        load[rank] += sum(sizes[i] for i in p)

    def rows(units: list[int]) -> list[int]:
        return [i * unit + j for i in sorted(units) for j in range(unit)]

    return [[pack(exp, rows(p), unit=unit) for p in part] for part in share]


def unpack(x: Sequence[Tensor], packs: Sequence[Packed], like: Tensor) -> Tensor:
    """Label-aligned values [T, ...] of each pack back at their tokens: [B, S, ...], 0 where there is none."""
    if len(x) != len(packs):
        raise ValueError(f"x: expected {len(packs)} tensors, one for each pack, got {len(x)}")
    dtype = x[0].dtype if x else torch.float32
    further = x[0].shape[1:] if x else ()
    out = torch.zeros(*like.shape, *further, dtype=dtype, device=like.device)
    for values, p in zip(x, packs):
        check.shapes(x=(values[(...,) + (0,) * len(further)], "T"), target=(p.target, "T"))
        if p.rows:
            size = p.target.shape[0] - p.padding
            values, seq, pos = (x[:size].to(like.device) for x in (values, p.seq, p.pos))
            out[torch.tensor(p.rows, device=like.device)[seq], pos + 1] = values
    return out


def take(exp: Batch, index: Tensor) -> Batch:
    """The rows `index` [n] of an experience, or of a rollout."""
    rows = tree.map(lambda x: x[index], tree.replace(exp, media=None))
    if exp.media is None:
        return rows
    return tree.replace(rows, media=exp.media.take(index.tolist()))


def minibatches(exp: Experience, n: int, key: int, *, unit: int = 1) -> list[Experience]:
    """The rows of `exp` in an order drawn from `key`, cut into n minibatches of nearly equal size.

    Each is for one update; `unit` consecutive rows stay together, in order. `w` is cut with the rest and so
    sums to 1/n of the batch's: recompute it with `weight.*` on each minibatch where every update should have
    its own mean. One minibatch is `exp` itself. ValueError unless 1 <= n <= B / unit, or for a unit that does
    not divide the rows.
    """
    units = len(_learns(exp, unit))
    if not 1 <= n <= units:
        of = "rows" if unit == 1 else f"units of {unit} rows"
        raise ValueError(f"n: expected between 1 and the number of {of} {units}, got {n}")
    if n == 1:
        return [exp]
    order = torch.randperm(units, generator=rng.generator(key)).to(exp.tokens.device)
    members = order[:, None] * unit + torch.arange(unit, device=order.device)
    return [take(exp, part.flatten()) for part in members.tensor_split(n)]


def supervised(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Experience:
    """(prompt ids, response ids) of each row as an Experience for supervised fine-tuning: the responses are
    the mask, w is the mean over their tokens, and what only a policy has (old_logp, adv) is 0. ValueError
    without rows."""
    if not rows:
        raise ValueError("rows: expected at least one (prompt ids, response ids), got none")
    return conversations([([*p, *r], [False] * len(p) + [True] * len(r)) for p, r in rows])


def conversations(rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Experience:
    """(ids, mask) of each row as an Experience for supervised fine-tuning: any tokens of a row may be
    learned, as the turns of one who speaks several times. w is the mean over the tokens in the masks.

    ValueError without rows, for a mask of another length than its ids, and for one that holds the first
    token, which nothing predicts.
    """
    if not rows:
        raise ValueError("rows: expected at least one (ids, mask), got none")
    length = torch.tensor([len(ids) for ids, _ in rows])
    tokens = torch.zeros(len(rows), int(length.max()), dtype=torch.long)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (ids, learned) in enumerate(rows):
        if len(ids) != len(learned):
            raise ValueError(
                f"rows: expected a mask of {len(ids)} in row {i}, as its ids, got {len(learned)}"
            )
        if learned and learned[0]:
            raise ValueError(f"rows: expected a token before the first that is learned in row {i}, got none")
        tokens[i, : len(ids)] = torch.tensor(ids)
        mask[i, : len(ids)] = torch.tensor(learned)
    zero = torch.zeros(tokens.shape)
    return Experience(
        tokens=tokens, mask=mask, length=length, old_logp=zero, adv=zero, w=weight.token_mean(mask)
    )
