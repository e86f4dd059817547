"""The functions about a run's engine, on the engine of transformers."""

import pytest
import torch

import rft_fn as rft
from rft_fn import collect, engine, model

SAMPLING = rft.Sampling(temperature=0, max_new=4)


@pytest.fixture
def trained():
    """(strategy, state) of weights that are not those of the embedded default."""
    st = rft.strategy.get_fake_strategy()
    lm = model.load("tiny")
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(1.3)
    _, state = st.init(lm, rft.optim.adamw(1e-3))
    return st, state


def sampled(eng):
    return eng.generate([[5, 6, 7]], [0], sampling=SAMPLING).logp


def test_an_engine_begins_with_the_trained_weights_and_asleep(trained):
    st, state = trained
    eng = collect.setup_inference_engine(st, "tiny", state=state, version=4)
    assert collect.inference_engine_status(eng) == "asleep" and eng.status()["version"] == 4
    collect.wakeup_inference_engine(eng)
    assert collect.inference_engine_status(eng) == "awake"
    plain = collect.setup_inference_engine(st, "tiny")
    assert (sampled(eng) - sampled(plain)).abs().max() > 1e-3

    delivered = collect.update_engine_weights(st, state, plain, version=9)
    assert delivered.version == 9 and torch.equal(sampled(eng), sampled(plain))
    assert collect.sleep_inference_engine(plain)


def test_an_engine_without_its_weights_is_dead(trained):
    st, state = trained
    broken = st._replace(export=lambda _: iter([("model.norm.weight", torch.ones(3))]))
    with pytest.raises(ValueError, match=r"model.norm.weight: expected \[128\]"):
        collect.setup_inference_engine(broken, "tiny", state=state)
    eng = collect.setup_inference_engine(st, "tiny")
    with pytest.raises(ValueError, match=r"model.norm.weight"):
        collect.update_engine_weights(broken, state, eng, version=1)
    assert collect.inference_engine_status(eng) == "dead"
    with pytest.raises(engine.EngineDead):
        sampled(eng)


def test_an_engine_that_cannot_sleep_stays_awake():
    st = rft.strategy.get_strategy(rft.strategy.StrategyConfig(enable_engine_sleep=False))
    eng = collect.setup_inference_engine(st, "tiny")
    assert not collect.sleep_inference_engine(eng)
    assert collect.inference_engine_status(eng) == "awake" and "sleep" not in eng.status()["supported"]
