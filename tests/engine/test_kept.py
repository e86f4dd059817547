"""The words that top_p and top_k left when a token was drawn, as data of a rollout that a trainer takes."""

from dataclasses import replace

import pytest
import tiny
import torch
from each_case import each

import rft_fn as rft
from rft_fn import engine, model, packing, strategy, tree, weight
from rft_fn.collect.episodes import Conversation, assembled
from rft_fn.logprob import process_logits
from rft_fn.run.rollout_files import read_rollout, write_rollout
from rft_fn.types import Sampling

PROMPTS, KEYS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]], [1, 2, 3]
CUT = Sampling(temperature=0.8, top_p=0.7, max_new=7)


def sampled(sampling=CUT, *, seed=0, kept=True, dtype=torch.float64, n=3, **of_rows):
    eng = engine.hf(tiny.llama(seed, dtype=dtype), tiny.tokenizer(), batch=4, kept=kept)
    return eng.generate(PROMPTS, KEYS, n=n, sampling=sampling, **of_rows)


def trained(rollout, sampling=CUT, *, seed=0, budget=40):
    """[B, S]: a trainer's log-probs in float64, with its gradient."""
    exp = rft.experience(
        rollout, adv=torch.zeros(len(rollout.tokens)), w=weight.token_mean(rollout.mask), old_logp=None
    )
    apply, params = model.bind(tiny.llama(seed, dtype=torch.float64), sampling=sampling)
    packs = packing.shard(exp, budget)[0]
    return packing.unpack([apply(params, pack).logp for pack in packs], packs, exp.w)


@each("sampling", [CUT, Sampling(top_k=4, max_new=7), Sampling(top_k=9, top_p=0.6, temperature=2, max_new=7)])
def test_with_the_samplers_weights_the_set_is_the_one_that_is_derived(sampling):
    rollout = sampled(sampling)
    plain = sampled(sampling, kept=False)
    assert plain.kept is None and rollout.kept.dtype == torch.int32
    assert torch.equal(rollout.tokens, plain.tokens) and torch.equal(rollout.logp, plain.logp)
    there = rollout.kept > 0
    assert torch.equal(there.any(-1), rollout.mask)
    drawn = rollout.kept == rollout.tokens[..., None] + 1
    assert torch.equal(drawn.sum(-1), rollout.mask.long())
    assert there.sum(-1)[rollout.mask].unique().numel() > 1 or sampling.top_p == 1
    both = trained(rollout, sampling), trained(plain, sampling)
    assert (both[0] - both[1]).abs().max() < 1e-12
    assert (both[0] - rollout.logp)[rollout.mask].abs().max() < 1e-6
    scored = engine.hf(tiny.llama(), tiny.tokenizer()).score(rollout, sampling=sampling)
    assert (scored - rollout.logp).abs().max() < 1e-5


def test_with_other_weights_the_mean_ratio_is_1_by_the_samplers_set_alone():
    """By enumeration: every word that may come after a prompt is a row, weighed by its probability."""
    with torch.no_grad():
        z = tiny.llama(dtype=torch.float64)(torch.tensor([PROMPTS[0]])).logits[0, -1]
    logp = process_logits(z, CUT).log_softmax(-1)
    words = logp.isfinite().nonzero().flatten()
    count, size = len(words), len(PROMPTS[0])
    assert 2 < count < len(z) // 2
    tokens = torch.cat([torch.tensor(PROMPTS[0]).expand(count, -1), words[:, None]], 1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, -1] = True
    kept = torch.zeros(*tokens.shape, count, dtype=torch.int32)
    kept[:, -1] = words.int() + 1
    rollout = rft.Rollout(
        tokens=tokens,
        mask=mask,
        logp=torch.where(mask, logp[tokens], 0),
        length=torch.full((count,), size + 1),
        truncated=torch.ones(count, dtype=torch.bool),
        group=torch.zeros(count, dtype=torch.long),
        version=torch.zeros(count, dtype=torch.long),
        kept=kept,
    )
    p = logp[words].exp()
    ratio = (trained(rollout, seed=5)[:, -1] - rollout.logp[:, -1]).exp()
    assert abs((p * ratio).sum() - 1) < 1e-12
    derived = (trained(tree.replace(rollout, kept=None), seed=5)[:, -1] - rollout.logp[:, -1]).exp()
    assert abs((p * derived).sum() - 1) > 1e-2


def test_the_words_of_rows_with_temperatures_of_their_own_and_of_greedy_ones():
    own = [0.0, 0.5, 2.0] * 3
    rollout = sampled(temperature=own)
    size = (rollout.kept > 0).sum(-1).double()
    mean = (size * rollout.mask).sum(-1) / rollout.mask.sum(-1)
    assert mean[1::3].mean() < mean[2::3].mean()
    assert torch.equal((rollout.kept > 0).any(-1), rollout.mask)
    assert (trained(rollout) - rollout.logp)[rollout.mask].abs().max() < 1e-6


def test_words_without_a_set_get_the_one_that_is_derived():
    z = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = torch.zeros(2, 3, 4, dtype=torch.int32)
    kept[0, 1, :2] = torch.tensor([8, 1])
    found = process_logits(z, Sampling(top_p=0.8), kept=kept).isfinite()
    want = process_logits(z, Sampling(top_p=0.8)).isfinite()
    want[0, 1] = torch.isin(torch.arange(11), torch.tensor([7, 0]))
    assert torch.equal(found, want)
    mapped = torch.func.vmap(lambda a, b: process_logits(a, Sampling(top_p=0.8), kept=b))(z, kept)
    assert torch.equal(mapped.isfinite(), want)
    assert process_logits(z, Sampling(), kept=kept).isfinite().all()  # nothing is cut


def test_rows_are_joined_continued_and_written_with_their_words(tmp_path):
    whole, plain = sampled(n=2), sampled(n=2, kept=False)
    both = rft.rollout.concat([plain, rft.rollout.take(whole, [1, 4])])
    assert torch.equal(both.kept[6:, : whole.kept.shape[1], : whole.kept.shape[2]], whole.kept[[1, 4]])
    assert not both.kept[:6].any() and rft.rollout.concat([plain, plain]).kept is None
    assert (trained(both) - both.logp)[both.mask].abs().max() < 1e-6

    first = sampled(n=2, max_new=[2] * 6)
    eng = engine.hf(tiny.llama(dtype=torch.float64), tiny.tokenizer(), kept=True)
    cut = first.truncated.nonzero().flatten().tolist()
    before = rft.rollout.take(first, cut)
    drawn = before.mask.sum(-1).tolist()
    after = eng.generate(
        rft.rollout.prefixes(before),
        [(KEYS[b // 2], b % 2) for b in cut],
        sampling=CUT,
        max_new=[CUT.max_new - x for x in drawn],
        start=drawn,
    )
    longer = rft.rollout.extend(before, after)
    want = rft.rollout.take(whole, cut)
    assert torch.equal(longer.kept.sort(-1).values.sum(-1), want.kept[:, : longer.tokens.shape[1]].sum(-1))
    assert torch.equal((longer.kept > 0).any(-1), longer.mask)
    assert rft.rollout.with_prompts(whole, PROMPTS).kept is None

    file = tmp_path / "rollout.safetensors"
    write_rollout(file, whole, torch.zeros(3, 2))
    assert torch.equal(read_rollout(file)[0].kept, whole.kept)
    write_rollout(file, plain, torch.zeros(3, 2))
    assert read_rollout(file)[0].kept is None
    write_rollout(file, tree.replace(whole, kept=whole.kept + 1), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="kept: expected 0 outside mask"):
        read_rollout(file)


def test_the_turns_of_a_conversation_keep_theirs():
    row = Conversation(prompt=0, sample=0, seat=0, key=1)
    row.read([3, 4])
    row.say([5, 6], [-1.0, -1.0], version=0, cut=False, kept=torch.tensor([[6, 0], [7, 8]]))
    row.read([9])
    row.say([7], [-1.0], version=0, cut=False, kept=torch.tensor([[8, 9, 2]]))
    played = assembled([row], [[3, 4]], [""], [""], seats=1, pad=0, sampling=CUT)
    want = [[0, 0, 0], [0, 0, 0], [6, 0, 0], [7, 8, 0], [0, 0, 0], [8, 9, 2]]
    assert played.rollout.kept.tolist() == [want]


def test_nothing_is_kept_where_nothing_is_cut_and_no_rows_have_no_words():
    assert sampled(Sampling(max_new=4)).kept is None
    none = engine.hf(tiny.llama(), tiny.tokenizer(), kept=True).generate([], [], sampling=CUT)
    assert none.kept.shape == (0, 0, 0)


def test_the_option_reaches_the_engine_and_others_refuse_it():
    config = engine.config_of(strategy.StrategyConfig(replay_kept=True))
    assert config.kept
    eng = engine.get_engine(config, tiny.llama(), tiny.tokenizer())
    assert eng.generate(PROMPTS, KEYS, sampling=CUT).kept is not None
    for kind in ("vllm", "openai", "sglang"):
        with pytest.raises(ValueError, match=f"replay_kept: expected engine_type hf, .*, got {kind}"):
            engine.check_config(replace(config, type=kind))
