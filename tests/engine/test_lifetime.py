"""An engine that failed or was closed stays so; a refused request leaves it alive."""

from types import SimpleNamespace

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import engine

PROMPTS, KEYS, SAMPLING = [[3, 4, 5], [6, 7]], [1, 2], rft.Sampling(max_new=3)


class Broken(Exception):
    """Raised by a model."""


def made(lm=None):
    return engine.hf(lm or tiny.llama(), tiny.tokenizer())


def every_call(eng):
    """All calls that ask something of an engine."""
    rollout = made().generate(PROMPTS, KEYS, n=1, sampling=SAMPLING)
    yield lambda: eng.generate(PROMPTS, KEYS, n=1, sampling=SAMPLING)
    yield lambda: eng.load(tiny.llama().named_parameters(), version=2)
    yield lambda: eng.score(rollout, sampling=SAMPLING)
    yield eng.wake
    yield eng.sleep


def test_a_failed_generate_is_the_last_one(monkeypatch):
    lm = tiny.llama()
    eng = made(lm)
    eng.generate(PROMPTS, KEYS, sampling=SAMPLING)

    def fails(*_, **__):
        raise Broken("out\nof order")

    with monkeypatch.context() as patch:
        patch.setattr(lm, "forward", fails)
        with pytest.raises(Broken):
            eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
    assert not eng.status()["alive"]
    line = r"^engine hf: expected one that is alive, got one that failed in generate \(Broken: out of order\)"
    for call in every_call(eng):
        with pytest.raises(engine.EngineDead, match=line):
            call()
    eng.close()
    eng.close()
    assert not eng.status()["alive"]


def test_half_a_load_is_never_sampled_from():
    """Some of the weights are new and the version is old: no rollout may come of that."""
    eng = made()

    def breaks_off():
        yield next(tiny.llama(5).named_parameters())
        raise ValueError("weights: x: got NaN")

    with pytest.raises(ValueError, match="got NaN"):
        eng.load(breaks_off(), version=1)
    for call in every_call(eng):
        with pytest.raises(engine.EngineDead, match=r"failed in load \(ValueError: weights: x: got NaN\)"):
            call()
    assert eng.status()["version"] == 0


def test_a_refused_request_leaves_the_engine_alive():
    eng = made()
    for prompts, sampling in (([[]], SAMPLING), ([[3]], rft.Sampling(max_new=1000)), ([["12"]], SAMPLING)):
        with pytest.raises(engine.BadRequest, match=r"^prompts: expected"):
            eng.generate(prompts, [1], sampling=sampling)
    assert eng.status()["alive"]
    assert eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING).tokens.shape[0] == 4


def test_a_closed_engine_says_so_and_holds_no_weights():
    import gc
    import weakref

    lm = tiny.llama()
    weight = weakref.ref(lm.lm_head.weight)
    eng = made(lm)
    eng.load(tiny.llama(5).named_parameters(), version=4)
    eng.close()
    for call in every_call(eng):
        with pytest.raises(
            engine.EngineDead, match=r"got one that was closed; build another with get_engine$"
        ):
            call()
    status = eng.status()
    assert not status["alive"] and status["version"] == 4
    del lm
    gc.collect()
    assert weight() is None


def test_the_status_says_what_is_supported():
    status = made().status()
    assert status["engine"] == "hf" and status["alive"] and not status["asleep"]
    assert status["supported"] == {"load", "score", "sleep", "start"}
    awake = engine.hf(tiny.llama(), tiny.tokenizer(), sleep=False)
    assert awake.status()["supported"] == {"load", "score", "start"}


def test_scores_are_of_the_plain_softmax_unless_asked_otherwise():
    eng = made()
    rollout = eng.generate(PROMPTS, KEYS, n=2, sampling=rft.Sampling(max_new=5, temperature=0.5))
    plain = eng.score(rollout)
    assert torch.equal(plain, eng.score(rollout, sampling=rft.Sampling()))
    assert (plain - rollout.logp).abs().max() > 0.1


def test_only_models_of_transformers_are_taken():
    with pytest.raises(ValueError, match="model: expected one of transformers, got Linear"):
        made(torch.nn.Linear(2, 2))


class Sampler:
    generate = score = load = sleep = wake = status = staticmethod(lambda: "sampled")
    weights = "no field of an engine"


def test_a_record_is_filled_with_the_attributes_that_have_its_fields_names():
    sampler = Sampler()
    sampler.close = close = object()
    engine = rft.types.record(rft.Engine, sampler)
    assert type(engine) is rft.Engine
    assert engine.generate() == "sampled"
    assert engine.close is close


def test_a_field_that_an_object_lacks_has_its_default():
    assert rft.types.record(rft.Engine, Sampler()).close() is None


def test_a_record_names_a_field_that_is_missing_and_has_no_default():
    with pytest.raises(TypeError, match="'score', 'load'"):
        rft.types.record(rft.Engine, SimpleNamespace(generate=print))
