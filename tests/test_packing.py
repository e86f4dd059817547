"""From rows to packs and back: the one shift, the plan, and what a pack must never mix."""

from itertools import accumulate

import numpy as np
import pytest
import ref
import ref_rewards
import tiny
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import check, loss, packing, segment, testing, tree, weight
from rft_fn.packing import plan, units
from rft_fn.types import Experience, Media, experience

FIELDS = ("old_logp", "adv", "w", "ref_logp", "old_value", "ret")
seeds = st.integers(0, 2**32)


def small():
    """Two rows: prompt [5, 6], response [7, 8]; prompt [9], response [10], tool [11], response [12]."""
    tokens = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 10, 11, 12, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 1, 0, 1, 0, 0]]).bool()
    x = torch.arange(12.0).view(2, 6)  # not 0 outside mask: the packer has to see to that
    return Experience(
        tokens=tokens, mask=mask, length=torch.tensor([4, 4]), old_logp=x, adv=10 * x, w=100 * x
    )


def lengths_only(lengths):
    """An experience in which all but the first token of each row are sampled."""
    length = torch.as_tensor(lengths)
    mask = torch.arange(int(length.max()))[None] < length[:, None]
    mask[:, 0] = False
    zero = torch.zeros(mask.shape)
    return Experience(tokens=mask.long(), mask=mask, length=length, old_logp=zero, adv=zero, w=zero)


# ---------- the shift


def test_the_two_sides_of_pairs():
    """Sums over each row's tokens in mask, in the order of the pairs; only of packs of pairs."""
    exp = small()
    twice = tree.map(lambda x: torch.cat([x, x.flip(0)]), exp)
    b = packing.pack(twice, [2, 3, 0, 1], unit=2)
    first, second = packing.sides(b.old_logp, b)
    assert first.tolist() == [7.0 + 9, 2.0 + 3] and second.tolist() == [2.0 + 3, 7.0 + 9]
    empty = packing.pack(twice, [], unit=2)
    assert [x.tolist() for x in packing.sides(empty.old_logp, empty)] == [[0.0], [0.0]]
    with pytest.raises(ValueError, match=r"unit: expected a pack of pairs, .* got units of \[1\] rows"):
        packing.sides(b.old_logp, packing.pack(twice, [0, 1]))


def test_alignment_by_hand():
    """Everything at t is about target[t]. What goes wrong elsewhere: labels or masks
    that are shifted once too often."""
    b = packing.pack(small(), [1, 0])
    assert b.tokens.tolist() == [9, 10, 11, 5, 6, 7]
    assert b.target.tolist() == [10, 11, 12, 6, 7, 8]
    assert b.pos.tolist() == [0, 1, 2, 0, 1, 2] and b.seq.tolist() == [0, 0, 0, 1, 1, 1]
    assert b.mask.tolist() == [True, False, True, False, True, True]
    assert b.old_logp.tolist() == [
        7,
        0,
        9,
        0,
        2,
        3,
    ]  # of the target, and 0 on the tool's token and on the prompt
    assert b.adv.tolist() == [70, 0, 90, 0, 20, 30] and b.w.tolist() == [700, 0, 900, 0, 200, 300]
    assert b.ref_logp is None and b.num_seqs == 2 and b.rows == (1, 0)


@given(seed=seeds, budget=st.integers(12, 60), world=st.integers(1, 4))
def test_unpack_inverts_pack(seed, budget, world):
    exp = testing.case(seed).exp
    packs = [b for rank in packing.shard(exp, budget, world) for b in rank]
    for name in FIELDS:
        back = packing.unpack([getattr(b, name) for b in packs], packs, exp.tokens)
        assert torch.equal(back, torch.where(exp.mask, getattr(exp, name), 0))
    kept = exp.mask.any(-1, keepdim=True) & (torch.arange(exp.tokens.shape[1]) < exp.length[:, None])
    kept[:, 0] = False
    back = packing.unpack([b.target for b in packs], packs, exp.tokens)
    assert torch.equal(back, torch.where(kept, exp.tokens, 0))


def test_no_token_is_changed_on_the_way():
    """A fault of other systems: the last token of a truncated response is overwritten by EOS."""
    exp = small()
    b = packing.pack(exp, [0])
    assert torch.cat([b.tokens[:1], b.target]).tolist() == exp.tokens[0, :4].tolist()


def test_garbage_outside_the_mask_is_zero_in_the_pack():
    """A `where` on the loss alone would hide a NaN in the value and keep it in
    the gradient: the producer removes it."""
    exp = small()
    bad = tree.replace(
        exp, adv=torch.where(exp.mask, exp.adv, torch.nan), ref_logp=torch.full((2, 6), torch.inf)
    )
    b = packing.pack(bad, [0, 1])
    assert (
        b.adv.isfinite().all()
        and (b.ref_logp[~b.mask] == 0).all()
        and (b.ref_logp[b.mask] == torch.inf).all()
    )


# ---------- sequences do not see each other


@given(seed=seeds, order=st.permutations(range(8)))
def test_packed_log_probs_are_those_of_each_row_alone(seed, order):
    c = testing.case(seed)
    together, alone = [packing.pack(c.exp, order)], [packing.pack(c.exp, [i]) for i in range(8)]
    got, want = (
        packing.unpack([c.apply(c.params, b).logp for b in packs], packs, c.exp.tokens)
        for packs in (together, alone)
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert want.abs().max() > 0.1


@pytest.mark.parametrize("row", [3, 4, 7])
def test_changing_one_row_leaves_the_others_alone(row):
    c = testing.case(1)
    tokens = c.exp.tokens.clone()
    tokens[row] = (tokens[row] + 1) % testing.VOCAB
    score = lambda exp: testing.log_probs(c.apply, c.params, exp)  # noqa: E731
    changed = (score(c.exp) != score(tree.replace(c.exp, tokens=tokens))).any(-1)
    assert changed.nonzero().flatten().tolist() == [row]


@given(sizes=st.lists(st.integers(1, 5), max_size=6))
def test_positions_restart_with_every_sequence(sizes):
    seq = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))
    assert packing.reset_position_ids(seq).tolist() == [i for n in sizes for i in range(n)]


def test_positions_of_a_pack_are_those_of_its_sequences():
    b = packing.pack(testing.case(0).exp, [5, 3, 2])
    assert torch.equal(b.pos, packing.reset_position_ids(b.seq))


# ---------- the plan


@given(sizes=st.lists(st.integers(1, 20), max_size=30), budget=st.integers(20, 50))
def test_assign_holds_every_item_once_within_the_budget(sizes, budget):
    packs = packing.assign(sizes, budget)
    assert sorted(i for p in packs for i in p) == list(range(len(sizes)))
    assert all(0 < sum(sizes[i] for i in p) <= budget for p in packs)
    loads = sorted(sum(sizes[i] for i in p) for p in packs)
    assert len(loads) < 2 or loads[0] + loads[1] > budget  # no two packs would fit into one


def test_best_fit_decreasing_by_hand():
    """The largest first, each into the fullest pack that still holds it; ties by index."""
    assert packing.assign([3, 5, 7], 10) == [[2, 0], [1]]
    assert packing.assign([4, 4, 6, 6], 10) == [[2, 0], [3, 1]]
    assert packing.assign([], 10) == []


def test_a_pack_is_filled_up_to_each_of_its_limits():
    """What fills the budget or the rows to the last is taken; of two packs the fuller one gets it."""
    assert packing.assign([4, 6, 10, 0], 10) == [[2], [1, 0]]
    assert packing.assign([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert packing.assign([1] * 7, 10, most=3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert packing.assign([5, 4, 3, 2], 20, most=4, rows=[3, 1, 2, 2]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("sizes", "families", "options", "want"),
    [
        ([2, 3, 4, 5, 0, 6], [[0, 2, 5], [1, 3]], {}, [[0, 2], [1, 3], [5]]),
        ([4, 6, 1], [[0, 1, 2]], {}, [[0, 1], [2]]),  # exactly the budget, then a list of its own
        ([4, 6, 1], [[2, 1, 0]], {}, [[0], [2, 1]]),  # filled in the order of the family
        ([11, 1], [[0, 1]], {}, [[0], [1]]),
        ([1] * 5, [[0, 1, 2, 3, 4]], {"most": 2}, [[0, 1], [2, 3], [4]]),
        ([1] * 3, [[0, 1, 2]], {"most": 3, "rows": [1, 2, 1]}, [[0, 1], [2]]),
    ],
)
def test_lists_of_a_family_by_hand(sizes, families, options, want):
    assert plan.bundle(sizes, families, 10, **options) == want


@each(
    ("sizes", "costs", "count", "options", "want"),
    [
        ([1] * 4, [4, 3, 2, 1], 2, {}, [[0, 3], [1, 2]]),  # the largest first, each to the cheapest
        ([1, 9, 9], [9, 1, 1], 2, {}, [[0, 2], [1]]),  # the cheapest that has tokens left
        ([5, 5], [1, 1], 1, {}, [[0, 1]]),
        ([6, 5], [1, 1], 1, {}, None),
        ([3, 0], [1, 0], 2, {}, [[0], []]),
        ([1] * 4, [1] * 4, 2, {"most": 2}, [[0, 2], [1, 3]]),
        ([1] * 5, [1] * 5, 2, {"most": 2}, None),
        ([1] * 3, [3, 2, 1], 2, {"most": 2, "rows": [2, 1, 1]}, [[0], [1, 2]]),
    ],
)
def test_packs_of_nearly_equal_cost_by_hand(sizes, costs, count, options, want):
    assert plan.spread(sizes, costs, 10, count, **options) == want


def test_a_cut_looks_at_its_units_a_few_times_whatever_its_packs(monkeypatch):
    """Once for each rank: once for each pack made plans of 64,000 rows take a minute."""
    looks = []
    monkeypatch.setattr(units, "accumulate", lambda sizes: looks.append(len(sizes)) or accumulate(sizes))
    packs = packing.cut(lengths_only([7] * 500), 8, 2)
    assert [len(part) for part in packs] == [250, 250]
    assert looks == [500] * 2


@given(data=st.data())
def test_plans_are_those_of_their_definitions(data):
    """Whatever keeps them from looking at every pack for every item."""
    budget = data.draw(st.sampled_from([8, 40]))
    size = st.one_of(st.just(0), st.integers(1, budget), st.integers(1, budget // 4))
    sizes = data.draw(st.lists(size, max_size=24))
    rows = data.draw(st.lists(st.integers(1, 3), min_size=len(sizes), max_size=len(sizes)))
    most = data.draw(st.sampled_from([0, 3, 5]))
    packs = packing.assign(sizes, budget, most=most, rows=rows)
    assert packs == ref.best_fit(sizes, budget, most, rows)

    more = data.draw(st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes)))
    costs = [size and size + x for size, x in zip(sizes, more, strict=True)]
    count = max(len(packs) + data.draw(st.integers(-1, 2)), 1)
    spread = plan.spread(sizes, costs, budget, count, most=most, rows=rows)
    assert spread == ref.cheapest_first(sizes, costs, budget, count, most, rows)

    order = data.draw(st.permutations([i for i, size in enumerate(sizes) if size]))
    families = [family for k in range(4) if (family := order[k::4])]
    lists = plan.bundle(sizes, families, budget, most=most, rows=rows)
    assert lists == ref.families_together(sizes, families, budget, most, rows)


def test_dealing_to_ranks_by_hand():
    """The largest first, to the rank that has the least work so far and still takes one."""
    packs = [[0], [1], [2], [3, 4]]
    assert plan.deal([5, 4, 3, 1, 1], packs, 2) == [[[0], [3, 4]], [[1], [2]]]
    assert plan.deal([9, 2, 1, 1, 1], packs, 2) == [[[0], [2]], [[1], [3, 4]]]


def test_waste_is_what_packs_do_not_hold():
    assert packing.waste([5, 4, 3], [[0], [1, 2]], 10) == pytest.approx(1 - 12 / 20)
    assert packing.waste([], [], 10) == 1


def test_packs_are_balanced_by_what_is_left_to_compute_where_prompts_are_shared():
    """Four rows of one prompt of 20 tokens are 20 to compute, as much as two rows of 10; not 80."""
    shared = [(list(range(1, 21)), [50])] * 4
    exp = packing.supervised([*shared, *[([20 + i] * 10, [50]) for i in range(4)]])
    assert packing.cut(exp, 200, 2) == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
    assert packing.cut(exp, 200, 2, share_prefixes=True) == [[[0, 1, 2, 3, 6]], [[4, 5, 7]]]
    assert packing.cut(exp, 200, share_prefixes=True, one_unit=True) == packing.cut(exp, 200, one_unit=True)
    longer = [(list(range(1, 21)), [50] * 6)] * 4  # 20 + 4 times 5
    exp_ = packing.supervised([*longer, *[([20 + i] * 10, [50]) for i in range(4)]])
    assert packing.cut(exp_, 200, 2, share_prefixes=True) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    # units of two rows, of which the first has the prompt
    assert packing.cut(exp, 200, 2, unit=2, share_prefixes=True) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


@pytest.mark.parametrize(("families", "size", "packs"), [(4, 6, 3), (5, 7, 5)])
def test_prompts_share_a_pack_at_the_price_of_a_quarter_more_packs_at_most(families, size, packs):
    """Families of 6 tokens would take 4 packs of 10 where 3 do, and are cut; those of 7 take 5 where 4 do."""
    exp = packing.supervised([([f + 1], [50]) for f in range(families) for _ in range(size)])
    plans = packing.cut(exp, 10, share_prefixes=True)[0]
    assert len(plans) == packs
    assert all(len({row // size for row in rows}) == 1 for rows in plans) == (packs == families)


def test_without_a_budget_everything_is_one_pack_a_rank():
    exp = lengths_only([5, 9, 2, 7])
    assert packing.cut(exp, 0) == [[[0, 1, 2, 3]]]
    assert [len(part) for part in packing.cut(exp, 0, 2)] == [1, 1]


def gsm8k_like(seed, n=1024):
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(200), 0.4, n), 40, 1000).astype(int).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_waste_is_small_on_lengths_like_those_of_gsm8k(seed):
    sizes = gsm8k_like(seed)
    assert 0 <= packing.waste(sizes, packing.assign(sizes, 4096), 4096) < 0.05
    packs = packing.shard(lengths_only(sizes), 4096, 1)[0]
    assert 1 - sum(b.tokens.numel() for b in packs) / (4096 * len(packs)) < 0.05
    in_order = [[i] for i in range(len(sizes))]
    assert packing.waste(sizes, in_order, 4096) > 0.9  # what one row a pack would waste


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_shard_gives_every_rank_as_many_packs_and_about_as_many_tokens(world):
    """Ranks with fewer packs would hang the others; ranks with more tokens would keep them waiting."""
    sizes = gsm8k_like(world)
    shards = packing.shard(lengths_only(sizes), 4096, world)
    loads = [sum(b.tokens.numel() for b in rank) for rank in shards]
    assert len({len(rank) for rank in shards}) == 1
    assert max(loads) <= 1.02 * min(loads)
    assert all(b.tokens.numel() <= 4096 for rank in shards for b in rank)
    assert sorted(i for rank in shards for b in rank for i in b.rows) == list(range(len(sizes)))


@each("lengths", [[6] * 8, [101, 2, 2, 2, 2, 2], [90, 80, 3, 3, 3, 3, 3]])
@each("budget", [0, 200, 110])
def test_at_most_so_many_rows_in_a_pack_whatever_the_budget(lengths, budget):
    """Also where rows are spread by their sizes: one long row, and all short ones beside each other."""
    exp = lengths_only(lengths)
    for world in (1, 2):
        shards = packing.shard(exp, budget, world, most=3)
        assert max(len(b.rows) for rank in shards for b in rank) <= 3
        assert sorted(i for rank in shards for b in rank for i in b.rows) == list(range(len(lengths)))


def test_a_batch_that_fits_one_pack_is_still_shared_by_all_ranks():
    """A fault of other systems: few short rows end in one pack, and all ranks but one compute on padding."""
    shards = packing.shard(lengths_only([11] * 8), 4096, 4)
    assert [[b.tokens.numel() for b in rank] for rank in shards] == [[20]] * 4


@given(seed=seeds, world=st.integers(1, 6))
def test_the_plan_is_a_function_of_the_batch(seed, world):
    exp = testing.case(seed).exp
    a, b = packing.shard(exp, 24, world), packing.shard(exp, 24, world)
    assert [[p.rows for p in rank] for rank in a] == [[p.rows for p in rank] for rank in b]
    learns = exp.mask[:, 1:].any(-1).nonzero().flatten().tolist()
    assert sorted(i for rank in a for p in rank for i in p.rows) == learns  # masked rows cost nothing
    assert len({len(rank) for rank in a}) == 1


def test_a_row_beyond_the_budget_is_named():
    """The row of the batch, not its number among those that are left when masked rows have been dropped."""
    exp = lengths_only([5, 5, 40, 5])
    exp.mask[0] = False
    with pytest.raises(
        ValueError, match="budget: expected at least 39 tokens, the size of row 2, got 16; raise"
    ):
        packing.shard(exp, 16, 2)


# ---------- empty packs


def test_an_empty_pack_runs_and_adds_nothing():
    """Every rank runs as many packs as the others: what it has none for is a pack of one masked token."""
    c = testing.case(0)
    b = packing.pack(c.exp, [])
    total, grads = testing.total_and_grad(lambda o, b: -b.adv * o.logp + o.value, c.apply, c.params, [b])
    assert total == 0 and all((g == 0).all() for g in tree.leaves(grads))
    assert not b.mask.any() and b.w.tolist() == [0.0] and b.rows == () and b.num_seqs == 1


@pytest.mark.parametrize("length", [0, 1])
def test_rows_without_a_target_make_an_empty_pack_that_unpacks_to_nothing(length):
    exp = tree.replace(small(), length=torch.full((2,), length), mask=torch.zeros(2, 6, dtype=torch.bool))
    b = packing.pack(exp, [0, 1])
    assert (packing.unpack([torch.ones(b.target.shape)], [b], exp.tokens) == 0).all()
    narrow = lengths_only([1, 1])
    b = packing.pack(narrow, [1])
    assert packing.unpack([torch.ones(1)], [b], narrow.tokens).tolist() == [[0.0], [0.0]]


def test_a_batch_without_a_token_gives_every_rank_one_empty_pack():
    exp = tree.replace(small(), mask=torch.zeros(2, 6, dtype=torch.bool))
    assert [[(p.rows, p.w.tolist()) for p in rank] for rank in packing.shard(exp, 9, 3)] == [
        [((), [0.0])]
    ] * 3


# ---------- minibatches and media


@given(seed=seeds, n=st.integers(1, 8), key=st.integers(0, 2**40))
def test_minibatches_hold_every_row_once_and_keep_the_sum_of_w(seed, n, key):
    exp = tree.replace(testing.case(seed).exp, length=torch.arange(8))
    parts = packing.minibatches(exp, n, key)
    assert sorted(i for p in parts for i in p.length.tolist()) == list(range(8))
    assert {p.tokens.shape[0] for p in parts} <= {8 // n, -(-8 // n)}
    for p in parts:
        for name in ("tokens", "mask", *FIELDS):
            assert torch.equal(getattr(p, name), getattr(exp, name)[p.length])
    torch.testing.assert_close(sum(p.w.sum() for p in parts), exp.w.sum())


def test_minibatches_follow_their_key():
    """A fault of other systems: the same order of data in every epoch."""
    exp = lengths_only(list(range(2, 34)))
    order = lambda key: [i for p in packing.minibatches(exp, 2, key) for i in p.length.tolist()]  # noqa: E731
    assert order(1) == order(1) and len({tuple(order(key)) for key in range(6)}) == 6


@pytest.mark.parametrize("n", [0, 3])
def test_minibatches_need_a_row_each(n):
    with pytest.raises(ValueError, match=f"n: expected between 1 and the number of rows 2, got {n}"):
        packing.minibatches(small(), n, 0)


@pytest.mark.parametrize("unit", [1, 2])
def test_a_placeholder_has_the_fields_of_its_pack_and_adds_nothing(unit):
    exp = testing.case(0).exp
    b = packing.pack(exp, [2, 3, 4, 5], unit=unit)
    got = packing.placeholder(packing.pad(b, b.tokens.numel() + 3))
    like = packing.pack(exp, [], unit=unit)
    assert (got.rows, got.padding, got.num_seqs, got.unit) == ((), 0, unit, (unit,))
    assert got.tokens.tolist() == [int(b.tokens[0])] * unit and got.seq.tolist() == list(range(unit))
    assert not got.mask.any() and not packing.real(got).any()
    shapes = [[(name, x.shape, x.dtype) for name, x in tree.leaves_with_path(p)] for p in (got, like)]
    assert shapes[0] == shapes[1]
    assert all((x == 0).all() for x in (got.adv, got.w, got.old_logp, got.extra["noise"]))


def test_a_placeholder_of_a_pack_without_tokens_has_one():
    b = packing.pack(small(), [0])
    got = packing.placeholder(tree.map(lambda x: x[:0], b))
    assert got.tokens.tolist() == [0] and got.mask.tolist() == [False] and got.w.tolist() == [0.0]


def test_supervised_rows_are_masked_on_their_responses():
    exp = packing.supervised([([1, 2], [3, 4, 5]), ([6], [7])])
    b = packing.pack(exp, [0, 1])
    assert b.target[b.mask].tolist() == [3, 4, 5, 7] and b.w[b.mask].tolist() == [0.25] * 4
    assert b.tokens.tolist() == [1, 2, 3, 4, 6] and b.w.sum() == 1


# ---------- data of custom losses, and rows that belong together


def test_extra_moves_with_its_tokens_whatever_its_width():
    """Per-token data for a custom loss: shifted with the target, 0 outside mask, taken by row."""
    x = torch.arange(12.0).view(2, 6) + 1
    exp = tree.replace(small(), extra={"teacher": x, "top": torch.stack([x, -x], -1)})
    b = packing.pack(exp, [1, 0])
    assert b.extra["teacher"].tolist() == [8, 0, 10, 0, 3, 4]
    assert b.extra["top"].tolist() == [[8, -8], [0, 0], [10, -10], [0, 0], [3, -3], [4, -4]]
    part = packing.pack(packing.take(exp, torch.tensor([1])), [0])
    assert torch.equal(part.extra["top"], b.extra["top"][:3])
    assert {k: tuple(v.shape) for k, v in packing.pack(exp, []).extra.items()} == {
        "teacher": (1,),
        "top": (1, 2),
    }
    for mini in packing.minibatches(exp, 2, 0):
        row = int(mini.tokens[0, 0] == 9)
        assert torch.equal(mini.extra["teacher"][0], x[row])


def test_extra_of_a_rollout_is_checked_by_name():
    exp = small()
    rollout = tiny.rollout(exp)
    kept = experience(rollout, adv=exp.adv, w=exp.w, extra={"top": torch.zeros(2, 6, 3)})
    assert kept.extra["top"].shape == (2, 6, 3)
    for bad in (torch.zeros(2, 5), torch.zeros(3), torch.zeros(2, 1, 3)):
        with pytest.raises(ValueError, match=r"extra\['top'\]: expected \[B, S\] = \[2, 6\]"):
            experience(rollout, adv=exp.adv, w=exp.w, extra={"top": bad})
    with pytest.raises(ValueError, match=r"words: expected \[B, S, K\] = \[2, 6, K\], got \[2, 6\]"):
        experience(rollout, adv=exp.adv, w=exp.w, words=exp.tokens)
    message = (
        r"^extra\['i'\]: expected a tensor \[B\], \[B, 1\] or \[B, S, ...\], got float; a constant belongs "
    )
    with pytest.raises(ValueError, match=message):
        experience(rollout, adv=exp.adv, w=exp.w, extra={"i": 0.3})


DATA = ("adv", "w", "old_logp", "ref_logp", "old_value", "ret")


def of_two_rows(**data):
    """An experience of the batch `small`, with other data."""
    exp = small()
    return exp, experience(tiny.rollout(exp), **{"adv": exp.adv, "w": exp.w} | data)


@pytest.mark.parametrize("name", DATA)
def test_what_an_experience_is_joined_of_is_data(name):
    """No number that is none, where the policy sampled; no gradient from whatever it was computed by."""
    exp = small()
    row, column = exp.mask.nonzero()[-1].tolist()
    outside = (~exp.mask).nonzero()[0].tolist()
    for value, at, fine in (
        (torch.nan, (row, column), False),
        (torch.inf, (row, column), name not in ("adv", "w")),
        (-torch.inf, (row, column), name not in ("adv", "w")),
        (torch.nan, tuple(outside), True),
    ):
        x = torch.ones(exp.mask.shape)
        x[at] = value
        if fine:
            of_two_rows(**{name: x})
            continue
        where = f"at token {column} of row {row}, which the policy sampled"
        with pytest.raises(ValueError, match=f"^{name}: expected numbers, got {value} {where}$"):
            of_two_rows(**{name: x})
    learned = torch.ones(exp.mask.shape, requires_grad=True)
    _, made = of_two_rows(**{name: 2 * learned}, extra={"mine": 2 * learned})
    assert not any(x.requires_grad for x in tree.leaves(made))
    assert torch.equal(getattr(made, name)[exp.mask], torch.full((int(exp.mask.sum()),), 2.0))
    with pytest.raises(ValueError, match=r"^adv: expected numbers, got nan at token"):
        of_two_rows(adv=torch.tensor([1.0, torch.nan]))


@given(seed=seeds)
def test_a_number_per_response_is_on_each_of_its_tokens_and_words_move_with_them(seed):
    exp = testing.case(seed).exp
    rows = len(exp.length)
    rollout = tiny.rollout(exp)
    x = torch.arange(1.0, rows + 1)
    words = exp.tokens[..., None] + torch.tensor([0, 1, 100])
    made = experience(rollout, adv=x, w=exp.w, words=words, extra={"flat": x, "column": x[:, None] + 1})
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    b = packing.pack(made, order)
    own = segment.spread(x[order], b.seq) * b.mask
    assert torch.equal(b.extra["flat"], own) and torch.equal(b.adv.to(own.dtype), own)
    assert torch.equal(b.extra["column"], own + b.mask)
    assert b.words.dtype == torch.long
    want = b.target[:, None] + torch.tensor([0, 1, 100])
    assert torch.equal(b.words, want * b.mask[:, None])
    assert torch.equal(packing.unpack([b.words], [b], exp.tokens)[exp.mask], words[exp.mask])


@given(seed=seeds, world=st.integers(1, 3), budget=st.integers(24, 50))
def test_units_stay_together_and_in_order(seed, world, budget):
    exp = testing.case(seed).exp
    packs = [p for rank in packing.shard(exp, budget, world, unit=2) for p in rank]
    rows = [r for p in packs for r in p.rows]
    for p in packs:
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(p.rows[::2], p.rows[1::2]))
        assert int(p.tokens.numel()) <= budget
    assert len(set(rows)) == len(rows)
    used = {i // 2 for i in range(8) if exp.mask[i, 1:].any()}
    assert {r // 2 for r in rows} == used


def test_a_unit_that_does_not_divide_the_rows_is_named():
    with pytest.raises(ValueError, match="unit: expected a divisor of the 8 rows, got 3"):
        packing.shard(testing.case(0).exp, 100, unit=3)


def test_a_placeholder_for_pairs_is_a_pair():
    """More ranks than pairs: what the others run has `unit` sequences, apart and without a token in mask."""
    exp = packing.take(testing.case(0).exp, torch.tensor([2, 3]))
    (real,), (empty,) = packing.shard(exp, 100, 2, unit=2)
    assert (real.num_seqs, real.unit, real.rows) == (2, (2,), (0, 1))
    assert (empty.num_seqs, empty.unit, empty.rows) == (2, (2,), ())
    assert empty.seq.tolist() == [0, 1] and empty.pos.tolist() == [0, 0]
    assert not empty.mask.any() and empty.w.tolist() == [0.0, 0.0]
    assert empty.extra["noise"].shape == (2, 2)


def test_rows_that_are_no_whole_units_are_no_pack():
    with pytest.raises(ValueError, match="unit: expected a divisor of the 3 rows of the pack, got 2"):
        packing.pack(testing.case(0).exp, [0, 1, 2], unit=2)


def test_a_padded_pack_unpacks_to_the_same_rows():
    """The values of padding belong to no row, however often the pack was padded."""
    exp = testing.case(0).exp
    b = packing.pack(exp, [4, 3])
    values = torch.arange(1.0, len(b.tokens) + 1)
    want = packing.unpack([values], [b], exp.tokens)
    for sizes in ([len(b.tokens) + 1], [len(b.tokens) + 2, len(b.tokens) + 40]):
        padded = b
        for size in sizes:
            padded = packing.pad(padded, size)
        more = torch.cat([values, torch.full((sizes[-1] - len(values),), 99.0)])
        assert torch.equal(packing.unpack([more], [padded], exp.tokens), want)


def test_rows_of_a_rollout_are_taken_as_those_of_an_experience():
    exp = testing.case(0).exp
    media = Media.of_prompts([{"x": torch.tensor([[float(i)]])} for i in range(8)])
    number = torch.arange(8)
    rollout = tiny.rollout(exp, number // 2, number > 3, media=media)
    rollout = tree.replace(rollout, version=number)
    got = packing.take(rollout, torch.tensor([5, 1]))
    assert got.version.tolist() == [5, 1] and got.group.tolist() == [2, 0]
    assert torch.equal(got.tokens, exp.tokens[[5, 1]]) and torch.equal(got.logp, exp.old_logp[[5, 1]])
    assert got.media.sequences()["x"].flatten().tolist() == [5.0, 1.0]


def test_supervised_without_rows_says_so():
    with pytest.raises(ValueError, match="rows: expected at least one"):
        packing.supervised([])


def test_conversations_keep_their_media():
    """Also where other rows have none, or do not say so."""
    picture = {"x": torch.tensor([[1.0], [2.0]])}
    rows = [
        ([1, 2], [False, True], picture),
        ([3, 4], [False, True], None),
        ([5, 6, 7], [False, True, False]),
    ]
    exp = packing.conversations(rows)
    assert exp.media.count("x").tolist() == [2, 0, 0] and exp.length.tolist() == [2, 2, 3]
    assert torch.equal(exp.media.sequences()["x"], picture["x"])
    assert exp.tokens[exp.mask].tolist() == [2, 4, 6] and exp.w[exp.mask].tolist() == pytest.approx(
        [1 / 3] * 3
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"expected at least one \(ids, mask\), got none"),
        ([([1, 2], [False, True]), ([1], [])], "expected a mask of 1 in row 1, as its ids, got 0"),
        ([([1, 2], [True, True])], "expected a token before the first one in mask in row 0, got none"),
    ],
)
def test_conversations_that_cannot_be_learned(rows, message):
    with pytest.raises(ValueError, match=message):
        packing.conversations(rows)


# ---------- rows that a reward model scores


texts = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=7), min_size=1, max_size=6)


@given(rows=texts, budget=st.integers(8, 30), world=st.integers(1, 3))
def test_every_token_of_a_scored_row_is_an_input(rows, budget, world):
    """A fault of other systems: the score is read one token before the end of the text."""
    exp = packing.scored(rows)
    assert exp.w.sum() == pytest.approx(1.0)
    seen = []
    for b in (b for rank in packing.shard(exp, budget, world) for b in rank):
        for k, row in enumerate(b.rows):
            own = b.seq == k
            assert b.tokens[own].tolist() == rows[row]
            assert b.mask[own].tolist() == [False] * (len(rows[row]) - 1) + [True]
            assert b.w[own].tolist() == pytest.approx([0] * (len(rows[row]) - 1) + [1 / len(rows)])
            seen.append(row)
    assert sorted(seen) == list(range(len(rows)))


@given(data=st.data())
def test_steps_are_scored_at_their_ends(data):
    """In a pack mask[t] is at the last tokens of steps, also at the end of the row."""
    rows = data.draw(texts)
    ends = [sorted(data.draw(st.sets(st.integers(0, len(row) - 1), min_size=1))) for row in rows]
    b = packing.pack(packing.scored(rows, ends=ends), range(len(rows)))
    for k, row in enumerate(rows):
        own = b.seq == k
        assert b.tokens[own].tolist() == row
        assert b.mask[own].nonzero().flatten().tolist() == ends[k]
    assert b.w[b.mask].tolist() == pytest.approx([1 / len(rows)] * sum(map(len, ends)))


def test_scored_rows_keep_their_media_and_may_be_tensors():
    picture = {"pixel_values": torch.arange(6.0).view(3, 2)}
    exp = packing.scored([([5, 6], picture), ([7], None), (torch.tensor([8, 9]), None)])
    assert exp.length.tolist() == [3, 2, 3] and exp.media.of.tolist() == [0, -1, -1]
    assert torch.equal(exp.media.sequences()["pixel_values"], picture["pixel_values"])
    plain = packing.scored([torch.tensor([5, 6]), (7,), [8, 9]])
    assert torch.equal(plain.tokens, exp.tokens) and plain.media is None
    assert exp.tokens[:, :2].tolist() == [[5, 6], [7, 7], [8, 9]]


@pytest.mark.parametrize(
    ("rows", "ends", "message"),
    [
        ([], None, "rows: expected at least one row of ids, got none"),
        ([[1], []], None, "rows: expected at least one token in row 1, got none"),
        ([([], None)], None, "rows: expected at least one token in row 0, got none"),
        ([[1]], [[0], [0]], "ends: expected those of 1 rows, got 2"),
        ([[1, 2], [3, 4]], [[1], [2]], r"ends: expected rising positions from 0 to 1 in row 1, got \[2\]"),
        ([[1, 2]], [[-1]], r"ends: expected rising positions from 0 to 1 in row 0, got \[-1\]"),
        ([[1, 2]], [[1, 1]], r"ends: expected rising positions from 0 to 1 in row 0, got \[1, 1\]"),
    ],
)
def test_rows_that_cannot_be_scored(rows, ends, message):
    with pytest.raises(ValueError, match=message):
        packing.scored(rows, ends=ends)


def test_a_row_without_steps_is_left_out():
    exp = packing.scored([[1, 2], [3]], ends=[[], [0]])
    assert packing.left_out(exp) == [0] and exp.w.sum() == 1


# ---------- units of different sizes


@st.composite
def lists(draw, media=False):
    """(experience, rows of each unit) of the eight rows of `testing.case`; some with media."""
    left, unit = 8, []
    while left:
        unit.append(draw(st.integers(1, left)))
        left -= unit[-1]
    exp = testing.case(draw(st.integers(0, 99))).exp
    rank = torch.tensor([i for size in unit for i in range(size)]).double()
    exp = tree.replace(exp, w=weight.unit_mean(exp.mask, unit), extra={"rank": rank[:, None] * exp.mask})
    if media:
        some = draw(st.lists(st.booleans(), min_size=8, max_size=8))
        some = [
            has and n > 1 for has, n in zip(some, exp.length.tolist())
        ]  # one token is no input of a model
        parts = [{"x": torch.full((1, 2), float(i))} if has else None for i, has in enumerate(some)]
        exp = tree.replace(exp, media=Media.of_prompts(parts))
    return exp, unit


def of_lists(out, b):
    score = segment.sum(out.value, b.mask, b.seq, b.num_seqs)
    rank = segment.max(b.extra["rank"], b.mask, b.seq, b.num_seqs)
    return loss.plackett_luce(score, rank, packing.unit_of(b))[b.seq]


@given(case=lists(), budget=st.integers(96, 200), world=st.integers(1, 6))
def test_no_budget_or_world_changes_the_gradient_of_lists(case, budget, world):
    """The same sums as in one pack, and every rank runs equally many packs."""
    exp, unit = case
    c = testing.case(0)
    want = testing.total_and_grad(of_lists, c.apply, c.params, [packing.pack(exp, range(8), unit=unit)])
    shards = packing.shard(exp, budget, world, unit=unit)
    assert len({len(packs) for packs in shards}) == 1
    packs = [b for part in shards for b in part]
    got = testing.total_and_grad(of_lists, c.apply, c.params, packs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@given(case=lists(media=True), budget=st.integers(0, 300), world=st.integers(1, 4))
def test_lists_stay_whole_and_in_order_with_or_without_media(case, budget, world):
    exp, unit = case
    rows = [list(r) for r in ref_rewards.unit_rows(unit)]
    inside = {r: u for u, own in enumerate(rows) for r in own}
    left = packing.left_out(exp, unit=unit)
    assert left == [u for u, own in enumerate(rows) if not exp.mask[own, 1:].any()]
    seen = []
    budget = budget + 96 * bool(budget)
    for b in (b for part in packing.shard(exp, budget, world, unit=unit) for b in part):
        sizes = check.units(b.unit, b.num_seqs)
        of = packing.unit_of(b).tolist()
        assert len(of) == b.num_seqs and [of.count(u) for u in range(len(sizes))] == sizes
        groups = [[b.rows[k] for k in range(len(b.rows)) if of[k] == u] for u in set(of[: len(b.rows)])]
        assert all(group == rows[inside[group[0]]] for group in groups)
        assert packing.real(b).tolist() == [True] * len(groups) + [False] * (len(sizes) - len(groups))
        assert not b.mask[b.seq >= len(b.rows)].any() and (b.media is not None) == (exp.media is not None)
        own = packing.drop_borrowed(b)
        assert own.rows == b.rows and (not b.rows or own.unit == b.unit[: len(groups)])
        seen += [inside[group[0]] for group in groups]
    assert sorted([*seen, *left]) == list(range(len(unit)))


@given(case=lists(), most=st.integers(8, 20))
def test_a_pack_has_at_most_so_many_rows_or_one_list(case, most):
    exp, unit = case
    for world in (1, 3):
        plans = packing.cut(exp, 0, world, unit=unit, most=most)
        assert max(len(rows) for part in plans for rows in part) <= most
        one = packing.cut(exp, 0, world, unit=unit, one_unit=True)
        assert all(len(packing.units_of(unit, rows)) <= 1 for part in one for rows in part)
        both = [sorted(r for part in plan for rows in part for r in rows) for plan in (plans, one)]
        assert both[0] == both[1]


@given(case=lists(), n=st.integers(1, 8), key=seeds)
def test_minibatches_keep_lists_together(case, n, key):
    exp, unit = case
    exp = tree.replace(exp, tokens=torch.arange(8)[:, None].expand(8, 12))
    n = min(n, len(unit))
    parts = packing.minibatches(exp, n, key, unit=unit)
    sizes = packing.minibatch_units(unit, n, key)
    whole = [list(r) for r in ref_rewards.unit_rows(unit)]
    found = []
    for part, own in zip(parts, sizes, strict=True):
        rows = part.tokens[:, 0].tolist()
        found += [[rows[i] for i in r] for r in ref_rewards.unit_rows(own)]
        assert len(rows) == sum(own)
    assert sorted(found) == whole
    assert max(map(len, sizes)) - min(map(len, sizes)) <= 1


def test_filling_up_a_pack_of_one_list():
    """Sequences of one masked token, with media where the pack has some."""
    exp = testing.case(0).exp
    b = packing.pack(exp, [2, 3, 4], unit=[3])
    full = packing.fill(b, 5)
    assert full.unit == (3, 1, 1) and full.num_seqs == 5 and full.rows == b.rows
    assert torch.equal(full.tokens[: len(b.tokens)], b.tokens) and len(full.tokens) == len(b.tokens) + 2
    assert full.w.sum() == b.w.sum() and packing.real(full).tolist() == [True, False, False]
    assert packing.fill(b, 2) is b
    empty = packing.fill(packing.pack(exp, [], unit=[]), 5)
    assert empty.unit == (1,) * 5 and empty.rows == () and not empty.mask.any()
    media = Media.of_prompts([{"x": torch.full((1, 2), float(i))} for i in range(8)])
    seen = packing.fill(packing.pack(tree.replace(exp, media=media), [2, 3], unit=[2]), 4)
    assert seen.media.count("x").tolist() == [1] * 4 and packing.drop_borrowed(seen).unit == (2,)


@each(
    ("call", "message"),
    [
        (lambda exp: packing.shard(exp, 99, unit=[3, 4]), "unit: expected units of 8 rows together, got 7"),
        (
            lambda exp: packing.left_out(exp, unit=[8, 0]),
            "unit: expected at least 1 row in each of 2 units, got 0",
        ),
        (
            lambda exp: packing.pack(exp, [1, 2], unit=[3]),
            "unit: expected units of 2 rows of the pack together, got 3",
        ),
        (
            lambda exp: packing.shard(exp, 99, unit=[3, 5], most=4),
            "most: expected >= 5 rows per pack, a unit's, got 4",
        ),
        (lambda exp: packing.shard(exp, 20, unit=[3, 5]), "budget: expected at least"),
        (
            lambda exp: packing.minibatches(exp, 3, 0, unit=[3, 5]),
            "n: expected between 1 and the number of units 2, got 3",
        ),
        (
            lambda exp: packing.minibatch_units([3, 5], 0, 0),
            "n: expected between 1 and the number of units 2, got 0",
        ),
        (lambda exp: weight.unit_mean(exp.mask, [3]), "unit: expected units of 8 rows together, got 3"),
    ],
)
def test_units_that_do_not_make_up_the_rows_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(testing.case(0).exp)
