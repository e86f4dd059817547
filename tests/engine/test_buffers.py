"""Keys and values in buffers against the definition: a list of rows, each a list of tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from rft_fn.engine.hf import buffers
from rft_fn.engine.hf.buffers import KVBuffers

HEADS, SIZE = 2, 3


def tokens(rows, width, start):
    """[rows, HEADS, width, SIZE], all numbers different and none of them 0."""
    count = rows * HEADS * width * SIZE
    return torch.arange(start, start + count, dtype=torch.float64).view(rows, HEADS, width, SIZE)


def filled(rows, width, start=1):
    """A layer of transformers that has read `width` tokens of each row."""
    layer = DynamicLayer()
    keys = tokens(rows, width, start)
    layer.update(keys, -keys)
    return layer


step = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 3)),
    st.tuples(st.just("take"), st.lists(st.integers(0, 99), min_size=1, max_size=9)),
    st.tuples(st.just("join"), st.integers(1, 3), st.integers(1, 9)),
    st.tuples(st.just("crop"), st.integers(1, 2)),
)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.lists(step, max_size=12))
def test_buffers_hold_what_tensors_put_together_anew_hold(rows, width, most, steps):
    """Tokens added, rows taken, joined and columns cropped in any order; zeros before shorter rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "_ROOM", 2)  # so that they grow, and not at each token
        patch.setattr(
            torch.Tensor, "new_empty", lambda x, *shape: torch.full(shape, torch.nan, dtype=x.dtype)
        )
        plain = filled(rows, width)
        assert plain.keys is not None
        layer, want, start = KVBuffers(plain, most), plain.keys.clone(), 10_000
        for kind, *given_ in steps:
            start += 10_000
            if kind == "add":
                new = tokens(len(want), given_[0], start)
                want = torch.cat([want, new], 2)
                layer.update(new, -new)
            elif kind == "take":
                index = torch.tensor([i % len(want) for i in given_[0]])
                want = want[index]
                layer.take(index, (index != torch.arange(len(index))).nonzero().squeeze(-1))
            elif kind == "join":
                other = filled(*given_, start)
                assert other.keys is not None
                both = [want, other.keys]
                widest = max(x.shape[2] for x in both)
                want = torch.cat([F.pad(x, (0, 0, widest - x.shape[2], 0)) for x in both])
                layer.join(KVBuffers(other, most))
            elif want.shape[2] > given_[0]:
                want = want[:, :, given_[0] :]
                layer.crop_left(given_[0])
            keys, values = layer.held()
            assert torch.equal(keys, want) and torch.equal(values, -want)
            assert layer.get_seq_length() == want.shape[2]


@pytest.mark.parametrize("most, room", [(1000, 64), (7, 7)])
def test_a_token_is_written_in_place(most, room):
    """One allocation serves the samples of the prompts and 64 tokens of each, or as many as may come."""
    layer = KVBuffers(filled(2, 40), most)
    index = torch.arange(2).repeat_interleave(4)
    layer.take(index, index)
    assert layer.buffers[0].shape == (8, HEADS, 40 + room, SIZE)
    places = set()
    for t in range(room):
        new = tokens(8, 1, 1000 + t)
        layer.update(new, new)
        places.add(layer.buffers[0].data_ptr())
    assert len(places) == 1


def test_a_full_buffer_grows_by_half():
    layer = KVBuffers(filled(2, 200), 1000)
    new = tokens(2, 1, 1000)
    layer.update(new, new)
    assert layer.buffers[0].shape[2] == 200 + 100


def test_only_keys_and_values_of_all_tokens_fit():
    assert buffers.fits(filled(1, 2))
    assert not buffers.fits(DynamicLayer())

    class Windowed(DynamicLayer):
        """A layer that forgets."""

    other = Windowed()
    other.update(tokens(1, 2, 1), tokens(1, 2, 1))
    assert not buffers.fits(other)
