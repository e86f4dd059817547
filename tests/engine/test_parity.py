"""Trainer and sampler on a real language model: its tokenizer, chat template, tied weights, 49,152 words."""

import pytest
import torch

import rft_fn as rft
from rft_fn import data, engine, model, packing, weight

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]
QUESTIONS = [
    "What is 2 + 2?",
    "What is the capital of France?",
    "Name a colour.",
    "Say yes or no: is water wet?",
]


@pytest.fixture(scope="module")
def name():
    try:
        return model.resolve("smollm2-135m")
    except ValueError as error:
        pytest.skip(f"SmolLM2 could not be fetched: {error}")


@pytest.fixture(scope="module")
def sampled(name):
    """(rollout, sampling, texts) at a temperature that is not 1, prompts of different lengths."""
    tokenizer = model.load_tokenizer(name)
    eng = engine.get_engine(engine.EngineConfig(batch=8), name, tokenizer)
    prompts = [data.Prompt(data.render(tokenizer, q), q, {}, i) for i, q in enumerate(QUESTIONS)]
    sampling = rft.Sampling(temperature=0.7, max_new=12)
    rollout = eng.generate(prompts, [7, 8, 9, 10], n=2, sampling=sampling)
    greedy = eng.generate(prompts[:2], [0, 0], n=1, sampling=rft.Sampling(temperature=0, max_new=12))
    return rollout, sampling, rft.reward.responses(greedy, tokenizer)


def test_it_answers_as_a_language_model(sampled):
    """Wrong rotary layout, template or tokenizer would give words, not answers."""
    four, paris = sampled[2]
    assert "4" in four and "Paris" in paris


def test_trainer_and_sampler_agree_to_1e_4(name, sampled):
    rollout, sampling, _ = sampled
    exp = rft.experience(rollout, adv=torch.zeros(8), w=weight.token_mean(rollout.mask))
    packs = packing.shard(exp, 128)[0]
    apply, params = model.bind(model.load(name), sampling=sampling)
    scored = packing.unpack(model.score(apply, params, packs), packs, exp.w)
    assert len(packs) > 1 and rollout.mask.sum() > 40
    assert (scored - rollout.logp).abs().max() < 1e-4
    assert rollout.logp.min() < -1  # there is something to agree about


def test_a_sample_does_not_depend_on_its_company(name):
    """32 rows at once and 4 at a time: 768 tokens of a vocabulary of 49,152 words, at temperature 1."""
    tokenizer = model.load_tokenizer(name)
    prompts = [data.Prompt(data.render(tokenizer, q), q, {}, i) for i, q in enumerate(QUESTIONS)]
    sampling = rft.Sampling(max_new=24)
    found = []
    for batch in (32, 4):
        eng = engine.get_engine(engine.EngineConfig(batch=batch), name, tokenizer)
        found.append(eng.generate(prompts, [7, 8, 9, 10], n=8, sampling=sampling))
    together, apart = found
    assert together.tokens.equal(apart.tokens)
    torch.testing.assert_close(together.logp, apart.logp, rtol=0, atol=1e-3)
