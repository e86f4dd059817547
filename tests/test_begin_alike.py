"""Rows that begin alike share packs: samples of a prompt, branches, turns, rewritten contexts."""

from collections import Counter

import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as some

from rft_fn import packing, tree
from rft_fn.packing.families import BLOCK, find_families


def batch(rows, groups=None):
    """An Experience of rows of (prompt, response) tokens."""
    exp = packing.supervised(rows)
    return exp if groups is None else tree.replace(exp, group=torch.tensor(groups))


@some.composite
def tries(draw):
    """Rows of (prompt, response) that continue others at random places, and their groups."""
    words = some.integers(1, 3)
    long = some.sampled_from([1, 2, 5, BLOCK + 3])
    rows = []
    for _ in range(draw(some.integers(1, 8))):
        begun = []
        if rows and draw(some.booleans()):
            prompt, response = draw(some.sampled_from(rows))
            begun = [*prompt, *response][: draw(some.integers(0, len(prompt) + len(response)))]
        begun = begun + [draw(words)] * draw(long)
        response = [draw(words) for _ in range(draw(some.integers(1, 3)))] + [9] * draw(some.integers(0, 70))
        rows.append((begun, response))
    groups = draw(some.none() | some.lists(some.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    return rows, groups


@given(drawn=tries())
def test_families_are_those_of_their_definition(drawn):
    rows, groups = drawn
    exp = batch(rows, groups)
    inputs = [len(p) + len(r) - 1 for p, r in rows]
    found = find_families(exp, inputs, [1] * len(rows))
    whole = [[*p, *r] for p, r in rows]
    want, saved = ref.families(whole, [len(p) for p, _ in rows], groups or range(len(rows)), inputs)
    assert found.members == want
    assert {i: found.saved[i] for family in want for i in family[1:]} == {
        i: saved[i] for family in want for i in family[1:]
    }


@given(drawn=tries(), world=some.integers(1, 3), most=some.integers(0, 5), more=some.integers(0, 200))
def test_no_limit_is_broken_and_no_row_is_lost(drawn, world, most, more):
    rows, groups = drawn
    exp = batch(rows, groups)
    budget = max(len(p) + len(r) for p, r in rows) + more
    ranks = packing.shard(exp, budget, world, most=most, share_prefixes=True)
    usual = packing.shard(exp, budget, world, most=most)
    packs = [p for part in ranks for p in part]
    assert sorted(row for p in packs for row in p.rows) == list(range(len(rows)))
    assert all(len(p.tokens) <= budget and (not most or len(p.rows) <= most) for p in packs)
    assert len({len(part) for part in ranks}) == 1
    assert len(packs) <= 1.25 * sum(len(part) for part in usual)


def episode(seed, turns=4, read=20, spoken=12):
    """Rows of one episode, each the whole context and one turn; the turns before it are read."""
    g = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(3, 60, (n,), generator=g).tolist()

    context, rows = draw(read), []
    for _ in range(turns):
        response = draw(spoken)
        rows.append((context, response))
        context = context + response + draw(5)
    return rows


def computed(rows, plans):
    """The tokens of packs of these rows in which no beginning is computed twice."""
    inputs = [[*p, *r][:-1] for p, r in rows]
    ends = [[(i, k + 1) for i in pack for k in range(len(inputs[i]))] for pack in plans]
    return sum(len({tuple(inputs[i][:k]) for i, k in pack}) for pack in ends)


@pytest.mark.parametrize("shuffled", [False, True])
def test_turns_of_an_episode_share_a_pack(shuffled):
    """A row for each turn: no two have the same prompt."""
    rows = [row for seed in range(6) for row in episode(seed)]
    groups = [i // 4 for i in range(24)]
    if shuffled:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
        rows, groups = [rows[i] for i in order], [groups[i] for i in order]
    budget = sum(len(p) + len(r) for p, r in episode(0)) * 2
    plans = packing.cut(batch(rows, groups), budget, share_prefixes=True)[0]
    assert [len(Counter(groups[i] for i in pack)) for pack in plans] == [2] * 3
    assert computed(rows, plans) == 6 * (20 + 3 * 17 + 11)  # the last row of each has all of the others
    # without groups, which tell that rows belong together, it is chance
    chance = computed(rows, packing.cut(batch(rows), budget, share_prefixes=True)[0])
    assert (chance > 6 * (20 + 3 * 17 + 11)) == shuffled


def test_a_context_that_was_rewritten_shares_what_stayed():
    """The task stays, and the turns behind it are a summary."""
    rows, groups = [], []
    for seed in range(4):
        (task, _), *_ = episode(seed, read=30)
        for k in range(3):
            rows.append(([*task, 60 + k, *episode(10 * seed + k)[0][0][:8]], [7, 8, 9]))
            groups.append(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    rows, groups = [rows[i] for i in order], [groups[i] for i in order]
    plans = packing.cut(batch(rows, groups), 130, share_prefixes=True)[0]
    assert [len({groups[i] for i in pack}) for pack in plans] == [1] * 4
    assert computed(rows, plans) == 4 * (30 + 3 * 11)


def test_a_tree_that_is_larger_than_a_pack_is_cut_at_its_branches():
    """Leaves of two branches with all sampled tokens in mask, in turn: each pack gets the leaves of one."""
    g = torch.Generator().manual_seed(0)
    branches = [torch.randint(3, 60, (2 * BLOCK,), generator=g).tolist() for _ in range(2)]
    rows = [([1, 2], [*branches[k % 2], *torch.randint(3, 60, (6,), generator=g).tolist()]) for k in range(8)]
    budget = 4 * (2 + 2 * BLOCK + 6)
    plans = packing.cut(batch(rows), budget, share_prefixes=True)[0]
    assert sorted(plans) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert computed(rows, plans) == 2 * (2 + 2 * BLOCK + 4 * 5)


def test_rows_of_a_group_that_have_little_in_common_are_packed_as_ever():
    """A token at the beginning, as most tokenizers have one."""
    rows = [([1, 10 + i, *range(20, 45)], [i]) for i in range(9)]
    exp = batch(rows, [0] * 9)
    assert packing.cut(exp, 60, share_prefixes=True) == packing.cut(exp, 60)


def test_ranks_get_equal_work_where_turns_are_computed_once():
    """An episode of four rows is as much work as its last row."""
    last = episode(0)[-1]
    rows = [*episode(0), ([50, *last[0][1:]], last[1])]
    size = sum(len(p) + len(r) for p, r in rows)
    exp = batch(rows, [0, 0, 0, 0, 1])
    assert sorted(packing.cut(exp, size, 2, share_prefixes=True)) == [[[0, 1, 2, 3]], [[4]]]
    assert sorted(packing.cut(exp, size, 2)) != [[[0, 1, 2, 3]], [[4]]]
