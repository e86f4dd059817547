"""An engine that failed or was closed stays so; a refused request leaves it alive."""

from types import SimpleNamespace

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import engine
from rft_fn.engine import lifetime

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
        with pytest.raises(engine.EngineDead, match=r"got one that was closed; .* get_engine$"):
            call()
    status = eng.status()
    assert not status["alive"] and status["version"] == 4
    del lm
    gc.collect()
    assert weight() is None


def test_an_engine_is_supervised_once_and_keeps_its_limits():
    """What another wrapper would do, the supervision that an engine has can do."""
    inner = lifetime.supervised(made, timeout=300.0, loads_together=True)
    outer = lifetime.Supervised(lambda: inner, rebuilds=again(1))
    assert type(outer.core).__name__ == "_InProcess" and (outer.timeout, outer.loads_together) == (
        300.0,
        True,
    )
    own = lifetime.Supervised(lambda: inner, timeout=9.0)
    assert own.timeout == 9.0 and own.core is outer.core

    # neither one whose function was replaced, nor one that is dead, is looked into
    calls = []
    noted = inner._replace(generate=lambda *args, **how: calls.append(0) or inner.generate(*args, **how))
    lifetime.supervised(lambda: noted).generate(PROMPTS, KEYS, sampling=SAMPLING)
    assert calls == [0]
    inner.close()
    with pytest.raises(engine.EngineDead, match="got one that was closed"):
        lifetime.supervised(lambda: inner).generate(PROMPTS, KEYS, sampling=SAMPLING)


def again(most, on_any_rank=bool, restore=lambda: None):
    """Rebuilds of one process."""
    return lifetime.Rebuilds(most, restore, on_any_rank, lambda line: None)


def test_a_call_is_repeated_by_engines_that_are_built_again_and_ends_where_none_lives(monkeypatch):
    """The new one is restored first; a death while it is restored costs another."""
    dies = {"generate": {1, 3}, "restore": {1}}
    done = {"generate": 0, "restore": 0, "built": 0}

    def step(name):
        done[name] += 1
        if done[name] in dies[name]:
            raise Broken(f"{name} {done[name]}")

    def build():
        done["built"] += 1
        inner = made()
        return engine.dead_after_failure(
            inner._replace(
                generate=lambda *args, **how: step("generate") or inner.generate(*args, **how),
                load=lambda weights, version: step("restore"),
            )
        )

    def restore():
        eng.load([], version=0)

    eng = lifetime.Supervised(build, rebuilds=again(3, restore=restore)).engine()
    want = made().generate(PROMPTS, KEYS, sampling=SAMPLING)
    got = eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
    assert torch.equal(got.tokens, want.tokens) and done == {"generate": 2, "restore": 2, "built": 3}
    with pytest.raises(engine.BadRequest):
        eng.generate([[]], [1], sampling=SAMPLING)
    dies["generate"] = set(range(99))
    line = r"^engine hf: expected one that stays alive, got one that died again in generate "
    line += r"\(Broken: generate 5\)"
    for _ in range(2):
        with pytest.raises(engine.EngineDead, match=line):
            eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
        eng.wake()
        eng.sleep()
    assert done["built"] == 4 and not eng.status()["alive"]


def test_a_rank_repeats_a_call_that_the_engine_of_another_died_of():
    others = [True, False, False, False]  # an engine of another rank: failed, not built, failed, failed
    restored = []
    eng = lifetime.Supervised(
        made, rebuilds=again(2, lambda x: x or others.pop(0), lambda: restored.append(0))
    )
    first = eng.core
    eng.generate(PROMPTS, KEYS, sampling=SAMPLING)
    assert restored == [0] and not others and eng.left == 1
    assert eng.core is first  # it was alive


def test_the_status_says_what_is_supported():
    status = made().status()
    assert status["engine"] == "hf" and status["alive"] and not status["asleep"]
    assert status["supported"] == {"load", "rows", "score", "sleep", "start"}
    awake = engine.hf(tiny.llama(), tiny.tokenizer(), sleep=False)
    assert awake.status()["supported"] == {"load", "rows", "score", "start"}


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
