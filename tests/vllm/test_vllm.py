"""vLLM in process against the engine of transformers and the trainer."""

import os
import random

import numpy
import pytest
import torch
from inprocess import NAME, build, gap, inside, needs_vllm, prompts_of, tokenizer, trained

import rft_fn as rft
from rft_fn import engine, model

pytestmark = needs_vllm
SAMPLED = rft.Sampling(temperature=0.7, top_p=0.9, top_k=12, max_new=10)


def surroundings():
    """What vLLM changes of a process where nobody puts it back."""
    numpys = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": (numpys[1].tolist(), numpys[2]),
        "threads": (torch.get_num_threads(), torch.set_num_threads),
        "cores": os.sched_getaffinity(0),
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
    }


@pytest.fixture(scope="module")
def made():
    """(the engine, the surroundings before it was built, those after)."""
    tokenizer()  # importing transformers changes the environment as well
    model.load(NAME)
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    before = surroundings()
    eng = build()
    after = surroundings()
    yield eng, before, after
    eng.close()
    assert not torch.distributed.is_initialized()


@pytest.fixture
def vllm(made):
    """The engine with the weights of the embedded default."""
    made[0].load(model.load(NAME).named_parameters(), version=0)
    return made[0]


@pytest.fixture(scope="module")
def hf():
    return engine.get_engine(engine.EngineConfig(), NAME, tokenizer())


def test_building_leaves_the_process_as_it_was(made):
    _, before, after = made
    assert before == after
    torch.set_num_threads(torch.get_num_threads() + 1)  # does something
    assert torch.get_num_threads() == before["threads"][0] + 1
    torch.set_num_threads(before["threads"][0])


def test_sampling_loading_and_scoring_leave_the_process_as_it_was(vllm):
    before = surroundings()
    rollout = vllm.generate(prompts_of(4), range(4), n=2, sampling=SAMPLED)
    vllm.load(trained(1e-2).named_parameters(), version=1)
    vllm.score(rollout)
    assert surroundings() == before


@pytest.mark.parametrize("stop", [(), ("1",), ("12", "3"), (5, "7")])
def test_greedy_answers_ends_and_log_probs_are_those_of_hf(vllm, hf, stop):
    sampling = rft.Sampling(temperature=0, max_new=9, stop=stop)
    prompts = prompts_of(16)
    a = vllm.generate(prompts, range(16), sampling=sampling)
    b = hf.generate(prompts, range(16), sampling=sampling)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.mask, b.mask)
    assert torch.equal(a.truncated, b.truncated) and torch.equal(a.group, b.group)
    assert (a.logp - b.logp).abs().max() < 1e-5
    assert len({row for row in map(str, a.tokens.tolist())}) > 8  # there is something to agree about


def test_a_sampled_response_ends_where_its_text_is_complete(vllm):
    text = tokenizer()
    sampling = rft.Sampling(max_new=30, stop=("4", "12"))
    rollout = vllm.generate(prompts_of(8), range(8), n=16, sampling=sampling)
    responses = rft.reward.responses(rollout, text)
    ended = [r for r, cut in zip(responses, rollout.truncated.tolist()) if not cut]
    by_text = [r for r in ended if r.endswith(("4", "12"))]
    assert len(by_text) > 10
    assert all("4" not in r[:-1] and "12" not in r[:-1] for r in responses)


@pytest.mark.parametrize(
    "sampling", [rft.Sampling(max_new=10), SAMPLED, rft.Sampling(temperature=1.3, max_new=10)]
)
def test_log_probs_are_of_the_distribution_sampled_from(vllm, hf, sampling):
    lm = model.load(NAME)
    rollout = vllm.generate(prompts_of(12), range(12), n=4, sampling=sampling)
    own = hf.generate(prompts_of(12), range(12), n=4, sampling=sampling)
    rounding = 2.0**-24 * float(rollout.logp.abs().max())  # of one log-prob in float32
    floor = max(gap(lm, own, sampling), rounding)
    assert rollout.mask.sum() > 100 and rollout.logp.min() < -1
    assert gap(lm, rollout, sampling) <= 10 * floor


def test_rows_have_the_temperatures_that_they_were_asked_for(vllm, hf):
    """Each row is that of a call at its temperature, and the trainer scores it at that."""
    warm, sampling = [0.0, 0.5, 1.0, 1.7], rft.Sampling(max_new=10)
    prompts, keys = prompts_of(12), range(12)
    rollout = vllm.generate(prompts, keys, n=4, sampling=sampling, temperature=warm * 12)
    for j, t in enumerate(warm):
        alone = vllm.generate(prompts, keys, n=4, sampling=rft.Sampling(temperature=t, max_new=10))
        for b in range(j, 48, 4):
            size = int(rollout.length[b])
            assert rollout.tokens[b, :size].tolist() == alone.tokens[b, :size].tolist()
    scored = hf.score(rollout, sampling=sampling)
    assert (scored - rollout.logp).abs().max() < 1e-4
    with pytest.raises(engine.BadRequest, match="sampling: expected None for vllm"):
        vllm.score(rollout, sampling=sampling)


def test_score_is_of_the_models_softmax_whatever_was_sampled(vllm, hf):
    rollout = vllm.generate(prompts_of(6), range(6), n=2, sampling=SAMPLED)
    assert (vllm.score(rollout) - hf.score(rollout)).abs().max() < 1e-5
    with pytest.raises(engine.BadRequest, match="sampling: expected None for vllm"):
        vllm.score(rollout, sampling=SAMPLED)
    assert vllm.status()["alive"]


def test_it_agrees_with_the_trainer_at_every_depth(vllm):
    st = rft.strategy.get_fake_strategy()
    apply, params = st.bind(model.load(NAME), sampling=rft.Sampling())
    prompts = rft.collect.random_prompts(range(3, 20), [32, 64, 100], 0)
    for part in rft.collect.gaps_of(vllm, st, apply, params, prompts, new=20):
        found = rft.collect.depths(part)
        assert [x.first for x in found] == [0, 64] and all(x.mean < 1e-5 for x in found)


def test_a_key_names_its_sample_in_any_company(vllm):
    prompts = prompts_of(16)
    together = vllm.generate(prompts, range(16), n=3, sampling=SAMPLED)
    turned = vllm.generate(prompts[::-1], range(16)[::-1], n=3, sampling=SAMPLED)
    alone = vllm.generate([prompts[5]], [(5, 2)], sampling=SAMPLED)
    size = int(alone.length[0])
    row = 5 * 3 + 2
    assert together.tokens[row, :size].tolist() == alone.tokens[0, :size].tolist()
    assert together.tokens.view(16, 3, -1).flip(0).tolist() == turned.tokens.view(16, 3, -1).tolist()
    rows = together.tokens.view(16, 3, -1)
    assert sum(not torch.equal(r[0], r[1]) for r in rows) > 8  # samples of a prompt differ


def test_a_prompt_is_read_once_for_all_of_its_samples(vllm):
    """The cache holds whole blocks, of 32 tokens on a CPU: a prompt of 70 tokens has two."""
    prompt = prompts_of(3)[2]
    inside(vllm).llm.reset_prefix_cache()
    vllm.generate([prompt], [0], n=8, sampling=SAMPLED)
    assert inside(vllm).sampler.cached == 7 * 64


def test_each_row_has_its_own_limit(vllm):
    limits = [1, 2, 3, 4, 5, 6]
    sampling = rft.Sampling(max_new=6, temperature=1.9)
    rollout = vllm.generate(prompts_of(3), range(3), n=2, sampling=sampling, max_new=limits)
    sizes = rollout.mask.sum(-1).tolist()
    assert all(size <= limit for size, limit in zip(sizes, limits))
    assert rollout.truncated.tolist() == [
        size == limit and int(row[length - 1]) != 1
        for size, limit, row, length in zip(sizes, limits, rollout.tokens, rollout.length.tolist())
    ]
    assert rollout.truncated.any()


def test_no_prompts_give_a_rollout_without_rows(vllm):
    assert vllm.generate([], [], n=2, sampling=SAMPLED).tokens.shape == (0, 0)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (
            [[3, 4], [5] * 119],
            {},
            r"prompt \+ max_new <= the model's window of 128 tokens, got 119 \+ 10 in prompt 1",
        ),
        ([[3], []], {}, "expected at least one token, got none in prompt 1"),
        ([[3], [99]], {}, "expected tokens below 48, got 99 in prompt 1"),
        (
            [[3], [4]],
            {"sampling": rft.Sampling(temperature=3.0, max_new=4)},
            "temperature: expected at most 2.0 for vllm, got 3.0",
        ),
        (
            [[3], [4]],
            {"temperature": [1.0, 2.5]},
            "temperature: expected at most 2.0 for vllm, got 2.5",
        ),
        ([[3], [4]], {"start": [0, 2]}, r"start\[1\]: expected 0 for vllm"),
    ],
)
def test_a_bad_request_is_named_and_the_engine_lives(vllm, prompts, options, message):
    with pytest.raises(engine.BadRequest, match=message):
        vllm.generate(prompts, [0, 1], **{"sampling": SAMPLED} | options)
    assert len(vllm.generate([[3, 4]], [0], sampling=SAMPLED).tokens) == 1


def test_it_says_what_it_is(vllm):
    status = vllm.status()
    vllm.sleep()  # vLLM has no sleep on a CPU
    assert status == vllm.status() and not status["asleep"]
    assert status["engine"] == "vllm" and status["supported"] == {"load", "score"}


def test_an_update_of_the_embedding_alone_arrives_in_the_tied_head(vllm):
    lm = trained(0.3, only="embed_tokens")
    sent = dict(lm.named_parameters())
    delivered = vllm.load(sent.items(), version=7)
    assert "lm_head.weight" not in sent and delivered.tensors == len(sent) and delivered.version == 7
    rollout = vllm.generate(prompts_of(8), range(8), n=4, sampling=SAMPLED)
    assert gap(lm, rollout, SAMPLED) < 1e-4
    assert gap(model.load(NAME), rollout, SAMPLED) > 1e-2  # the old weights are others
    assert rollout.version.tolist() == [7] * 32


@pytest.mark.parametrize("forgotten", [False, True])
def test_the_cache_of_the_old_weights_is_emptied(vllm, forgotten, monkeypatch):
    prompt = prompts_of(3)[2]
    vllm.generate([prompt], [0], n=4, sampling=SAMPLED)
    lm = trained(0.3)
    if forgotten:
        monkeypatch.setattr(inside(vllm).llm, "reset_prefix_cache", lambda: True)
    vllm.load(lm.named_parameters(), version=1)
    found = gap(lm, vllm.generate([prompt], [0], n=4, sampling=SAMPLED), SAMPLED)
    assert (found > 1e-3) == forgotten and (found < 1e-4) != forgotten


def test_a_push_from_a_strategy_arrives(vllm):
    st = rft.strategy.get_fake_strategy()
    _, state = st.init(trained(0.1), rft.optim.adamw(1e-3))
    delivered = rft.sync.push(st, state, vllm, version=3)
    assert delivered.version == 3
    assert gap(trained(0.1), vllm.generate(prompts_of(4), range(4), n=4, sampling=SAMPLED), SAMPLED) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 2}, "engine_tp_size: expected a divisor of the 1 processes of this run, got 2"),
        ({"dtype": "int8"}, "engine_dtype: expected one of auto, float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_a_mistake_in_the_config_comes_before_any_model(options, message):
    with pytest.raises(ValueError, match=message):
        engine.get_engine(engine.EngineConfig(type="vllm", **options), "./nowhere")
