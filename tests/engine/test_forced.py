"""Servers score by the distribution that was sampled from, where they can be made to give the tokens."""

import math

import pytest
import tiny
import torch
from fake_server import FakeServer, serving

import rft_fn as rft
from rft_fn import engine, rng, tree

PROMPTS, KEYS = [[3, 4, 5, 6], [7, 8]], [rng.fold_in(0, i) for i in range(2)]


def made(fake):
    config = engine.EngineConfig(type="openai", servers=(fake.url,), timeout=60)
    return engine.get_engine(config, tiny.llama(), tiny.tokenizer())


def fake(**options):
    return FakeServer(tiny.llama(), tiny.tokenizer(), **options)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7, "stop": ("1",)}, {"top_p": 0.6}, {"top_k": 3, "temperature": 1.5}]
)
def test_scores_are_of_the_distribution(options):
    sampling = rft.Sampling(max_new=8, **options)
    local = engine.hf(tiny.llama(), tiny.tokenizer())
    rollout = local.generate(PROMPTS, KEYS, n=2, sampling=sampling)
    rollout = tree.replace(rollout, mask=rollout.mask & (torch.arange(rollout.mask.shape[1]) != 5))
    want = local.score(rollout, sampling=sampling)
    with serving(fake(forces=True)) as [server]:
        eng = made(server)
        assert (eng.score(rollout, sampling=sampling) - want).abs().max() < 1e-5
        warm = tree.replace(rollout, temperature=torch.tensor([0.5, 1.0, 1.5, 2.0]))
        warm_want = local.score(warm, sampling=sampling)
        inside = eng.score(warm, sampling=sampling)
        known = inside.isfinite()  # a word that another temperature cuts has none
        assert (inside - warm_want)[known].abs().max() < 1e-5 and known[rollout.mask].float().mean() > 0.5
        if "top_p" in options:
            rare = tree.replace(rollout, tokens=torch.where(rollout.mask, 47, rollout.tokens))
            assert eng.score(rare, sampling=sampling).min() == -math.inf


@pytest.mark.parametrize("options", [{}, {"ignores": ("trace",)}, {"routes": ("dev",)}])
def test_servers_that_cannot_are_told_apart_by_what_they_answer(options):
    """One that refuses, one that skips the field and gives other tokens, one without the route."""
    sampling = rft.Sampling(max_new=4, temperature=0.7)
    with serving(fake(**options)) as [server]:
        eng = made(server)
        rollout = eng.generate(PROMPTS, KEYS, sampling=sampling)
        with pytest.raises(engine.BadRequest, match=r"^sampling: expected temperature 1, .* by the trainer"):
            eng.score(rollout, sampling=sampling)
