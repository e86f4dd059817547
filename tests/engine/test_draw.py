"""Draws from a tree of sums: the definition, the distribution, and what rounding does to them."""

import numpy as np
import pytest
import ref
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn.engine.hf.draws import draw, numbers_per_draw


def numbers(rows, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, numbers_per_draw(vocab), generator=generator, dtype=torch.float64)


def of_a_language(vocab, spread=3.0, seed=1):
    """Logits [V] with a heavy tail: most tokens are rare, and together they are not."""
    return spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 70), st.integers(0, 1000))
def test_a_draw_is_its_definition(vocab, seed):
    p = torch.rand(8, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p[:, ::3] *= p[:, ::3] > 0.5  # some are 0
    p[:, -1] += 0.1
    u = numbers(8, vocab, seed)
    want = [ref.drawn(row.numpy(), own.numpy())[0] for row, own in zip(p, u)]
    assert draw(p, u).tolist() == want


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 64, 129])
def test_the_chances_of_the_choices_multiply_to_the_probability(vocab):
    p = np.random.default_rng(vocab).random(vocab)
    found = {}
    for u in np.random.default_rng(0).random((40 * vocab, numbers_per_draw(vocab))):
        token, chance = ref.drawn(p, u)
        found[token] = chance
    assert len(found) > 0.6 * vocab
    for token, chance in found.items():
        np.testing.assert_allclose(chance, p[token] / p.sum(), rtol=1e-12)


def test_draws_have_the_distribution():
    vocab, n = 11, 40_000
    p = of_a_language(vocab, 1.0).softmax(-1)
    counts = torch.bincount(draw(p.expand(n, -1), numbers(n, vocab)), minlength=vocab).double()
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi2 < 10 + 5 * 20**0.5


@each("u", [0.0, 1 - 2**-53])
@each("only", range(7))
def test_a_token_of_probability_0_is_never_drawn(only, u):
    p = torch.zeros(1, 7)
    p[0, only] = 1e-30
    assert draw(p, torch.full((1, 3), u, dtype=torch.float64)).tolist() == [only]


def test_rounding_of_the_logits_hardly_changes_a_draw():
    """A vocabulary of 49,152 with a heavy tail, moved as far as another size of batch moves it."""
    vocab, n = 49_152, 512
    logits = of_a_language(vocab).expand(n, -1)
    moved = logits + 1e-5 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(2))
    u = numbers(n, vocab)
    p, q = logits.softmax(-1), moved.softmax(-1)
    assert draw(p, u).equal(draw(q, u))

    # in the order of the vocabulary, where everything before a token counts, it does
    def by_order(p):
        cdf = p.double().cumsum(-1)
        return torch.searchsorted(cdf, u[:, :1].contiguous() * cdf[:, -1:])

    assert not by_order(p).equal(by_order(q))


def test_a_row_is_drawn_alike_in_any_company():
    vocab, n = 1000, 64
    p = (of_a_language(n * vocab).view(n, vocab)).softmax(-1)
    u = numbers(n, vocab)
    together = draw(p, u)
    assert together.equal(torch.cat([draw(p[i : i + 1], u[i : i + 1]) for i in range(n)]))
