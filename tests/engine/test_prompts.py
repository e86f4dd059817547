"""Prompts that their samples read in one place: by definition a row attends to all of its tokens."""

import types

import numpy as np
import pytest
import ref
import tiny
import torch
from each_case import each
from families import small
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batching import KEYS, PROMPTS, batching_of, same, sampled
from transformers.cache_utils import DynamicLayer

import rft_fn as rft
from rft_fn import engine
from rft_fn.engine.hf import buffers, shared_prefix
from rft_fn.engine.hf.buffers import KVBuffers
from rft_fn.engine.hf.row_batch import prefill
from rft_fn.engine.hf.shared_prefix import Layer, SharedPrefixes

HEADS, GROUPED, SIZE = 2, 3, 4  # heads of keys, queries to each, numbers of a head
MODULE = types.SimpleNamespace(layer_idx=0)


def drawn(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


class Rows:
    """A layer as the engine keeps it, and the keys and values of each row as a list says it."""

    def __init__(self, seed, lengths, counts):
        self.rng = np.random.default_rng(seed)
        self.prompts, self.layer, self.known = self.begun(lengths, counts)
        self.seen = torch.ones(len(self.known), 0, dtype=torch.bool)

    def begun(self, lengths, counts):
        """`counts` rows of prompts of `lengths`, with padding that would be seen if it were not hidden."""
        width = max(lengths)
        plain = DynamicLayer()
        keys, values = (drawn(self.rng, len(lengths), HEADS, width, SIZE) for _ in range(2))
        plain.update(keys, values)
        layer = KVBuffers(plain, 1000)
        of = [p for p, count in enumerate(counts) for _ in range(count)]
        seen = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
        known = [
            (keys[p, :, width - size :], values[p, :, width - size :])
            for p, size, count in zip(range(len(lengths)), lengths, counts)
            for _ in range(count)
        ]
        return SharedPrefixes([Layer(*layer.take_prompt_cache(len(of)))], seen, of), layer, known

    def add(self):
        """One more token of each row; what every row gets from all of its own."""
        new = [drawn(self.rng, len(self.known), HEADS, 1, SIZE) for _ in range(2)]
        query = drawn(self.rng, len(self.known), HEADS * GROUPED, 1, SIZE)
        keys, values = self.layer.update(*new)
        self.known = [
            tuple(torch.cat([old, x[r]], 1) for old, x in zip(self.known[r], new))
            for r in range(len(self.known))
        ]
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(self.known), 1)], 1)
        mask = None
        if not self.seen.all():
            mask = self.seen[:, None, None]
        found, _ = shared_prefix.attention(MODULE, query, keys, values, mask, rft_prompts=self.prompts)
        want = [ref.attention(query[r, :, 0], *self.known[r]) for r in range(len(self.known))]
        np.testing.assert_allclose(found[:, 0].numpy(), np.stack(want), rtol=0, atol=1e-12)

    def take(self, rows):
        index = torch.tensor(rows)
        self.known = [self.known[r] for r in rows]
        self.seen = self.seen[index]
        self.layer.take(index, (index != torch.arange(len(index))).nonzero().squeeze(-1))
        self.prompts.take(rows)

    def join(self, lengths, counts):
        other, layer, known = self.begun(lengths, counts)
        self.known += known
        self.seen = torch.cat([self.seen, self.seen.new_zeros(len(known), self.seen.shape[1])])
        self.layer.join(layer)
        self.prompts.join(other)


prompts_of = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4)
step = st.one_of(
    st.tuples(st.just("take"), st.lists(st.integers(0, 99), min_size=1, max_size=9)),
    st.tuples(st.just("join"), prompts_of),
    st.tuples(st.just("add"), st.integers(1, 3)),
)


@settings(deadline=None)
@given(st.integers(0, 99), prompts_of, st.lists(step, max_size=8))
def test_rows_attend_to_all_of_their_tokens(seed, first, steps):
    """Prompts of many lengths and numbers of samples; rows that leave, repeat and move; prompts that join."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "_ROOM", 2)
        rows = Rows(seed, *zip(*first))
        rows.add()
        for kind, given_ in steps:
            if kind == "take":
                rows.take([r % len(rows.known) for r in given_])
            elif kind == "join":
                rows.join(*zip(*given_))
            for _ in range(given_ if kind == "add" else 1):
                rows.add()


def test_prompts_without_rows_are_let_go():
    """Not at once, which would copy the others for each; and padding goes with the longest of them."""
    rows = Rows(0, [5, 2, 3, 1], [2, 2, 2, 2])
    rows.take([2, 3, 4, 6])
    assert rows.prompts.seen.shape == (4, 5)
    rows.take([0, 1, 2])
    assert rows.prompts.seen.shape == rows.prompts.layers[0].keys.shape[::2] == (2, 3)
    rows.add()


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen3"])
def test_samples_are_those_without(kind, monkeypatch):
    """The same tokens, log-probs to rounding; and the prompt's columns are in the cache of no row."""
    lm = small(kind, torch.float32)
    way = batching_of(lm)
    assert way.shares
    read = []
    scores = SharedPrefixes.scores
    monkeypatch.setattr(
        SharedPrefixes, "scores", lambda own, *args: read.append(len(own.of)) or scores(own, *args)
    )
    want = sampled(lm, way._replace(shares=False), 4)
    assert not read
    got = sampled(lm, way, 4)
    assert read
    same(got, want, lm)
    batch = prefill(lm, way, PROMPTS, [3] * len(PROMPTS), 0)
    assert batch.cache.get_seq_length() == 0
    assert [len(x) for x in batch.prompts.layers] == [2] * lm.config.num_hidden_layers


def test_one_sample_shares_with_nobody(monkeypatch):
    """Nothing would be gained, so the engine leaves the model's attention alone."""
    lm = small("Llama", torch.float32)
    eng = engine.hf(lm, tiny.tokenizer(), batch=4)
    read = []
    scores = SharedPrefixes.scores
    monkeypatch.setattr(
        SharedPrefixes, "scores", lambda own, *args: read.append(len(own.of)) or scores(own, *args)
    )
    eng.generate(PROMPTS, KEYS, n=1, sampling=rft.Sampling(max_new=1))
    read.clear()  # what was tried before the first sample
    eng.generate(PROMPTS, KEYS, n=1, sampling=rft.Sampling(max_new=3))
    assert not read
    eng.generate(PROMPTS, KEYS, n=2, sampling=rft.Sampling(max_new=3))
    assert read


@pytest.mark.parametrize("kind", ["Bloom", "Gemma2", "GptOss"])
def test_who_asks_attention_for_more_does_not_share(kind):
    """Biases by position, a cap, sinks: none of them is in attention to a prompt."""
    assert not batching_of(small(kind, torch.float32)).shares


@each("name", ["sliding_window", "softcap", "s_aux", "position_bias", "dropout"])
def test_a_feature_is_refused_by_its_name(name):
    rows = Rows(0, [2], [1])
    new = torch.zeros(1, HEADS, 1, SIZE, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"expected no {name}, got 3"):
        shared_prefix.attention(MODULE, new, new, new, None, rft_prompts=rows.prompts, **{name: 3})


def test_sixteen_bits_share_with_keys_and_values_in_float32():
    """Products of 16 bits would copy buffers with gaps; what attention returns is of the model's type."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        plain = DynamicLayer()
        rng = np.random.default_rng(0)
        plain.update(*(drawn(rng, 2, HEADS, 5, SIZE).bfloat16().to(dtype) for _ in range(2)))
        layer = KVBuffers(plain, 1000, wide=True)
        prompts = SharedPrefixes(
            [Layer(*layer.take_prompt_cache(3))], torch.ones(2, 5, dtype=torch.bool), [0, 0, 1]
        )
        new = [drawn(rng, 3, HEADS, 1, SIZE).bfloat16().to(dtype) for _ in range(2)]
        query = drawn(rng, 3, HEADS * GROUPED, 1, SIZE).bfloat16().to(dtype)
        keys, values = layer.update(*new)
        assert keys.dtype == values.dtype == torch.float32
        found.append(shared_prefix.attention(MODULE, query, keys, values, None, rft_prompts=prompts)[0])
        assert found[-1].dtype == dtype
    assert torch.equal(found[0], found[1].bfloat16())


def test_the_models_attention_is_its_own_again():
    """Also when a forward fails."""
    lm = small("Llama", torch.float32)
    usual = lm.config._attn_implementation
    with pytest.raises(ZeroDivisionError), shared_prefix.shared_attention(lm):
        assert lm.config._attn_implementation != usual
        raise ZeroDivisionError
    assert lm.config._attn_implementation == usual
