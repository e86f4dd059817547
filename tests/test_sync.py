"""A weight sync: the engine samples from the trained weights, and whatever got lost on the way is seen."""

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import engine, optim, sync
from rft_fn.types.engine import Delivered


def trained(seed=5):
    """(strategy, the state of a model that is not the engine's)."""
    st = rft.strategy.get_fake_strategy()
    _, state = st.init(tiny.llama(seed), optim.adamw(0.1))
    return st, state


def test_an_engine_samples_from_what_was_pushed():
    st, state = trained()
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    delivered = sync.push(st, state, eng, version=9)
    params = dict(tiny.llama(5).named_parameters())
    assert delivered[:2] == (len(params), 4 * sum(p.numel() for p in params.values()))
    assert delivered.version == eng.status()["version"] == 9
    sampling = rft.Sampling(max_new=6)
    got = eng.generate([[3, 4]], [7], n=4, sampling=sampling)
    want = engine.hf(tiny.llama(5), tiny.tokenizer()).generate([[3, 4]], [7], n=4, sampling=sampling)
    assert torch.equal(got.tokens, want.tokens) and set(got.version.tolist()) == {9}


class Taking:
    """The load of an engine that reports what it is told to report."""

    def __init__(self, change):
        self.change = change

    def load(self, weights, *, version):
        found = list(weights)
        size = sum(x.numel() * x.element_size() for _, x in found)
        return self.change(Delivered(len(found), size, 0.1, version))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d._replace(tensors=d.tensors - 1),
            r"sync: expected the engine to take \d+ tensors .* got \d+",
        ),
        (
            lambda d: d._replace(bytes=d.bytes // 2),
            r"sync: expected the engine to take \d+ tensors .* got \d+",
        ),
        (lambda d: d._replace(version=2), "sync: expected the engine to be at version 3, got 2"),
    ],
)
def test_an_engine_that_took_less_than_was_sent_is_refused(change, message):
    st, state = trained()
    with pytest.raises(ValueError, match=message):
        sync.push(st, state, Taking(change), version=3)


def test_a_weight_is_sent_once():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="weights: a: expected each name once, got it twice"):
        list(sync.Shipment([("a", x), ("a", x)]))


def test_what_is_frozen_is_known_to_the_engine():
    """The count does not hide which weights the trainer leaves out."""
    lm = tiny.llama()
    for name, p in lm.named_parameters():
        p.requires_grad_("mlp" in name)
    st = rft.strategy.get_fake_strategy()
    _, state = st.init(lm, optim.adamw(0.1))
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    assert sync.push(st, state, eng, version=1).tensors == len(state.params) < len(list(lm.parameters()))
