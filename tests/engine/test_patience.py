"""Servers that are busy, or not ready yet: teachers and engines wait as rewards do."""

import time

import pytest
import torch
from fake_server import FakeServer, serving

from rft_fn import Rollout, Sampling, model, patience
from rft_fn.engine import EngineConfig, EngineDead, get_engine
from rft_fn.engine.served_words import served_words


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waits that nobody asked for are short."""
    monkeypatch.setitem(patience.Patience.__init__.__kwdefaults__, "first", 0.02)


@pytest.fixture(scope="module")
def tiny():
    return model.load("tiny"), model.load_tokenizer("tiny")


def rollout():
    tokens = torch.tensor([[3, 4, 5, 6, 7], [5, 4, 3, 8, 9]])
    mask = torch.tensor([[False, False, True, True, True]] * 2)
    return Rollout(
        tokens=tokens,
        mask=mask,
        logp=torch.zeros(2, 5),
        length=torch.tensor([5, 5]),
        truncated=torch.zeros(2, dtype=torch.bool),
        group=torch.arange(2),
        version=torch.zeros(2, dtype=torch.long),
    )


def met(fake, tokenizer, **options):
    config = EngineConfig(type="openai", servers=(fake.url,), batch=1, **options)
    return served_words(config, tokenizer, vocabulary=fake.lm.config.vocab_size, top_k=2)


@pytest.mark.parametrize("status", [429, 503, 500, 408])
def test_a_teacher_that_is_busy_is_asked_again(tiny, status, capsys):
    lm, tokenizer = tiny
    fake = FakeServer(lm, tokenizer)
    with serving(fake):
        teacher = met(fake, tokenizer)
        want = teacher.score(rollout(), range(2), 2)
        fake.busy = [(status, "")] * 4
        found = teacher.score(rollout(), range(2), 2)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    assert f"warning: teacher: {fake.url}: /inference/v1/generate: status {status}" in capsys.readouterr().err


def test_a_teacher_that_says_when_to_come_again_is_left_alone_until_then(tiny):
    """Longer than its tries would last, and no try of it."""
    lm, tokenizer = tiny
    fake = FakeServer(lm, tokenizer)
    with serving(fake):
        teacher = met(fake, tokenizer)
        fake.busy = [(429, "1")] + [(429, "0")] * (2 * patience.TRIES)
        began = time.monotonic()
        teacher.score(rollout(), [0], 2)
    assert time.monotonic() - began >= 1


def test_a_teacher_that_is_not_ready_yet_is_met_later(tiny):
    lm, tokenizer = tiny
    fake = FakeServer(lm, tokenizer, busy=[(503, ""), (503, "0"), (429, "")])
    with serving(fake):
        assert met(fake, tokenizer).known.model == "tiny"
    assert not fake.busy
    with pytest.raises(ValueError, match=r"^teacher: http"):  # nobody is there: a wrong address
        met(fake, tokenizer)


def test_patience_ends(tiny, monkeypatch):
    lm, tokenizer = tiny
    fake = FakeServer(lm, tokenizer)
    with serving(fake):
        teacher = met(fake, tokenizer)
        fake.busy = [(503, "")] * 1000
        with pytest.raises(EngineDead, match="status 503"):
            teacher.score(rollout(), [0], 2)
        assert 1000 - len(fake.busy) == patience.TRIES
        fake.busy = [(503, "100000")] * 1000  # beyond the deadline
        began = time.monotonic()
        with pytest.raises(EngineDead, match="status 503"):
            teacher.score(rollout(), [0], 2)
        assert time.monotonic() - began < 60 and len(fake.busy) == 999


@pytest.mark.parametrize("after", ["", "1"])
def test_an_engine_whose_only_server_is_busy_waits_for_it(tiny, after):
    lm, tokenizer = tiny
    fake = FakeServer(lm, tokenizer)
    with serving(fake):
        config = EngineConfig(type="openai", servers=(fake.url,), batch=1, alone=True)
        engine = get_engine(config, lm, tokenizer)
        want = engine.generate([[3, 4]], [7], n=1, sampling=Sampling(max_new=3))
        fake.busy = [(429, after)] * 3
        began = time.monotonic()
        found = engine.generate([[3, 4]], [7], n=1, sampling=Sampling(max_new=3))
        engine.close()
    assert torch.equal(want.tokens, found.tokens)
    assert not after or time.monotonic() - began >= 1


def test_waits_double_up_to_a_limit_and_end_with_the_tries():
    ours = patience.Patience(first=0.5)
    waits = [ours.wait() for _ in range(patience.TRIES)]
    assert waits[-1] is None and None not in waits[:-1]
    for i, wait in enumerate(waits[:-1]):
        longest = min(patience.MOST, 0.5 * 2**i)
        assert longest / 2 <= wait <= longest
    ours = patience.Patience(deadline=100)
    assert all(ours.wait(40.0) == 40 for _ in range(20))  # put off by the server: no try
    assert ours.wait(101.0) is None
