"""The bias of importance corrections, by enumeration: against loops, and for each correction there is."""

import math
from pathlib import Path

import numpy as np
import pytest
import ref
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import testing, weight
from rft_fn.testing.cases import normal

seeds = st.integers(0, 2**32)


def nothing(w, old_logp, logp, mask):
    """Off-policy samples, taken as they are."""
    return w


def token(w, old_logp, logp, mask):
    return weight.importance(w, old_logp, logp)


def truncated(w, old_logp, logp, mask):
    return weight.truncated_is(w, old_logp, logp)


def masked(w, old_logp, logp, mask):
    return weight.masked_is(w, old_logp, logp)


def icepop(w, old_logp, logp, mask):
    return weight.icepop(w, old_logp, logp)


def mean_ratio(w, old_logp, logp, mask):
    """The geometric mean of the ratios, as sequence-level policy losses have it."""
    d = ((old_logp - logp) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return w * d.exp()


def upside_down(w, old_logp, logp, mask):
    return weight.importance_seq(w, logp, old_logp, mask)


def prefix(w, old_logp, logp, mask):
    """The ratio of what came before and of the token: the future is left out, which the reward is for."""
    return w * ((old_logp - logp) * mask).cumsum(-1).exp()


def three_lines(w, old_logp, logp, mask):
    """A user's own."""
    return w * torch.where(mask, old_logp - logp, 0).sum(-1, keepdim=True).exp()


BIASED = {
    "nothing": nothing,
    "token": token,
    "truncated": truncated,
    "masked": masked,
    "icepop": icepop,
    "mean_ratio": mean_ratio,
    "upside_down": upside_down,
    "prefix": prefix,
    "truncated_seq": weight.truncated_is_seq,
    "masked_seq": weight.masked_is_seq,
}


@pytest.mark.parametrize("f", [weight.importance_seq, three_lines])
@settings(max_examples=10)
@given(seed=seeds, size=st.sampled_from([(1, 2), (1, 4), (2, 3), (3, 3), (4, 2)]), gap=st.floats(0, 1.5))
def test_the_ratio_of_the_whole_sequence_is_unbiased(f, seed, size, gap):
    testing.check_importance_bias(f, length=size[0], vocab=size[1], seed=seed, gap=gap, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("f", [weight.importance_seq, three_lines])
def test_and_to_rounding_in_the_default_case(f, seed):
    testing.check_importance_bias(f, seed=seed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", BIASED)
def test_every_other_correction_is_biased_and_is_told_by_how_much(name, seed):
    b = testing.importance_bias(BIASED[name], seed=seed)
    words = rf"over all 27 sequences of 3 the expected gradient has a bias of {b.bias:.2g} of its norm "
    words += rf"\(cosine {b.cosine:.4f}, norm ratio {b.norm_ratio:.4f}; allowed 1e-12\); its variance is "
    with pytest.raises(AssertionError, match=words + rf"{b.variance:.2g} times that of on-policy samples"):
        testing.check_importance_bias(BIASED[name], seed=seed)
    assert b.bias > 0.01
    testing.check_importance_bias(BIASED[name], seed=seed, atol=b.bias + 1e-9)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda w, old, new, mask: (old - new).sum(-1, keepdim=True).exp() * mask, "w is left out"),
        (lambda w, old, new, mask: w.square() * (old - new).sum(-1, keepdim=True).exp(), "w is left out"),
        (lambda w, old, new, mask: w * (old - new).sum(-1, keepdim=True).exp() + ~mask, "0 outside mask"),
        (
            lambda w, old, new, mask: (
                w * ((old - new).sum(-1, keepdim=True) * mask.double().mean(-1, keepdim=True)).exp()
            ),
            "tokens outside mask were deleted",
        ),
    ],
)
def test_a_ragged_mask_and_a_random_w_show_what_an_enumeration_does_not(f, message):
    assert testing.importance_bias(f).bias < 1e-12
    with pytest.raises(AssertionError, match=message):
        testing.check_importance_bias(f)


@pytest.mark.parametrize("name", ["token", "prefix", "mean_ratio"])
def test_for_one_token_the_token_is_the_sequence(name):
    testing.check_importance_bias(BIASED[name], length=1, vocab=5)


@pytest.mark.parametrize("name", ["nothing", "upside_down"])
def test_but_not_without_a_ratio(name):
    with pytest.raises(AssertionError, match="over all 5 sequences of 1 the expected gradient has a bias of"):
        testing.check_importance_bias(BIASED[name], length=1, vocab=5)


@pytest.mark.parametrize("name", BIASED)
def test_on_policy_no_correction_corrects_anything(name):
    b = testing.importance_bias(BIASED[name], gap=0.0)
    np.testing.assert_allclose(b, (0.0, 1.0, 1.0, 1.0), atol=1e-12)
    testing.check_importance_bias(BIASED[name], gap=0.0)


def test_the_cap_trades_bias_for_variance():
    """From no weight at all to the full ratio: the bias falls to 0, the variance rises."""
    caps = (0.0, 0.3, 1.0, 2.0, 5.0, 1e6)
    found = [
        testing.importance_bias(lambda *x, cap=cap: weight.truncated_is_seq(*x, cap=cap), seed=3)
        for cap in caps
    ]
    bias, variance = [b.bias for b in found], [b.variance for b in found]
    assert bias == sorted(bias, reverse=True) and variance == sorted(variance)
    assert bias[0] == 1 and variance[0] == 0 and bias[-1] < 1e-12


def policy(logits, vocab, length):
    """The library's table of logits [prefixes, V] as prefix -> probabilities, shorter prefixes first."""
    prefixes = [x for n in range(length) for x in ref.sequences(vocab, n)]
    return dict(zip(prefixes, map(ref.softmax, logits.numpy()), strict=True))


@pytest.mark.parametrize(("length", "vocab"), [(1, 3), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("name", ["nothing", "token", "prefix", "truncated_seq"])
def test_against_the_definition(name, length, vocab):
    """By loops over sequences, tokens and prefixes; the gradient of E[R] from the values of actions."""
    count, gap = (vocab**length - 1) // (vocab - 1), 0.8
    logits = normal(7, "trainer", count, vocab)
    p = policy(logits, vocab, length)
    q = policy(logits + gap * normal(7, "sampler", count, vocab), vocab, length)
    sequences = ref.sequences(vocab, length)
    reward = dict(zip(sequences, normal(7, "reward of the sequence", vocab**length).tolist(), strict=True))

    def moments(f, drawn_from):
        """(mean, trace of the covariance) of the estimate from one sequence."""
        mean, square = 0.0, 0.0
        for x in sequences:
            logs = [[math.log(d[x[:t]][x[t]]) for t in range(length)] for d in (p, q)]
            old, new = (torch.tensor([row], dtype=torch.float64) for row in logs)
            w = f(torch.ones_like(old), old, new, torch.ones_like(old, dtype=torch.bool))[0].tolist()
            g = np.concatenate(list(ref.score_estimate(p, x, reward[x], w).values()))
            mean, square = (
                mean + ref.likelihood(drawn_from, x) * g,
                square + ref.likelihood(drawn_from, x) * g @ g,
            )
        return mean, square - mean @ mean

    mean, variance = moments(BIASED[name], q)
    on_policy, spread = moments(nothing, p)
    want = np.concatenate(list(ref.reward_gradient(p, reward).values()))
    np.testing.assert_allclose(on_policy, want, atol=1e-12)
    size, one = np.linalg.norm(mean), np.linalg.norm(want)
    right = np.linalg.norm(mean - want) / one, mean @ want / size / one, size / one, variance / spread
    got = testing.importance_bias(BIASED[name], length=length, vocab=vocab, seed=7, gap=gap)
    np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-12)


def self_normalised(w, old_logp, logp, mask):
    """Divided by the mean ratio of the batch, which an enumeration has no say in."""
    rho = (old_logp - logp).sum(-1, keepdim=True).exp()
    return w * rho / rho.mean()


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            self_normalised,
            r"correct: with every other sequence left out the weights of the others changed by",
        ),
        (lambda w, *_: w[:, 0], r"correct: expected w \[B, S\] = \[27, 3\], got \[27\]"),
        (lambda w, *_: w * torch.nan, r"a bias of nan of its norm"),
    ],
)
def test_what_has_no_bias_to_speak_of_is_refused(f, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_importance_bias(f)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"length": 0}, r"length, vocab: expected >= 1 and >= 2, got 0 and 3"),
        ({"vocab": 1}, r"length, vocab: expected >= 1 and >= 2, got 3 and 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(size, message):
    with pytest.raises(ValueError, match=message):
        testing.importance_bias(nothing, **size)


@each(
    "name",
    [
        "none",
        "importance",
        "truncated_is",
        "masked_is",
        "icepop",
        "importance_seq",
        "truncated_is_seq",
        "masked_is_seq",
    ],
)
def test_the_table_of_the_docs_is_current(name):
    """docs/algorithms.md: | `name` | bias | cosine | norm | variance |, to two decimals."""
    fn = getattr(weight, name, None)
    take = 4 if name.endswith("_seq") else 3
    found = testing.importance_bias((lambda *args: fn(*args[:take])) if fn else lambda w, *rest: w)
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    row = f"| `{name}` | " + " | ".join(f"{x:.2f}" for x in found) + " |"
    assert row in text, row
