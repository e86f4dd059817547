"""An engine that is built when it is first used."""

import pytest
import torch

import rft_fn as rft
from rft_fn.engine.lifetime import deferred
from rft_fn.types import Sampling


def test_it_is_built_once_and_then_is_the_engine():
    tokenizer = rft.model.load_tokenizer("tiny")
    whole = rft.engine.get_engine(None, "tiny", tokenizer)
    built = []

    def build():
        built.append(1)
        return whole

    engine = deferred(build)
    engine.sleep()
    engine.close()
    assert engine.status()["asleep"] and engine.status()["alive"] and not built
    how = {"n": 2, "sampling": Sampling(max_new=4)}
    found = engine.generate(["sort:31="], [7], **how)
    assert torch.equal(found.tokens, whole.generate(["sort:31="], [7], **how).tokens)
    assert torch.equal(engine.score(found), whole.score(found))
    engine.wake()
    assert built == [1] and engine.status() == whole.status()


def test_an_engine_that_cannot_be_built_is_tried_again():
    def build():
        raise ValueError("model: expected a folder")

    engine = deferred(build)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected a folder"):
            engine.wake()
    assert engine.status()["alive"]
