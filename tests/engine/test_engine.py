"""The sampler: its log-probs are the trainer's, its samples belong to their keys, bad input is refused."""

import math

import pytest
import tiny
import torch
from each_case import each

import rft_fn as rft
from rft_fn import collect, engine, model, packing, rng, strategy, tree, weight

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17]]
KEYS = [rng.fold_in(0, i) for i in range(4)]


def rollout(sampling, *, n=3, batch=64, prompts=PROMPTS, keys=KEYS, lm=None, **per_row):
    return engine.hf(lm or tiny.llama(), tiny.tokenizer(), batch=batch).generate(
        prompts, keys, n=n, sampling=sampling, **per_row
    )


def trainer_logp(r, sampling, lm=None):
    exp = rft.experience(r, adv=torch.zeros(len(r.tokens)), w=weight.token_mean(r.mask))
    apply, params = model.bind(lm or tiny.llama(), sampling=sampling)
    packs = packing.shard(exp, 64)[0]
    return packing.unpack(model.score(apply, params, packs), packs, exp.w)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"temperature": 1.6}, {"top_p": 0.8}, {"top_k": 5, "temperature": 0.9}],
)
def test_trainer_and_sampler_agree(options):
    """Parity: one test against a forgotten shift, temperature, cut, or positions that are not the tokens'."""
    sampling = rft.Sampling(max_new=9, **options)
    r = rollout(sampling)
    bound = tiny.logp_rounding(tiny.llama(), sampling.temperature)
    assert (trainer_logp(r, sampling) - r.logp).abs().max() < bound
    assert r.logp[r.mask].min() < -0.05  # there is something to agree about
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    assert ((eng.score(r, sampling=sampling) - r.logp) * r.mask).abs().max() < bound


TEMPERATURES = [0.5, 0, 1.6, 1, 1, 0.7, 0, 2.5, 0.3, 0.9, 1.1, 3]  # of 4 prompts, 3 rows each


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 5, "temperature": 0.9}])
def test_rows_with_temperatures_are_those_of_calls_with_one(options):
    """In sampler and trainer, whatever company they have; a greedy row is scored at 1."""
    sampling, lm = rft.Sampling(max_new=9, **options), tiny.llama()
    r = rollout(sampling, temperature=TEMPERATURES)
    assert r.sampling == sampling
    torch.testing.assert_close(r.temperature, torch.tensor([t or 1.0 for t in TEMPERATURES]))
    for b, t in enumerate(TEMPERATURES):
        alone = rollout(tree.replace(sampling, temperature=t))
        assert alone.tokens[b, : alone.length[b]].tolist() == r.tokens[b, : r.length[b]].tolist()
        own = r.mask[b].nonzero().flatten()
        torch.testing.assert_close(r.logp[b, own], alone.logp[b, own], rtol=1e-5, atol=1e-6)
    bound = tiny.logp_rounding(lm, min(t or 1 for t in TEMPERATURES))
    assert (trainer_logp(r, sampling) - r.logp).abs().max() < bound
    eng = engine.hf(lm, tiny.tokenizer())
    assert ((eng.score(r, sampling=sampling) - r.logp) * r.mask).abs().max() < bound
    flat = tree.replace(r, temperature=None)
    assert (trainer_logp(flat, sampling) - r.logp).abs().max() > 100 * bound
    assert torch.equal(eng.score(r), eng.score(flat))  # without `sampling`: the model's softmax


def test_temperatures_reach_a_rollout_of_ranks_and_its_scores():
    sampling, st = rft.Sampling(max_new=9), rft.strategy.get_fake_strategy()
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    r = rft.collect.gather_and_generate(
        eng, st, PROMPTS, KEYS, n=3, sampling=sampling, temperature=TEMPERATURES
    )
    assert torch.equal(r.tokens, rollout(sampling, temperature=TEMPERATURES).tokens)
    apply, state = st.init(tiny.llama(), rft.optim.sgd(0.1), sampling=sampling)
    assert (st.score(apply, state.params, r, 64).logp - r.logp).abs().max() < tiny.logp_rounding(
        tiny.llama(), 0.3
    )


def test_what_is_wrong_is_further_apart_than_rounding():
    """The bound of the other tests, at its widest: it tells a temperature, a type and a position apart."""
    sampling, lm = rft.Sampling(max_new=9), tiny.llama()
    r = rollout(sampling)
    assert (trainer_logp(r, sampling) - r.logp).abs().max() < tiny.logp_rounding(lm)
    rounded, turned = tiny.llama().bfloat16().float(), tiny.llama(rope_theta=20_000.0)
    later = tree.replace(r, tokens=torch.nn.functional.pad(r.tokens, (1, -1), value=3))
    for wrong in (
        trainer_logp(r, rft.Sampling(temperature=1.01)),
        trainer_logp(r, sampling, rounded),
        trainer_logp(r, sampling, turned),
        trainer_logp(later, sampling),
    ):
        assert (wrong - r.logp).abs().max() > 10 * tiny.logp_rounding(lm)


def test_ids_without_text_are_announced():
    """A fault that was found: a model with more ids than its tokenizer learned them in silence."""
    lm = tiny.llama(vocab_size=2 * len(tiny.tokenizer()))
    with pytest.warns(UserWarning, match=r"engine: about .* of the sampled tokens are ids that"):
        r = rollout(rft.Sampling(max_new=9), lm=lm)
    assert (r.tokens >= len(tiny.tokenizer())).any()


@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.7}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_greedy_token_has_the_log_prob_of_temperature_one(cut, dtype):
    """The likeliest token of the cut distribution, with its own probability there, which is not 1."""
    r = rollout(rft.Sampling(max_new=9, temperature=0, **cut), n=1, lm=tiny.llama(dtype=dtype))
    at_one = rft.Sampling(max_new=9, **cut)
    assert (trainer_logp(r, at_one, tiny.llama(dtype=dtype)) - r.logp).abs().max() < 1e-5
    assert r.logp[r.mask].min() < (-0.05 if cut else -0.5) and r.logp.max() <= 0
    with torch.no_grad():
        z = tiny.llama(dtype=dtype)(r.tokens, use_cache=False).logits[:, :-1]
    assert (r.tokens[:, 1:] == z.argmax(-1))[r.mask[:, 1:]].all()


def test_a_token_outside_of_the_cut_keeps_a_finite_score():
    """Such a token is added to the set: p / (mass of the two likeliest + p), for engine and trainer."""
    r, cut = rollout(rft.Sampling(max_new=9)), rft.Sampling(top_k=2)
    with torch.no_grad():
        p = tiny.llama()(r.tokens, use_cache=False).logits[:, :-1].softmax(-1)
    own = p.gather(-1, r.tokens[:, 1:, None])[..., 0]
    two = p.topk(2).values
    want = (own / (two.sum(-1) + torch.where(own < two[..., 1], own, 0))).log()
    want = torch.nn.functional.pad(want, (1, 0))[r.mask]
    assert (torch.nn.functional.pad(own < two[..., 1], (1, 0))[r.mask]).any()
    for got in (engine.hf(tiny.llama(), tiny.tokenizer()).score(r, sampling=cut), trainer_logp(r, cut)):
        torch.testing.assert_close(got[r.mask], want, rtol=1e-4, atol=1e-4)


def responses(r, i, n):
    return [r.tokens[i * n + j][r.mask[i * n + j]].tolist() for j in range(n)]


def test_a_sample_does_not_depend_on_its_company():
    """The same prompt and key: alone, in a batch of any size, with other prompts,
    and with more samples beside it."""
    sampling = rft.Sampling(max_new=9)
    together = rollout(sampling, n=4)
    for i in range(4):
        alone = rollout(sampling, n=4, prompts=[PROMPTS[i]], keys=[KEYS[i]], batch=1)
        fewer = rollout(sampling, n=2, prompts=PROMPTS[::-1], keys=KEYS[::-1], batch=3)
        assert responses(together, i, 4) == responses(alone, 0, 4)
        assert responses(together, i, 4)[:2] == responses(fewer, 3 - i, 2)


def test_other_keys_draw_other_samples():
    sampling = rft.Sampling(max_new=9)
    a, b = rollout(sampling), rollout(sampling, keys=[k + 1 for k in KEYS])
    assert [responses(a, i, 3) for i in range(4)] != [responses(b, i, 3) for i in range(4)]


def test_samples_have_the_models_distribution():
    """First tokens of 4,000 samples against the model's own
    probabilities: chi-square within five deviations."""
    lm, sampling, n = tiny.llama(), rft.Sampling(max_new=1, temperature=0.8), 4000
    r = rollout(sampling, n=n, prompts=[PROMPTS[0]], keys=[7], lm=lm, batch=n)
    with torch.no_grad():
        p = (lm(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.8).softmax(-1)
    counts = torch.bincount(r.tokens[:, 5], minlength=len(p)).double()
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum()
    assert abs(chi2 - (len(p) - 1)) < 5 * math.sqrt(2 * (len(p) - 1))


def test_greedy_is_the_argmax():
    lm = tiny.llama()
    r = rollout(rft.Sampling(temperature=0, max_new=4), n=1, prompts=[PROMPTS[2]], keys=[0], lm=lm)
    ids = list(PROMPTS[2])
    with torch.no_grad():
        while len(ids) < 11 and ids[-1] != 1:
            ids.append(int(lm(torch.tensor([ids])).logits[0, -1].argmax()))
    assert r.tokens[0, : r.length[0]].tolist() == ids


def test_top_k_and_top_p_cut_what_is_sampled():
    lm = tiny.llama()
    with torch.no_grad():
        best = set(lm(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(3).indices.tolist())
    r = rollout(
        rft.Sampling(max_new=1, top_k=3, temperature=3.0), n=300, prompts=[PROMPTS[0]], keys=[1], batch=300
    )
    assert set(r.tokens[:, 5].tolist()) == best
    one = rollout(rft.Sampling(max_new=1, top_p=1e-6), n=20, prompts=[PROMPTS[0]], keys=[1])
    assert len(set(one.tokens[:, 5].tolist())) == 1
    assert torch.equal(one.logp[one.mask], torch.zeros(20))


def test_rows_end_at_stop_tokens_and_at_max_new():
    sampling = rft.Sampling(max_new=30, stop=tuple(range(20, 40)))
    r = rollout(sampling, n=8)
    ends = frozenset(range(20, 40)) | {1}
    for tokens, mask, cut, length in zip(r.tokens, r.mask, r.truncated, r.length):
        sampled = tokens[mask].tolist()
        assert not any(t in ends for t in sampled[:-1])
        assert (sampled[-1] not in ends) == bool(cut)
        assert len(sampled) == 30 if cut else len(sampled) <= 30
        assert mask.nonzero().max() == length - 1  # the last sampled token is kept, and trained on
    assert not r.truncated.all()


def test_every_end_token_of_the_model_ends_a_response():
    """Chat models name several in their generation config: one that is not known runs into the next turn."""
    lm = tiny.llama()
    lm.generation_config.eos_token_id = [1, *range(20, 40)]
    r = rollout(rft.Sampling(max_new=30), n=8, lm=lm)
    ends = set(r.tokens[torch.arange(len(r.tokens)), r.length - 1][~r.truncated].tolist())
    assert ends & set(range(20, 40)) and all(t in {1, *range(20, 40)} for t in ends)


def test_load_gives_weights_and_version():
    other, sampling = tiny.llama(5), rft.Sampling(max_new=5)
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    before = eng.generate(PROMPTS, KEYS, n=2, sampling=sampling)
    eng.load(other.named_parameters(), version=7)
    after = eng.generate(PROMPTS, KEYS, n=2, sampling=sampling)
    assert (
        set(before.version.tolist()) == {0}
        and set(after.version.tolist()) == {7}
        and eng.status()["version"] == 7
    )
    assert torch.equal(after.tokens, rollout(sampling, n=2, lm=other).tokens)
    assert (trainer_logp(after, sampling) - after.logp).abs().max() > 0.1  # stale weights are seen


def test_gather_and_generate_shares_out_prompts():
    """Each of two ranks samples its half; put together they are what one process samples."""
    eng, st, sampling = (
        engine.hf(tiny.llama(), tiny.tokenizer()),
        rft.strategy.get_fake_strategy(),
        rft.Sampling(max_new=5),
    )
    whole = collect.gather_and_generate(eng, st, PROMPTS, KEYS, n=2, sampling=sampling)
    parts = [
        collect.gather_and_generate(eng, st._replace(rank=r, world=2), PROMPTS, KEYS, n=2, sampling=sampling)
        for r in (0, 1)
    ]
    assert torch.cat([p.group for p in parts]).tolist() == whole.group.tolist()
    sampled = [responses(p, i, 2) for p in parts for i in range(2)]
    assert sampled == [responses(whole, i, 2) for i in range(4)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rollout(rft.Sampling(), keys=KEYS[:2]),
            "prompts: expected a key for each and n >= 1, got 4 prompts, 2 keys, n = 3",
        ),
        (lambda: rollout(rft.Sampling(), prompts=[[]], keys=[1]), "got none in prompt 0"),
        (
            lambda: rollout(rft.Sampling(max_new=125)),
            "window of 128 tokens, got 5 \\+ 125 in prompt 0; lower max_new",
        ),
        (
            lambda: rollout(rft.Sampling(), temperature=[1.0]),
            "temperature: expected one for each row, B = 12, got B = 1",
        ),
        (
            lambda: rollout(rft.Sampling(), temperature=0.5),
            "temperature: expected one for each row, B = 12, got 0.5",
        ),
        (
            lambda: rollout(rft.Sampling(), temperature=["hot"] * 12),
            r"temperature\[0\]: expected a number >= 0, got hot",
        ),
        (
            lambda: rollout(rft.Sampling(max_new=3), temperature=[1.0, -0.5] * 6),
            r"temperature\[1\]: expected a number >= 0, got -0.5",
        ),
        (
            lambda: engine.get_engine(engine.EngineConfig(type="x"), "tiny"),
            "engine type: expected hf, .*got 'x'",
        ),
        (
            lambda: engine.get_engine(engine.EngineConfig(batch=0), "tiny"),
            "batch: expected an integer in .1, inf",
        ),
        (
            lambda: engine.get_engine(engine.EngineConfig(tp_size=4, mem_util=0.9), "tiny"),
            "engine_tp_size, engine_mem_util: expected 1 and 0 for hf.*got 4 and 0.9",
        ),
        (lambda: engine.get_engine(None, tiny.llama()), "tokenizer: expected one, got None"),
        (
            lambda: engine.hf(tiny.llama(), tiny.tokenizer()).load([("nope", torch.zeros(1))], version=1),
            "weights: nope: expected a parameter of the model",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("sleep", [True, False])
def test_the_engine_sleeps_between_rollouts_unless_told_not_to(sleep):
    """Asleep it takes weights, and sampling wakes it; the samples are the same."""
    sampling, st = rft.Sampling(max_new=4), rft.strategy.get_fake_strategy()
    eng = engine.hf(tiny.llama(), tiny.tokenizer(), sleep=sleep)
    first = collect.gather_and_generate(eng, st, PROMPTS, KEYS, n=2, sampling=sampling)
    assert eng.status()["asleep"] == sleep
    eng.load(tiny.llama(1).named_parameters(), version=1)
    second = collect.gather_and_generate(eng, st, PROMPTS, KEYS, n=2, sampling=sampling, sleep_engine=False)
    assert not eng.status()["asleep"] and not torch.equal(first.tokens, second.tokens)
    eng.load(tiny.llama().named_parameters(), version=2)
    assert torch.equal(eng.generate(PROMPTS, KEYS, n=2, sampling=sampling).tokens, first.tokens)


def test_ragged_prompts_are_what_the_model_reads():
    """Left padding with positions: each row's prompt comes back as it
    went in, whatever its neighbours' lengths."""
    r = rollout(rft.Sampling(max_new=3), n=2)
    for row, g in enumerate(r.group.tolist()):
        assert r.tokens[row, : len(PROMPTS[g])].tolist() == PROMPTS[g]
        assert not r.mask[row, : len(PROMPTS[g])].any()
    assert torch.equal(tree.map(lambda x: x, r).logp, r.logp)


def ended_by(tokenizer, tokens, texts):
    """The definition: the shortest response whose whole decoded text contains one of the texts."""
    for size in range(1, len(tokens) + 1):
        if any(text in tokenizer.decode(tokens[:size]) for text in texts):
            return size
    return None


@pytest.mark.parametrize("texts", [("1",), ("12", "+"), ("2", "no such text")])
def test_a_text_ends_a_response_at_the_token_that_completes_it(texts):
    """The tokens up to that one are those of a response that is not stopped; all of them are trained."""
    tokenizer, ids = tiny.tokenizer(), frozenset([tiny.tokenizer().eos_token_id])
    free = rollout(rft.Sampling(max_new=40), n=8)
    cut = rollout(rft.Sampling(max_new=40, stop=texts), n=8)
    stopped = 0
    for a, b, truncated in zip(
        (x for i in range(4) for x in responses(free, i, 8)),
        (x for i in range(4) for x in responses(cut, i, 8)),
        cut.truncated.tolist(),
    ):
        size = ended_by(tokenizer, a, texts)
        assert b == a[:size] and (size is None or not truncated)
        assert truncated == (size is None and a[-1] not in ids)
        stopped += size is not None
    assert stopped > 3
    exact = trainer_logp(cut, rft.Sampling(), tiny.llama(dtype=torch.float64))
    assert (exact - cut.logp).abs().max() < tiny.logp_rounding(tiny.llama())


def test_a_text_is_found_across_tokens_without_text_of_their_own():
    """The end of a response is decoded, never the whole of it at every token: what it holds is the same."""

    class Words:
        names = ("", "ab", "ba", "x", "a")

        def decode(self, tokens, **_):
            return "".join(self.names[t] for t in tokens)

    stop = engine.requests.Stop(Words(), frozenset([9]), ("abba", "xax", 7))
    assert stop.ends([9]) and stop.ends([3, 7]) and not stop.ends([1])
    assert stop.ends([1] + [0] * 200 + [2]) and stop.ends([0] * 50 + [3, 4, 3])
    assert not stop.ends([1, 3, 2] + [0] * 30)


@each(("stop", "ok"), [((), True), ((5, "\n"), True), (("",), False), ("text", False), ((1.5,), False)])
def test_stop_is_ids_and_texts(stop, ok):
    if ok:
        assert rft.Sampling(stop=stop).stop == stop
    else:
        with pytest.raises(ValueError, match=r"^stop(\[0\])?: expected "):
            rft.Sampling(stop=stop)


def test_text_among_ids_is_one_line():
    with pytest.raises(ValueError, match="prompts: expected token ids, got text in prompt 1"):
        rollout(rft.Sampling(max_new=4), prompts=[[3, 4], ["12", "3"]], keys=range(2))


@each(
    ("options", "message"),
    [
        ({"type": "nothing"}, "engine type: expected hf, .*got 'nothing'"),
        ({"tp_size": 2}, "engine_tp_size, engine_mem_util: expected 1 and 0 for hf"),
        ({"max_model_len": 64}, "engine_max_model_len: expected 0 for hf, got 64"),
        ({"block_size": 32}, "engine_block_size: expected 0 for hf, got 32"),
        ({"dtype": "bfloat16"}, "engine_dtype: expected 'auto' for hf, got 'bfloat16'"),
        ({"speculative": "{}"}, "engine_speculative: expected '' for hf, got '{}'"),
        ({"type": "vllm", "tp_size": 2}, "engine_tp_size: expected a divisor of the 1 processes .*, got 2"),
        ({"type": "vllm", "dtype": "int8"}, "engine_dtype: expected one of auto, float32, .*, got 'int8'"),
    ],
)
def test_a_mistake_in_the_engines_config_comes_before_any_model(options, message):
    config = engine.EngineConfig(**options)
    with pytest.raises(ValueError, match=message):
        engine.check_config(config)
    with pytest.raises(ValueError, match=message):
        engine.get_engine(config, "./nowhere")


def test_the_options_of_a_strategy_make_an_engine():
    config = rft.strategy.StrategyConfig(engine_type="nobody")
    with pytest.raises(ValueError, match=r"engine type: expected hf.*got 'nobody'"):
        engine.get_engine(config, "tiny")


@pytest.mark.parametrize("more", [{"bf16": True}, {"use_mp_opt": True}])
def test_the_engine_computes_in_bfloat16_where_the_trainer_does(more):
    """In one type they differ by the rounding of bfloat16."""
    config = strategy.StrategyConfig(**more)
    assert engine.config_of(config).bf16 and not engine.config_of(strategy.StrategyConfig()).bf16
    eng = engine.get_engine(config, tiny.llama(dtype=torch.float32), tiny.tokenizer())
    assert eng.status()["dtype"] == torch.bfloat16

    # weights arrive in float32, and prompts are shared by their samples and alone
    st = strategy.get_strategy(config)
    apply, state = st.init(tiny.llama(dtype=torch.float32, num_hidden_layers=3), rft.optim.adamw(1e-3))
    eng = engine.get_engine(config, tiny.llama(dtype=torch.float32, num_hidden_layers=3), tiny.tokenizer())
    rft.sync.push(st, state, eng, version=1)
    sampling = rft.Sampling(max_new=12)
    for n, prompts in ((4, PROMPTS), (1, PROMPTS)):
        r = eng.generate(prompts, KEYS, n=n, sampling=sampling)
        scored = st.score(apply, state.params, r, 64).logp
        gap = (scored - r.logp).abs()[r.mask]
        assert 0 < gap.mean() < 0.02 and (eng.score(r) - r.logp).abs()[r.mask].mean() < 0.02
