"""What must change nothing: how the batch is cut, padded, packed and ordered."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rft_fn import packing, rng, tree
from rft_fn.testing.cases import (
    FIELDS,
    LENGTH,
    ROWS,
    VOCAB,
    Case,
    Extra,
    Weight,
    by_row,
    case,
    reweigh,
    uniform,
    whole,
)
from rft_fn.testing.run import assert_same, run, token_losses
from rft_fn.types import Experience, LossFn, Packed
from rft_fn.weight import token_mean

__all__ = [
    "check_packing_invariance", "check_padding_invariance", "check_partition_invariance",
    "check_permutation_invariance",
]  # fmt: skip


def _cuts(exp: Experience, seed: int) -> dict[str, list[Packed]]:
    """Names -> packs of the same rows, cut in every way that a run may cut them."""
    cuts = {"one row a micro-batch": by_row(exp)}
    order = torch.randperm(ROWS, generator=rng.generator(rng.fold_in(seed, "cut"))).tolist()
    for n in (2, 3):
        cuts[f"{n} random micro-batches"] = [packing.pack(exp, sorted(order[i::n])) for i in range(n)]
        parts = packing.minibatches(exp, n, rng.fold_in(seed, n))
        cuts[f"{n} minibatches that keep their w"] = [p for part in parts for p in whole(part)]
    for budget in (LENGTH, 2 * LENGTH, ROWS * LENGTH):
        for world in (1, 2, 5):
            shards = packing.shard(exp, budget, world)
            cuts[f"packs of {budget} tokens on {world} ranks"] = [p for rank in shards for p in rank]
    return cuts


def check_partition_invariance(
    loss_fn: LossFn,
    *,
    weight: Weight = token_mean,
    extra: Extra | None = None,
    seed: int = 0,
    rtol: float = 1e-12,
) -> None:
    """Every cut of the batch (micro-batches, packs, ranks, minibatches) has one total, gradient, metrics."""
    apply, params, exp = case(seed, weight=weight, extra=extra)
    want = run(loss_fn, apply, params, whole(exp))
    for name, packs in _cuts(exp, seed).items():
        assert_same(f"{name} instead of one pack", want, run(loss_fn, apply, params, packs), rtol)


def _spoil(x: Tensor, mask: Tensor) -> Tensor:
    """x [B, S, ...] with NaN outside mask, or 1 where its type has none."""
    outside = ~mask.view(*mask.shape, *[1] * (x.dim() - 2))
    return x.masked_fill(outside, torch.nan if x.is_floating_point() else 1)


def _widen(exp: Experience, columns: int, weight: Weight, seed: int) -> Experience:
    """`exp` with more columns, garbage tokens in its padding and NaN in every field outside mask."""
    wide = lambda x: torch.cat([x, x.new_zeros(ROWS, columns, *x.shape[2:])], 1)  # noqa: E731
    mask, pad = wide(exp.mask), torch.arange(LENGTH + columns) >= exp.length[:, None]
    garbage = uniform(seed, "garbage", 0, VOCAB, ROWS, LENGTH + columns)
    fields = {name: _spoil(wide(getattr(exp, name)), mask) for name in FIELDS}
    extra = {name: _spoil(wide(x), mask) for name, x in (exp.extra or {}).items()}
    tokens = torch.where(pad, garbage, wide(exp.tokens))
    return reweigh(tree.replace(exp, tokens=tokens, extra=extra, **fields), mask, weight)


def _tail(b: Packed, count: int) -> Packed:
    """`b` with one more sequence, of masked tokens, as packs of a fixed size have it."""
    longer = tree.map(lambda x: torch.cat([x, x.new_zeros(count, *x.shape[1:])]), b)
    seq = torch.cat([b.seq, torch.full((count,), b.num_seqs)])
    return tree.replace(longer, seq=seq, pos=packing.reset_position_ids(seq), num_seqs=b.num_seqs + 1)


def check_padding_invariance(
    loss_fn: LossFn,
    *,
    weight: Weight = token_mean,
    extra: Extra | None = None,
    seed: int = 0,
    rtol: float = 1e-12,
) -> None:
    """Padding, NaN in every field outside mask, and masked tokens at the end of packs change nothing."""
    apply, params, exp = case(seed, weight=weight, extra=extra)
    packs = whole(exp)
    want = run(loss_fn, apply, params, packs)
    for count in (1, LENGTH - 1):
        padded = whole(_widen(exp, count, weight, seed))
        assert_same(f"{count} more columns of padding", want, run(loss_fn, apply, params, padded), rtol)
        tail = [_tail(p, count) for p in packs]
        assert_same(f"{count} masked tokens after a pack", want, run(loss_fn, apply, params, tail), rtol)


@torch.no_grad()
def _table(loss_fn: LossFn, c: Case, packs: Sequence[Packed]) -> Tensor:
    """[B, S]: the loss of each token in mask."""
    x = [torch.where(p.mask, token_losses(loss_fn, c.apply(c.params, p), p)[0], 0) for p in packs]
    return packing.unpack(x, packs, c.exp.tokens)


def check_packing_invariance(
    loss_fn: LossFn,
    *,
    weight: Weight = token_mean,
    extra: Extra | None = None,
    seed: int = 0,
    rtol: float = 1e-12,
) -> None:
    """A token's loss is the same whatever shares its pack, in any order: sequences do not see each other."""
    c = case(seed, weight=weight, extra=extra)
    alone = _table(loss_fn, c, by_row(c.exp))
    ways = {"all rows in one pack": whole(c.exp)}
    ways["all rows backwards in one pack"] = [packing.pack(c.exp, range(ROWS)[::-1])]
    ways |= {f"packs of {n} tokens": packing.shard(c.exp, n)[0] for n in (LENGTH, 3 * LENGTH)}
    for name, packs in ways.items():
        error = (_table(loss_fn, c, packs) - alone).abs()
        row, at = divmod(int(error.nan_to_num(nan=torch.inf).argmax()), LENGTH)
        if not error[row, at] <= rtol * max(1.0, float(alone.abs().max())):
            raise AssertionError(
                f"{name} instead of each row alone: the loss of row {row}, token {at} changed by "
                f"{error[row, at]:.2g} from {alone[row, at]:.6g}; a neighbour leaks in"
            )


def check_permutation_invariance(
    loss_fn: LossFn,
    *,
    weight: Weight = token_mean,
    extra: Extra | None = None,
    seed: int = 0,
    rtol: float = 1e-12,
) -> None:
    """The order of the rows of the batch changes neither the total nor the gradient."""
    apply, params, exp = case(seed, weight=weight, extra=extra)
    want = run(loss_fn, apply, params, whole(exp))
    for n in range(3):
        order = torch.randperm(ROWS, generator=rng.generator(rng.fold_in(seed, "rows", n)))
        moved = packing.take(exp, order)
        got = run(loss_fn, apply, params, whole(reweigh(moved, moved.mask, weight)))
        assert_same(f"rows in the order {order.tolist()}", want, got, rtol)
