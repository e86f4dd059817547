"""Ranked lists of any length through strategies: packs, models that mix sequences, several processes."""

import pytest
import ranks
import torch
from families import small

import rft_fn as rft
from rft_fn import model, optim, packing, tree
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy, load_fault
from rft_fn.strategy.packer import Packer
from rft_fn.types import Media

LISTS = [3, 1, 4, 2]
KINDS = {"Llama": "packs", "Bloom": "one sequence at a time"}


def batch(bad=None):
    """Ten rows in four lists; the last row, and with it its list, may have a rank that is no number."""
    g = torch.Generator().manual_seed(1)
    sizes = torch.randint(3, 9, (sum(LISTS),), generator=g).tolist()
    exp = packing.scored([torch.randint(3, 40, (n,), generator=g).tolist() for n in sizes])
    rank = torch.tensor([float(size - i) for size in LISTS for i in range(size)])
    if bad is not None:
        rank[bad] = torch.nan
    w = rft.weight.unit_mean(exp.mask, LISTS)
    return tree.replace(exp, w=w, extra={"rank": rank[:, None] * exp.mask})


def listwise(out, b):
    """Plackett-Luce of log-probs of the rows' last targets."""
    score = rft.segment.sum(out.logp, b.mask, b.seq, b.num_seqs)
    rank = rft.segment.sum(b.extra["rank"], b.mask, b.seq, b.num_seqs)
    x = rft.loss.plackett_luce(score, rank, packing.unit_of(b)) * (1 + 0 * rank)
    return x[b.seq], rft.metric.ranking("lists", score, rank, packing.unit_of(b))


def forwards(lm):
    """A list that grows with every forward of the model's decoder."""
    calls = []
    lm.base_model.register_forward_hook(lambda *_: calls.append(1))
    return calls


def trained(st, kind, budget=24):
    """One step on the lists."""
    lm = small(kind, torch.float32)
    calls = forwards(lm)
    apply, state = st.init(lm, optim.adamw(1e-2))
    packs = st.shard(batch(), budget, unit=LISTS)
    calls.clear()
    grads, metrics = st.grad(state, apply, listwise, packs)
    state, more = st.update(state, grads)
    return {
        "forwards": len(calls),
        "packs": [b.unit for b in packs],
        "numbers": rft.metric.results(metrics | more),
        "weights": dict(st.export(state)),
    }


def two(rank, folder):
    """Both kinds of models under FSDP2, and the post-mortem of a list at fault."""
    st = get_strategy(StrategyConfig(max_skips=1, fsdp=True))
    out = {kind: trained(get_strategy(StrategyConfig(fsdp=True)), kind) for kind in KINDS}
    st.session.set_dump_dir(folder)
    apply, state = st.init(small("Bloom", torch.float32), optim.adamw(1e-3))
    grads, _ = st.grad(state, apply, listwise, st.shard(batch(bad=9), 60, unit=LISTS))
    try:
        st.update(state, grads)
    except rft.strategy.NonFinite as error:
        out["fault"] = str(error)
    return out


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    return folder, ranks.run(2, "test_lists:two", str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_take_the_step_of_one(both, kind):
    """Equally many forwards on both, whatever the lengths of their lists."""
    want = trained(get_fake_strategy(), kind, budget=1000)
    results = [out[kind] for out in both[1]]
    assert results[0]["forwards"] == results[1]["forwards"]
    assert results[0]["packs"] != results[1]["packs"]
    for got in results:
        for name in ("loss", "grad/norm", "lists/accuracy", "lists/margin", "lists/ece", "lists/top"):
            assert got["numbers"][name] == pytest.approx(want["numbers"][name], rel=1e-3, abs=1e-6), name
        for name, x in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], x, rtol=0, atol=2e-4)


def test_the_list_at_fault_is_kept_whole(both):
    folder, results = both
    assert all("the first sequence with such a gradient is in" in out["fault"] for out in results)
    pack, _, about = load_fault(folder / "fault_00000001")
    want = packing.pack(batch(bad=9), [8, 9], unit=2)
    assert (
        about["row"] == 8
        and torch.equal(pack.tokens, want.tokens)
        and (pack.num_seqs, pack.unit) == (2, (2,))
    )


def test_every_pack_of_one_list_has_as_many_sequences_where_each_is_a_forward():
    st = get_fake_strategy()
    packs = st.shard(batch(), 1000, unit=LISTS)
    assert [b.unit for b in packs] == [tuple(LISTS)]
    st.bind(small("Bloom"))
    packs = st.shard(batch(), 1000, unit=LISTS)
    assert sorted(b.unit for b in packs) == [(1, 1, 1, 1), (2, 1, 1), (3, 1), (4,)]
    assert {b.num_seqs for b in packs} == {4}
    assert sorted(b.rows for b in packs) == [(0, 1, 2), (3,), (4, 5, 6, 7), (8, 9)]


def test_several_lists_by_hand_are_refused_by_name():
    apply, params = model.bind(small("Bloom"))
    with pytest.raises(ValueError, match=r"expected one sequence for BloomModel, which mixes .* got 4"):
        apply(params, packing.pack(batch(), [3, 0, 1, 2], unit=[1, 3]))
    one = packing.pack(batch(), [0, 1, 2], unit=[3])
    want = torch.cat([apply(params, packing.pack(batch(), [i])).logp for i in range(3)])
    got = apply(params, packing.fill(one, 5)).logp
    torch.testing.assert_close(got, torch.cat([want, torch.zeros(2)]), rtol=0, atol=1e-6, check_dtype=False)


def test_media_in_some_rows_of_lists_are_refused_where_each_sequence_is_a_forward():
    """Towers would run more often on one process than on another."""
    some = [{"pixels": torch.zeros(1, 2)}] * 5 + [None] + [{"pixels": torch.zeros(1, 2)}] * 4
    exp = tree.replace(batch(), media=Media.of_prompts(some))
    packer = Packer(StrategyConfig())
    plans = packer.rows(exp, 1000, unit=LISTS)
    assert packer.sequences(exp, plans, LISTS) == 0
    packer.one_unit = True
    plans = packer.rows(exp, 1000, unit=LISTS)
    with pytest.raises(ValueError, match=r"media: expected pixels in every row .* got none in row 5"):
        packer.sequences(exp, plans, LISTS)
    assert packer.sequences(tree.replace(exp, media=None), plans, LISTS) == 4
    assert packer.sequences(exp, packer.rows(exp, 1000, unit=2), 2) == 0


def test_a_pack_holds_at_most_a_micro_batch_or_a_list():
    exp = batch()
    packer = Packer(StrategyConfig(packing_samples=False, micro_train_batch_size=2))
    plans = packer.rows(exp, 1, unit=LISTS)
    assert max(len(rows) for part in plans for rows in part) == 4
