"""Packs of a batch with media: whatever the cut, every pack has each kind, and nothing else changes."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from rft_fn import metric, packing, segment, testing, tree
from rft_fn.packing import shards
from rft_fn.packing.media import placeholder, rows_to_borrow, single_unit, tokens_to_borrow
from rft_fn.types import Experience, Media

NAMES = ("pixels", "sound")


@st.composite
def experiences(draw):
    """Two to eight rows (an even number) of prompts with images, sounds, both or neither."""
    kinds = st.sampled_from(["", "pixels", "sound", "pixels sound"])
    prompts = draw(st.lists(kinds, min_size=1, max_size=4))
    seed = draw(st.integers(0, 99))
    g = torch.Generator().manual_seed(seed)
    size, rows = 9, 2 * len(prompts)
    length = torch.randint(3, size + 1, (rows,), generator=g)
    start = torch.minimum(torch.randint(1, size, (rows,), generator=g), length - 1)
    position = torch.arange(size)
    mask = (position >= start[:, None]) & (position < length[:, None])
    mask &= torch.rand(rows, size, generator=g) < 0.8  # a tool's answer between
    draw_ = lambda: torch.randn(rows, size, generator=g, dtype=torch.float64)  # noqa: E731
    some = lambda i: torch.randn(1 + i % 3, 2, generator=g).double()  # noqa: E731
    parts = [{n: some(i) for n in kind.split()} for i, kind in enumerate(prompts)]
    media = Media.of_prompts(parts, n=2)
    tokens = torch.randint(1, 10, (rows, size), generator=g)
    fields = {"old_logp": -draw_().abs(), "adv": draw_(), "w": draw_().abs(), "extra": {"row": draw_()}}
    return Experience(tokens=tokens, mask=mask, length=length, media=media, **fields)


def start():
    return {n: torch.linspace(-1, 1.3, k, dtype=torch.float64).requires_grad_() for n, k in SIZES.items()}


SIZES = {"word": 10, "target": 10, "pos": 9, "pixels": 2, "sound": 2}


def towers(params, b):
    """What each sequence sees and hears, [K]; a tower that has nothing to see is not run."""
    seen = torch.zeros(b.num_seqs, dtype=torch.float64)
    ran = set()
    if b.media is None:
        return seen, ran
    for name, x in b.media.sequences().items():
        if len(x):
            ran.add(name)
        readers = torch.repeat_interleave(torch.arange(b.num_seqs), b.media.count(name))
        seen = seen.index_add(0, readers, torch.sin(x * params[name]).sum(-1))
    return seen, ran


def model(params, b):
    seen, _ = towers(params, b)
    z = params["word"][b.tokens] * params["target"][b.target] + params["pos"][b.pos]
    before = segment.spread(segment.sum(z, torch.ones_like(b.mask), b.seq, b.num_seqs), b.seq)
    return torch.where(b.mask, -torch.nn.functional.softplus(z + before + segment.spread(seen, b.seq)), 0)


def learned(exp, packs):
    """(gradients, metrics, log-probs [B, S]) of packs."""
    params, total, metrics, logps = start(), 0.0, {}, []
    for b in packs:
        logp = model(params, b)
        loss = -torch.exp(logp - b.old_logp) * b.adv + b.extra["row"] * logp
        total = total + (b.w * loss).sum()
        real = packing.real(b)
        pairs = segment.sum(logp, b.mask, b.seq // b.unit[0], len(b.unit))
        more = {"logp": metric.mean(logp, b.mask), "most": metric.max(logp, b.mask)}
        metrics = metric.merge(metrics, more | {"pairs": metric.mean(pairs, real)})
        logps.append(logp.detach())
    grads = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params.values())]
    return grads, metric.results(metrics), packing.unpack(logps, packs, exp.w)


@given(experiences(), st.integers(16, 60), st.integers(1, 4), st.sampled_from([1, 2]), st.integers(0, 3))
def test_no_cut_changes_gradients_metrics_or_values(exp, budget, world, unit, most):
    out = packing.left_out(exp, unit=unit)
    kept = [i for i in range(len(exp.tokens)) if i // unit not in out]
    want = learned(exp, [packing.pack(exp, kept, unit=unit)])
    shards = packing.shard(exp, budget, world, unit=unit, most=most * unit)
    packs = [b for part in shards for b in part]
    grads, metrics, values = learned(exp, packs)
    for mine, other in zip(grads, want[0]):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    assert metrics == pytest.approx(want[1], rel=1e-9)
    torch.testing.assert_close(values, want[2], rtol=1e-12, atol=1e-12)
    # all packs run the towers that any runs
    names = set()
    if exp.media is not None:
        names = {n for n in exp.media.tensors if bool(exp.media.count(n).any())}
    for b in packs:
        assert towers(start(), b)[1] == names
    assert sorted(row for b in packs for row in b.rows) == kept


@given(experiences(), st.sampled_from([1, 2]), st.data())
def test_a_pack_of_one_unit_and_one_of_none_run_the_same_towers(exp, unit, data):
    rows = data.draw(st.permutations(range(len(exp.tokens))))
    b = packing.pack(exp, rows, unit=unit)
    _, ran = towers(start(), b)
    total = [torch.zeros_like(p) for p in start().values()]
    for k in range(len(rows) // unit):
        part = single_unit(b, k)
        assert towers(start(), part)[1] == ran and part.rows == tuple(rows[k * unit : (k + 1) * unit])
        assert packing.drop_borrowed(part).rows == part.rows and packing.drop_borrowed(part).num_seqs == unit
        total = [a + g for a, g in zip(total, learned(exp, [part])[0])]
    for mine, other in zip(total, learned(exp, [b])[0]):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    empty = placeholder(b)
    assert towers(start(), empty)[1] == ran and empty.rows == () and empty.num_seqs % unit == 0
    assert not empty.mask.any() and not packing.real(empty).any() and not learned(exp, [empty])[2].any()


def exp_of(lengths, prompt, media, budget_rows=None):
    """Rows of lengths and prompts, of which `media` maps some to their number of pixels."""
    size = max(lengths)
    position = torch.arange(size)
    length = torch.tensor(lengths)
    mask = (position >= torch.tensor(prompt)[:, None]) & (position < length[:, None])
    zero = torch.zeros(mask.shape)
    parts = [{"pixels": torch.ones(media[i], 10)} if i in media else None for i in range(len(lengths))]
    tokens = torch.arange(1, mask.numel() + 1).view(mask.shape)
    return Experience(
        tokens=tokens, mask=mask, length=length, old_logp=zero, adv=zero, w=mask.float(),
        media=Media.of_prompts(parts),
    )  # fmt: skip


def test_the_row_with_the_fewest_read_tokens_is_lent_without_what_was_sampled():
    """Row 2 is longer than row 1, but of its tokens fewer were read."""
    exp = exp_of([4, 6, 8], [2, 5, 3], {1: 1, 2: 4})
    assert (
        rows_to_borrow(exp, [0]) == [2]
        and rows_to_borrow(exp, [0, 1]) == []
        and rows_to_borrow(exp, []) == [2]
    )
    b = packing.pack(exp, [0])
    assert b.tokens.tolist() == [1, 2, 3, 17, 18, 19] and b.pos.tolist() == [0, 1, 2, 0, 1, 2]
    assert b.seq.tolist() == [0, 0, 0, 1, 1, 1] and b.mask.tolist() == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert b.rows == (0,) and b.num_seqs == 2 and b.padding == 0 and b.media.of.tolist() == [-1, 0]
    assert not b.w[3:].any() and b.media.count("pixels").tolist() == [0, 4]


def test_a_batch_whose_media_nobody_reads_has_packs_without():
    exp = exp_of([4, 6], [2, 2], {1: 2})
    text = packing.take(exp, torch.tensor([0]))
    assert text.media is not None and packing.pack(text, [0]).media is None
    assert packing.pack(text, []).media is None and packing.pack(exp, [1]).media is not None


def test_packs_and_ranks_are_balanced_by_media_as_well_as_tokens():
    """Rows of one length, of which half have images that cost as much as five rows."""
    exp = exp_of([11] * 8, [4] * 8, {0: 5, 2: 5, 4: 5, 6: 5})
    cost = {i: 10 + 50 * (i % 2 == 0) for i in range(8)}

    def loads(media_cost, budget=40):
        plans = shards.cut(exp, budget, 2, media_cost=media_cost)
        return sorted(sum(cost[i] for p in part for i in p) for part in plans)

    assert loads(1.0) == [140, 140] and loads(0.0) == [40, 240]
    assert loads(1.0, 50) == [140, 140] and loads(0.0, 50) == [40, 240]  # one pack a rank: the packs alone
    with pytest.raises(ValueError, match="media_cost: expected >= 0 tokens per number of media, got -1"):
        packing.shard(exp, 40, media_cost=-1)


@given(experiences(), st.integers(16, 80), st.sampled_from([1, 2]))
@example(
    exp_of([9, 9, 9, 9, 11], [2, 2, 2, 2, 8], {4: 2}), 20, 1
)  # two rows of text and what they borrow are 24
@example(
    exp_of([9] * 8 + [11, 3], [2] * 8 + [8, 2], {8: 2}), 46, 2
)  # a borrowed row stands for both sides of a pair, so two pairs of text and what they borrow are 48
def test_the_budget_has_room_for_what_is_borrowed(exp, budget, unit):
    sizes = (exp.length - 1).view(-1, unit).sum(-1)
    empty = packing.pack(exp, [], unit=unit)
    borrowed = len(empty.tokens) if exp.media is not None else 0
    assert tokens_to_borrow(exp, unit) in (0, borrowed)
    for b in packing.shard(exp, budget, unit=unit)[0]:
        assert len(b.tokens) <= max(budget, int(sizes.max()) + borrowed)


def test_nothing_is_kept_free_where_every_unit_has_its_own_media():
    """Then no pack has to borrow, and all of the budget is for rows."""
    exp = exp_of([6] * 4, [2] * 4, {0: 1, 3: 1})
    assert shards.cut(exp, 20, unit=2) == [[[0, 1, 2, 3]]]
    assert len(shards.cut(exp, 20)[0]) == 2


def test_packs_of_media_that_are_elsewhere_cannot_be_made():
    exp = exp_of([4, 6], [2, 2], {1: 2})
    far = tree.replace(
        exp.media, held=torch.zeros(1, dtype=torch.bool), tensors={"pixels": torch.zeros(0, 10)}
    )
    exp = tree.replace(exp, media=far)
    assert shards.cut(exp, 10, 2) == [[[1]], [[0]]] and packing.owners(exp, [[0]]) == [0]
    with pytest.raises(ValueError, match=r"Strategy\.shard"):
        packing.pack(exp, [0])


def test_laws_of_packs_hold_with_media():
    exp = testing.case(0).exp
    media = Media.of_prompts([{"x": torch.tensor([[float(i)]])} for i in range(len(exp.tokens))])
    b = packing.pack(tree.replace(exp, media=media), [2, 3, 4, 5])
    assert b.media.sequences()["x"].flatten().tolist() == [2.0, 3.0, 4.0, 5.0] and b.padding == 0


def test_media_go_with_their_rows():
    """A fault of other systems: a packed row loses its images, or takes those of its neighbour."""
    media = Media.of_prompts(
        [{"pixels": torch.arange(4.0)[:, None]}, {"pixels": torch.tensor([[4.0], [5.0]])}]
    )
    exp = tree.replace(exp_of([4, 4], [2, 2], {}), media=media)
    pixels = lambda m: m.sequences()["pixels"].flatten().tolist()  # noqa: E731
    assert pixels(packing.pack(exp, [1, 0]).media) == [4, 5, 0, 1, 2, 3]
    assert pixels(packing.pack(exp, [1]).media) == [4, 5]
    assert pixels(packing.pack(exp, []).media) == [0, 1, 2, 3]  # borrowed: the row of the fewest read tokens
    for p in packing.minibatches(exp, 2, 0):
        assert pixels(p.media) == ([0, 1, 2, 3] if p.tokens[0, 0] == 1 else [4, 5])
