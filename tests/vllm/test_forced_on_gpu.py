"""Scores of a vLLM server on a GPU by forced decode, against those of the same weights by transformers."""

import pytest
import torch
from inprocess import needs_vllm
from serving import Server

import rft_fn as rft
from rft_fn import engine, model, rng

PROMPTS, KEYS = [[3, 4, 5, 6], [7, 8], [9]], [rng.fold_in(0, i) for i in range(3)]


@needs_vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's model runner V2 needs a GPU")
def test_cuda_scores_are_those_of_the_sample_and_of_transformers(tmp_path):
    server = Server(tmp_path / "log", more=["--enable-trace-replay"])
    try:
        server.wait()
        config = engine.EngineConfig(type="openai", servers=(server.url,))
        eng = engine.get_engine(config, "tiny", model.load_tokenizer("tiny"))
        local = engine.hf(model.load("tiny"), model.load_tokenizer("tiny"))
        for options in ({"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5}):
            sampling = rft.Sampling(max_new=64, **options)
            rollout = eng.generate(PROMPTS, KEYS, n=8, sampling=sampling)
            score = eng.score(rollout, sampling=sampling)
            known = score.isfinite()  # rounding may cut a word at the edge of a nucleus
            assert known.float().mean() > 0.999
            assert (score - rollout.logp)[known].abs().max() < 1e-3
            want = local.score(rollout, sampling=sampling)
            assert (score - want)[known].abs().mean() < 1e-4
    finally:
        server.kill()
