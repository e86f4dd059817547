"""Weights that do not arrive, and steps that do not end: named, and survived by building another engine."""

import time

import pytest
import torch
from inprocess import NAME, build, gap, inside, needs_vllm, prompts_of, tokenizer, trained

import rft_fn as rft
from rft_fn import engine, model

pytestmark = needs_vllm
SAMPLING = rft.Sampling(max_new=8)
UPDATE = 1e-4  # relative to the weights: a step of a large model
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


class Broken(Exception):
    """Raised by a source of weights."""


def without(name):
    return lambda pairs: (x for x in pairs if x[0] != name)


def changed(name, f):
    return lambda pairs: ((key, f(x) if key == name else x) for key, x in pairs)


def twice(pairs):
    for name, x in pairs:
        yield name, x
        if name == NORM:
            yield name, x


def dies(pairs):
    for i, pair in enumerate(pairs):
        if i == 9:
            raise Broken("the link is down")
        yield pair


def stray(pairs):
    return [("model.extra", torch.ones(1)), *pairs]


def spoiled(x):
    x = x.clone()
    x[3] = float("nan")
    return x


FAULTS = {
    "a norm is dropped": (without(NORM), ValueError, NORM),
    "q of a fused qkv is dropped": (without(Q), ValueError, Q),
    "a wrong shape": (
        changed(Q, lambda x: x[:-1]),
        ValueError,
        rf"{Q}: expected \[128, 128\], got \[127, 128\]",
    ),
    "sent twice": (twice, ValueError, f"{NORM}: expected it once"),
    "NaN": (changed(NORM, spoiled), ValueError, f"{NORM}: expected finite numbers"),
    "an unknown name": (stray, ValueError, "model.extra: expected a parameter of the model"),
    "a source that dies half way": (dies, Broken, "the link is down"),
}


def require_sound(eng, lm, version):
    rollout = eng.generate(prompts_of(4), range(4), n=4, sampling=SAMPLING)
    assert gap(lm, rollout) < 1e-5
    assert rollout.version.tolist() == [version] * 16


@pytest.fixture(scope="module")
def engines():
    """The engine that is alive: another one where a test has left a dead one behind."""
    held = [build()]

    def alive():
        if not held[0].status()["alive"]:
            held[0].close()
            held[0] = build()
        lm = model.load(NAME)
        held[0].load(lm.named_parameters(), version=1)
        require_sound(held[0], lm, 1)
        return held[0]

    yield alive
    held[0].close()


def require_dead(eng):
    assert not eng.status()["alive"]
    with pytest.raises(engine.EngineDead, match="build another"):
        eng.generate([[3]], [0], sampling=SAMPLING)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_sync_is_named_and_another_engine_goes_on(engines, fault):
    wrong, error, message = FAULTS[fault]
    eng = engines()
    lm = trained(UPDATE)
    with pytest.raises(error, match=message):
        eng.load(wrong(lm.named_parameters()), version=2)
    require_dead(eng)

    again = engines()
    again.load(lm.named_parameters(), version=2)
    require_sound(again, lm, 2)


@pytest.mark.parametrize("dropped", ["q_proj", "down_proj", "norm.weight", "lm_head"])
def test_a_tensor_that_vllm_leaves_out_in_silence_is_found_by_the_count_of_its_layer(
    engines, dropped, monkeypatch
):
    eng = engines()
    language_model = inside(eng).llm.llm_engine.model_executor.driver_worker.get_model()
    whole = language_model.load_weights
    lost = []

    def partly(pairs):
        kept = []
        for name, x in pairs:
            if dropped in name and not lost:
                lost.append(name)
            else:
                kept.append((name, x))
        return whole(iter(kept))

    monkeypatch.setattr(language_model, "load_weights", partly)
    layer = {"q_proj": "qkv_proj: expected 49152 elements .* got 32768", "norm.weight": "layernorm"}
    with pytest.raises(ValueError, match=layer.get(dropped, dropped)):
        eng.load(trained(UPDATE).named_parameters(), version=2)
    assert lost
    require_dead(eng)


def test_steps_that_never_answer_end_at_the_deadline(monkeypatch):
    eng = build(timeout=1)
    try:
        monkeypatch.setattr(inside(eng).sampler.engine, "step", lambda: time.sleep(0.01) or [])
        began = time.monotonic()
        with pytest.raises(
            TimeoutError, match=r"expected 1 responses within 1 s, got 0; raise engine_timeout"
        ):
            eng.generate([[3, 4]], [0], sampling=SAMPLING)
        assert time.monotonic() - began < 5
        require_dead(eng)
    finally:
        eng.close()


def test_an_error_inside_a_step_is_the_end_of_the_engine(engines, monkeypatch):
    eng = engines()

    def fails(*_, **__):
        raise Broken("out of order")

    monkeypatch.setattr(inside(eng).sampler.engine.engine_core, "get_output", fails)
    with pytest.raises(Broken):
        eng.generate([[3, 4]], [0], sampling=SAMPLING)
    require_dead(eng)
    monkeypatch.undo()
    require_sound(engines(), model.load(NAME), 1)


def test_adapters_arrive_merged_and_frozen_weights_come_from_the_files(engines):
    """The q of a fused qkv is trained, k and v are not sent: the layer needs all three."""
    engines().close()  # one at a time
    module = model.apply_lora_configuration(model.load(NAME), 4, 8, target_modules=["q_proj"])
    eng = build(module)
    try:
        st = rft.strategy.get_fake_strategy()
        with torch.no_grad():
            for name, p in module.named_parameters():
                if "lora_" in name:
                    p.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
        _, state = st.init(module, rft.optim.adamw(1e-3))
        for version in (1, 2):
            export = st.export(state)
            assert "model.layers.0.self_attn.k_proj.weight" in export.frozen
            eng.load(export, version=version)
        merged = model.load(NAME)
        merged.load_state_dict(dict(st.export(state)), strict=False)
        rollout = eng.generate(prompts_of(4), range(4), n=4, sampling=SAMPLING)
        assert gap(merged, rollout) < 1e-5 < 1e-3 < gap(model.load(NAME), rollout)
    finally:
        eng.close()


def test_a_closed_engine_leaves_room_for_another(engines):
    eng = engines()
    eng.close()
    eng.close()
    assert not torch.distributed.is_initialized()
    assert not eng.status()["alive"] and tokenizer()
    require_sound(engines(), model.load(NAME), 1)
