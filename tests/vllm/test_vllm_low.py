"""Adapters that come alone to vLLM, on a base in int8 as the trainer's: in this process, and to a server.

torchao must be there before transformers looks for it, so `make test-vllm` runs this file by itself.
"""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
from inprocess import NAME, build, gap, inside, needs_vllm, tokenizer
from serving import Server
from test_vllm_adapters import KEYS, NOISE, PROMPTS, SAMPLING, shake

import rft_fn as rft
from rft_fn import engine, model, sync
from rft_fn.model import quantize

pytest.importorskip("peft")
pytestmark = [needs_vllm, pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")]


def trainer(rank=4, kind="int8"):
    """(strategy, state) of the embedded default in int8 with adapters."""
    st = rft.strategy.get_strategy()
    module = model.apply_lora_configuration(model.load(NAME, quantize=kind), rank, 16)
    return st, st.init(module, rft.optim.adamw(1e-2))[1]


def follows(eng):
    """Push two versions; samples are of the trainer's own base, and not of one in full precision."""
    assert eng.status()["adapters"] and eng.status()["base"] == "int8"
    st, state = trainer()
    for version in range(2):
        size = sum(4 * p.numel() for p in state.params.values())
        assert sync.push(st, state, eng, version=version)[:2] == (28, size)
        rollout = eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING)
        assert gap(state.module, rollout) < NOISE and set(rollout.version.tolist()) == {version}
        assert (eng.score(rollout) - rollout.logp).abs().max() < NOISE
        assert version or gap(model.load(NAME), rollout) > 1e-4  # the base shows
        shake(state, version)
    probe = sync.canary(st, state, eng, NAME, PROMPTS[:2], version=2)
    assert probe.noisy < NOISE and probe.floor < NOISE
    with pytest.raises(ValueError, match="expected adapters alone for an engine with a base in int8, got a"):
        sync.push(*trainer(kind="none"), eng, version=3)
    whole = [(name, x) for name, x in st.export(state)]
    with pytest.raises(ValueError, match="expected adapters alone on a base in int8, got whole weights"):
        eng.load(whole, version=3)


def test_the_engine_of_this_process_holds_its_base_in_int8():
    eng = build(adapters="alone", lora_rank=4, base="int8")
    try:
        (layers,) = inside(eng).llm.collective_rpc(
            lambda worker: [type(p).__name__ for p in worker.get_model().parameters() if quantize.is_low(p)]
        )
        assert len(layers) == 8  # qkv, o, gate and up, down of two layers
        follows(eng)
    finally:
        eng.close()


def test_a_server_is_asked_whether_its_base_is_in_int8(tmp_path):
    config = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}  # as docs/engines.md has it
    overrides = json.dumps({"quantization_config_dict_json": json.dumps(config)})
    low = Server(tmp_path / "low", rank=8, more=["--quantization", "torchao", "--hf-overrides", overrides])
    full = Server(tmp_path / "full", rank=8)
    try:
        low.wait()
        full.wait()

        def made(server, **options):
            config = engine.EngineConfig(
                type="openai", servers=(server.url,), timeout=60.0, batch=16, adapters="alone", lora_rank=4
            )
            return engine.get_engine(replace(config, **options), NAME, tokenizer())

        with pytest.raises(ValueError, match=r"a base in int8 \(--quantization torchao, .*, got full preci"):
            made(full, base="int8")
        follows(made(low, base="int8"))
    finally:
        low.kill()
        full.kill()
