"""Checks of invariance to cutting, padding, packing and order."""

from collections.abc import Mapping, Sequence
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


def _assert_all_same(
    loss_fn: LossFn, c: Case, unit: Unit, cuts: Mapping[str, Sequence[Packed]], rtol: float
) -> None:
    """Assert that the results are the same for every cut as for one pack; `cuts` has what was varied."""
    want = run(loss_fn, c.apply, c.params, whole(c.exp, unit))
    for varied, packs in cuts.items():
        assert_same(varied, want, run(loss_fn, c.apply, c.params, packs), rtol)


def _order(seed: int, unit: Unit, *name: str | int) -> list[list[int]]:
    """Return the rows of each unit, in a random order of units that `name` draws."""
    rows = rows_of(unit)
    order = torch.randperm(len(rows), generator=rng.generator(rng.fold_in(seed, *name)))
    return [rows[u] for u in order.tolist()]


def _minibatches(exp: Experience, n: int, seed: int, unit: Unit) -> list[Packed]:
    """Pack each of n minibatches."""
    key = rng.fold_in(seed, n)
    small = packing.minibatches(exp, n, key, unit=unit)
    units = [unit] * n if isinstance(unit, int) else packing.minibatch_units(unit, n, key)
    return [p for part, own in zip(small, units) for p in whole(part, own)]


def _cuts(exp: Experience, seed: int, unit: Unit) -> dict[str, list[Packed]]:
    """Cut the rows in every way in which a run may cut them: what changed -> packs."""
    largest = max(map(len, rows_of(unit)))
    one = f"one unit of {unit} rows" if largest > 1 else "one row"
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
    """Check that no cut into micro-batches, packs, ranks or minibatches changes the results."""
    c = case(seed, weight=weight, extra=extra)
    cuts = {f"{name} instead of one pack": packs for name, packs in _cuts(c.exp, seed, unit).items()}
    _assert_all_same(loss_fn, c, unit, cuts, rtol)


def _spoil(x: Tensor, mask: Tensor) -> Tensor:
    """Put NaN outside mask into x [B, S, ...]; types without NaN get 1 there."""
    outside = ~mask.view(*mask.shape, *[1] * (x.dim() - 2))
    return x.masked_fill(outside, torch.nan if x.is_floating_point() else 1)


def _widen(exp: Experience, columns: int, weight: WeightFn, seed: int) -> Experience:
    """Add garbage: more columns, random tokens in the padding, NaN in every field outside mask."""

    def wide(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(ROWS, columns, *x.shape[2:])], 1)

    mask = wide(exp.mask)
    pad = torch.arange(LENGTH + columns) >= exp.length[:, None]
    garbage = uniform(seed, "garbage", 0, VOCAB, ROWS, LENGTH + columns)
    fields = {name: _spoil(wide(getattr(exp, name)), mask) for name in FIELDS}
    extra = {name: _spoil(wide(x), mask) for name, x in (exp.extra or {}).items()}
    tokens = torch.where(pad, garbage, wide(exp.tokens))
    words = None if exp.words is None else wide(exp.words)
    return reweigh(tree.replace(exp, tokens=tokens, words=words, extra=extra, **fields), mask, weight)


def _tail(b: Packed, count: int) -> Packed:
    """Add a unit of masked sequences to a pack; packs of a fixed size have one."""
    longer = tree.map(lambda x: torch.cat([x, x.new_zeros(count, *x.shape[1:])]), b)
    seq = torch.cat([b.seq, torch.full((count,), b.num_seqs)])
    pos = packing.reset_position_ids(seq)
    size = packing.common_size(b)
    return tree.replace(
        longer, seq=seq, pos=pos, num_seqs=b.num_seqs + size, unit=(*packing.sizes_of(b), size)
    )


def check_padding_invariance(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    rtol: float = 1e-12,
) -> None:
    """Check that padding changes nothing, nor NaN outside mask, nor masked tokens after packs."""
    c = case(seed, weight=weight, extra=extra)
    cuts = {}
    for count in (1, LENGTH - 1):
        cuts[f"{count} more columns of padding"] = whole(_widen(c.exp, count, weight, seed), unit)
        cuts[f"{count} masked tokens after a pack"] = [_tail(p, count) for p in whole(c.exp, unit)]
    _assert_all_same(loss_fn, c, unit, cuts, rtol)


@torch.no_grad()
def _table(loss_fn: LossFn, c: Case, packs: Sequence[Packed]) -> Tensor:
    """Return the loss of each token in mask, [B, S]."""
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
    """Check that the loss of a token does not depend on the other sequences of its pack."""
    c = case(seed, weight=weight, extra=extra)
    single = _table(loss_fn, c, by_unit(c.exp, unit))
    units = rows_of(unit)
    backwards = list(chain(*reversed(units)))
    largest = max(map(len, units))
    cuts = {
        "all rows in one pack": whole(c.exp, unit),
        "all rows backwards in one pack": [packed(c.exp, backwards, unit)],
    }
    for n in (largest * LENGTH, 3 * largest * LENGTH):
        cuts[f"packs of {n} tokens"] = packing.shard(c.exp, n, unit=unit)[0]

    # per token, so that the message names the row that sees its neighbour
    for name, packs in cuts.items():
        error = (_table(loss_fn, c, packs) - single).abs()
        row, at = divmod(int(error.nan_to_num(nan=torch.inf).argmax()), LENGTH)
        if not error[row, at] <= rtol * max(1.0, float(single.abs().max())):
            raise AssertionError(
                f"{name} instead of each row alone: the loss of row {row}, token {at} changed by "
                f"{error[row, at]:.2g} from {single[row, at]:.6g}; a neighbour leaks in"
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
    """Check that the order of rows changes neither the total nor the gradient."""
    c = case(seed, weight=weight, extra=extra)
    cuts = {}
    for n in range(3):
        order = list(chain(*_order(seed, unit, "rows", n)))
        moved = packing.take(c.exp, torch.tensor(order))
        if isinstance(unit, int):  # the weight of units of different sizes is known only in their order
            moved = reweigh(moved, moved.mask, weight)
        cuts[f"rows in the order {order}"] = whole(moved, packing.units_of(unit, order))
    _assert_all_same(loss_fn, c, unit, cuts, rtol)
