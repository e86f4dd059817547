"""Adapters that come alone to vLLM: in this process, and to a server on the CPU."""

import re

import pytest
import torch
from inprocess import NAME, build, gap, inside, needs_vllm, tokenizer
from serving import Server

import rft_fn as rft
from rft_fn import engine, model, rng, sync
from rft_fn.engine.pool import ServersFailed

pytest.importorskip("peft")
pytestmark = needs_vllm

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], list(range(3, 43))]  # the last fills a block of the cache
KEYS = [rng.fold_in(0, i) for i in range(3)]
SAMPLING = rft.Sampling(max_new=8)
NOISE = 1e-5  # of log-probs in float32, ten times what was measured


def trainer(rank=4):
    """(strategy, state) of the embedded default with adapters."""
    st = rft.strategy.get_strategy()
    module = model.apply_lora_configuration(model.load(NAME), rank, 16)
    return st, st.init(module, rft.optim.adamw(1e-2))[1]


def shake(state, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in state.params.items():
            if ".lora_B" in name:
                p.add_(0.02 * torch.randn(p.shape, generator=g))


def merged(st, state):
    """The plain model with the adapters in its weights."""
    lm = model.load(NAME)
    with torch.no_grad():
        for name, x in st.export(state):
            lm.get_parameter(name).copy_(x)
    return lm


def follows(eng, count=2):
    """Push versions of adapters; an engine samples and scores by the newest, and by the cache of no other."""
    st, state = trainer()
    for version in range(count):
        delivered = sync.push(st, state, eng, version=version)
        assert delivered[:2] == (28, sum(4 * p.numel() for p in state.params.values()))
        lm = merged(st, state)
        for _ in range(2):  # the second time out of the prefix cache
            rollout = eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING)
            assert gap(lm, rollout) < NOISE and set(rollout.version.tolist()) == {version}
            assert (eng.score(rollout) - rollout.logp).abs().max() < NOISE
        assert version == 0 or gap(model.load(NAME), rollout) > 1e-3
        shake(state, version)
    probe = sync.canary(st, state, eng, NAME, PROMPTS[:2], version=count)
    assert probe.noisy < NOISE and probe.floor < NOISE
    return st, state


def test_the_engine_of_this_process_samples_from_adapters_beside_its_base():
    eng = build(adapters="alone", lora_rank=4)
    try:
        core = inside(eng)
        st, state = follows(eng)
        assert eng.status()["adapters"] and core.llm.llm_engine.list_loras() == {core.adapters.count}

        # an adapter that vLLM has not got, and one whose layer it has no place for
        add = core.llm.llm_engine.add_lora
        core.llm.llm_engine.add_lora = lambda request: None
        core.sampler.adapter = None
        scores = core.sampler.scores
        core.sampler.scores = lambda rows, adapter: scores(rows, None)
        load = core.adapters.load
        core.adapters.load = lambda llm, tensors: type("Request", (), {"lora_name": "rft-x"})
        with pytest.raises(ValueError, match=r"^weights: version 9: expected adapters rft-x to"):
            core.load(rft.model.lora_alone.AdaptersAlone(st.export(state)), version=9)
        core.llm.llm_engine.add_lora, core.sampler.scores, core.adapters.load = add, scores, load

        # whole weights end it
        eng.load(st.export(state), version=10)
        assert gap(merged(st, state), eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING)) < NOISE
        assert not eng.status()["adapters"] and not core.llm.llm_engine.list_loras()
    finally:
        eng.close()


def test_a_server_samples_from_adapters_that_it_is_told_to_load(tmp_path):
    server = Server(tmp_path / "log", rank=8)
    try:
        server.wait()

        def made(**options):
            config = engine.EngineConfig(
                type="openai", servers=(server.url,), timeout=60.0, batch=16, **options
            )
            return engine.get_engine(config, NAME, tokenizer())

        eng = made(lora_rank=4)  # by itself: the server tells that it has room
        (known,) = inside(eng).known.values()
        assert known.room == (8, 2, "") and eng.status()["adapters"]
        st, state = follows(eng)
        with pytest.raises(ValueError, match=r"room for adapters of rank 16, got 8 \(--max-lora-rank\)"):
            made(lora_rank=16, adapters="alone")

        # a rank that the engine was not told of is refused when it comes
        with pytest.raises(
            ServersFailed, match=re.escape(server.url) + r": weights: expected .* rank 8 at most"
        ):
            sync.push(*trainer(16), eng, version=8)

        # whole weights of the same run, over the channel: no adapter is on them
        whole = made(adapters="merged")
        sync.push(st, state, whole, version=9)
        assert gap(merged(st, state), whole.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING)) < NOISE
        with pytest.raises(ValueError, match="expected the base model's own weights below the adapters"):
            made(lora_rank=4, adapters="alone")
    finally:
        server.kill()
