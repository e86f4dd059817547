"""Checks of invariance to cutting, padding, packing and order."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from rft_fn import packing, rng, tree
from rft_fn.testing.cases import (
    FIELDS,
    LENGTH,
    ROWS,
    VOCAB,
    Case,
    ExtraFn,
    Unit,
    assert_same,
    by_unit,
    case,
    packed,
    reweigh,
    rows_of,
    run,
    token_losses,
    uniform,
    whole,
)
from rft_fn.types import Experience, LossFn, Packed, WeightFn
from rft_fn.weight import token_mean

__all__ = [
    "check_packing_invariance", "check_padding_invariance", "check_partition_invariance",
    "check_permutation_invariance",
]  # fmt: skip


def _order(seed: int, unit: Unit, *name: str | int) -> list[list[int]]:
    """Rows of each unit, in random order.

    The order of the units is drawn by `name`.
    """
    rows = rows_of(unit)
    order = torch.randperm(len(rows), generator=rng.generator(rng.fold_in(seed, *name)))
    return [rows[u] for u in order.tolist()]


def _minibatches(exp: Experience, n: int, seed: int, unit: Unit) -> list[Packed]:
    """One pack of each of n minibatches."""
    key = rng.fold_in(seed, n)
    small = packing.minibatches(exp, n, key, unit=unit)
    units = [unit] * n
    if not isinstance(unit, int):
        units = packing.minibatch_units(unit, n, key)
    return [p for part, own in zip(small, units) for p in whole(part, own)]


def _cuts(exp: Experience, seed: int, unit: Unit) -> dict[str, list[Packed]]:
    """Name -> packs of the same rows, cut differently.

    There is one entry for every way in which a run may cut them.
    """
    largest = max(map(len, rows_of(unit)))
    one = "one row"
    if largest > 1:
        one = f"one unit of {unit} rows"
    cuts = {f"{one} per micro-batch": by_unit(exp, unit)}

    # by micro-batches and minibatches
    order = _order(seed, unit, "cut")
    for n in (2, 3)[: len(order) - 1]:
        parts = [sorted(chain(*order[i::n])) for i in range(n)]
        cuts[f"{n} random micro-batches"] = [packed(exp, rows, unit) for rows in parts]
        cuts[f"{n} minibatches that keep their w"] = _minibatches(exp, n, seed, unit)

    # by packs and ranks, more of these than packs too
    for budget in (largest * LENGTH, 2 * largest * LENGTH, ROWS * LENGTH):
        for world in (1, 2, 5):
            shards = packing.shard(exp, budget, world, unit=unit)
            cuts[f"packs of {budget} tokens on {world} ranks"] = [p for rank in shards for p in rank]
    return cuts


def check_partition_invariance(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    rtol: float = 1e-12,
) -> None:
    """Check that no cut of the batch changes the results.

    The cuts are into micro-batches, packs, ranks and minibatches.
    """
    apply, params, exp = case(seed, weight=weight, extra=extra)
    want = run(loss_fn, apply, params, whole(exp, unit))
    for name, packs in _cuts(exp, seed, unit).items():
        assert_same(f"{name} instead of one pack", want, run(loss_fn, apply, params, packs), rtol)


def _spoil(x: Tensor, mask: Tensor) -> Tensor:
    """x [B, S, ...] with NaN outside mask.

    Types without NaN get 1 there.
    """
    outside = ~mask.view(*mask.shape, *[1] * (x.dim() - 2))
    if x.is_floating_point():
        return x.masked_fill(outside, torch.nan)
    return x.masked_fill(outside, 1)


def _widen(exp: Experience, columns: int, weight: WeightFn, seed: int) -> Experience:
    """Add garbage to a batch.

    It gets more columns, random tokens in the padding, and NaN in every field outside mask.
    """

    def wide(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(ROWS, columns, *x.shape[2:])], 1)

    mask = wide(exp.mask)
    pad = torch.arange(LENGTH + columns) >= exp.length[:, None]
    garbage = uniform(seed, "garbage", 0, VOCAB, ROWS, LENGTH + columns)
    fields = {name: _spoil(wide(getattr(exp, name)), mask) for name in FIELDS}
    extra = {name: _spoil(wide(x), mask) for name, x in (exp.extra or {}).items()}
    tokens = torch.where(pad, garbage, wide(exp.tokens))
    return reweigh(tree.replace(exp, tokens=tokens, extra=extra, **fields), mask, weight)


def _tail(b: Packed, count: int) -> Packed:
    """Add a unit of masked sequences to a pack.

    Packs of a fixed size have one.
    """
    longer = tree.map(lambda x: torch.cat([x, x.new_zeros(count, *x.shape[1:])]), b)
    seq = torch.cat([b.seq, torch.full((count,), b.num_seqs)])
    pos = packing.reset_position_ids(seq)
    if isinstance(b.unit, int):
        return tree.replace(longer, seq=seq, pos=pos, num_seqs=b.num_seqs + b.unit)
    return tree.replace(longer, seq=seq, pos=pos, num_seqs=b.num_seqs + 1, unit=(*b.unit, 1))


def check_padding_invariance(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    rtol: float = 1e-12,
) -> None:
    """Check that padding changes nothing.

    Nor do NaN in every field outside mask, and masked tokens at the end of packs.
    """
    apply, params, exp = case(seed, weight=weight, extra=extra)
    packs = whole(exp, unit)
    want = run(loss_fn, apply, params, packs)
    for count in (1, LENGTH - 1):
        padded = whole(_widen(exp, count, weight, seed), unit)
        assert_same(f"{count} more columns of padding", want, run(loss_fn, apply, params, padded), rtol)
        tail = [_tail(p, count) for p in packs]
        assert_same(f"{count} masked tokens after a pack", want, run(loss_fn, apply, params, tail), rtol)


@torch.no_grad()
def _table(loss_fn: LossFn, c: Case, packs: Sequence[Packed]) -> Tensor:
    """The loss of each token in mask, [B, S]."""
    x = [torch.where(p.mask, token_losses(loss_fn, c.apply(c.params, p), p)[0], 0) for p in packs]
    return packing.unpack(x, packs, c.exp.tokens)


def check_packing_invariance(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    rtol: float = 1e-12,
) -> None:
    """Check that sequences of a pack do not interact.

    The loss of a token must not depend on the other sequences of its pack.
    """
    c = case(seed, weight=weight, extra=extra)
    alone = _table(loss_fn, c, by_unit(c.exp, unit))
    units = rows_of(unit)
    backwards = list(chain(*reversed(units)))
    largest = max(map(len, units))
    ways = {"all rows in one pack": whole(c.exp, unit)}
    ways["all rows backwards in one pack"] = [packed(c.exp, backwards, unit)]
    for n in (largest * LENGTH, 3 * largest * LENGTH):
        ways[f"packs of {n} tokens"] = packing.shard(c.exp, n, unit=unit)[0]

    # per token, so that the message names the row that sees its neighbour
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
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    rtol: float = 1e-12,
) -> None:
    """Check that the order of rows changes nothing.

    The total and the gradient stay the same.
    """
    apply, params, exp = case(seed, weight=weight, extra=extra)
    want = run(loss_fn, apply, params, whole(exp, unit))
    for n in range(3):
        order = list(chain(*_order(seed, unit, "rows", n)))
        moved = packing.take(exp, torch.tensor(order))
        if isinstance(unit, int):  # the weight of units of different sizes is known for their order alone
            moved = reweigh(moved, moved.mask, weight)
        got = run(loss_fn, apply, params, whole(moved, packing.among(unit, order)))
        assert_same(f"rows in the order {order}", want, got, rtol)
