"""Log-probs and the distribution that is sampled from: one definition for the engine and the trainer."""

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn.logprob import entropy_from_logits, linear_logprob, log_probs_from_logits, truncate
from rft_fn.types import Sampling

seeds = st.integers(0, 2**32)


def logits_and_target(seed, rows=4, vocab=9, spread=3.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, vocab)) * spread, rng.integers(0, vocab, rows)


@given(seed=seeds, temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]))
def test_log_probs_and_entropy_against_the_definition(seed, temperature):
    z, y = logits_and_target(seed)
    got = log_probs_from_logits(torch.from_numpy(z), torch.from_numpy(y), temperature=temperature)
    want = ref.log_softmax(z, temperature)[np.arange(4), y]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    entropy = entropy_from_logits(torch.from_numpy(z), temperature=temperature)
    np.testing.assert_allclose(entropy, [ref.entropy(row, temperature) for row in z], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_have_log_probs_in_float32(dtype):
    """What goes wrong elsewhere: a softmax in bf16, which under a bf16 trainer is the live branch:
    off by up to 0.05 nats."""
    g = torch.Generator().manual_seed(0)
    z = (3 * torch.randn(64, 4096, generator=g)).to(dtype)
    y = torch.randint(0, 4096, (64,), generator=g)
    got = log_probs_from_logits(z, y)
    want = z.double().log_softmax(-1).gather(-1, y[:, None])[:, 0]
    assert got.dtype == torch.float32 and (got - want).abs().max() <= 1e-5
    naive = z.log_softmax(-1).gather(-1, y[:, None])[:, 0]
    assert (naive.double() - want).abs().max() > 1e-3  # the bound means something here
    entropy = -(z.double().softmax(-1) * z.double().log_softmax(-1)).sum(-1)
    assert (entropy_from_logits(z) - entropy).abs().max() <= 1e-4


def test_the_temperature_divides_the_training_logits_too():
    """What goes wrong elsewhere: sampled at temperature 0.6, scored at 1: log-probs
    of a distribution nobody drew from."""
    z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    assert log_probs_from_logits(z, y, temperature=0.5).item() == pytest.approx(
        -np.log1p(np.exp(-4)), abs=1e-6
    )


def test_log_probs_survive_large_and_impossible_logits():
    z = torch.tensor([[1e4, 0.0, -torch.inf], [-1e4, -1e4, -torch.inf]], requires_grad=True)
    logp = log_probs_from_logits(z, torch.tensor([0, 1]))
    assert logp.tolist() == pytest.approx([0.0, -np.log(2)], abs=1e4 * 2**-23)  # the spacing of such logits
    entropy = entropy_from_logits(z)
    (g,) = torch.autograd.grad(logp.sum() + entropy.sum(), z)
    assert entropy.tolist() == pytest.approx([0.0, np.log(2)], abs=1e-6) and g.isfinite().all()


# ---------- what is sampled from


@given(
    seed=seeds,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.3, 0.8, 0.99, 1.0]),
)
def test_truncated_distribution_against_the_definition(seed, temperature, top_k, top_p):
    z, _ = logits_and_target(seed)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    got = truncate(torch.from_numpy(z), sampling).softmax(-1)
    want = [ref.truncated(row, temperature, top_k, top_p) for row in z]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_the_token_that_crosses_top_p_stays():
    z = torch.tensor([0.5, 0.3, 0.2]).log()
    kept = lambda p: truncate(z, Sampling(top_p=p)).isfinite().tolist()  # noqa: E731
    assert kept(0.4) == [True, False, False]
    assert kept(0.6) == [True, True, False]
    assert kept(0.9) == [True, True, True]
    assert kept(1e-9) == [True, False, False]  # never nothing


def test_nothing_is_cut_at_the_defaults_and_greedy_leaves_the_logits():
    z = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(truncate(z, Sampling()), z)
    assert torch.equal(truncate(z, Sampling(temperature=0.0)), z)


@given(seed=seeds, top_k=st.integers(1, 4), top_p=st.sampled_from([0.3, 0.9]))
def test_keep_makes_the_log_prob_of_the_target_finite_and_nothing_else(seed, top_k, top_p):
    """After an update a token that the rollout did draw may leave the top k: its
    log-prob has to stay a number."""
    z, y = (torch.from_numpy(x) for x in logits_and_target(seed))
    sampling = Sampling(top_k=top_k, top_p=top_p)
    plain, kept = truncate(z, sampling), truncate(z, sampling, keep=y)
    hit = torch.nn.functional.one_hot(y, z.shape[-1]).bool()
    assert torch.equal(kept[hit], z[hit]) and torch.equal(kept[~hit], plain[~hit])
    assert log_probs_from_logits(kept, y).isfinite().all()


def test_the_cut_carries_no_gradient_and_leaves_none_outside():
    z = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    logp = log_probs_from_logits(truncate(z, Sampling(top_k=2)), torch.tensor([0]))
    (g,) = torch.autograd.grad(logp.sum(), z)
    p = torch.tensor([2.0, 1.0]).softmax(-1)
    torch.testing.assert_close(g, torch.tensor([[1 - p[0], -p[1], 0.0, 0.0]]))


# ---------- straight from hidden states


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_linear_logprob_is_the_log_prob_of_the_logits_with_its_gradient(temperature):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(5, 4, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.randn(11, 4, generator=g, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([3, 10, 0, 7, 7])

    def naive():
        z = h @ w.T
        return log_probs_from_logits(z, y, temperature=temperature), entropy_from_logits(
            z, temperature=temperature
        )

    out = linear_logprob(h, w, y, temperature=temperature, entropy=True)
    for got, want in zip((out.logp, out.entropy), naive()):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        pair = [
            torch.autograd.grad((x * torch.arange(5.0)).sum(), (h, w), retain_graph=True) for x in (got, want)
        ]
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)


def test_linear_logprob_ignores_labels_of_minus_100():
    h, w = torch.randn(2, 4, requires_grad=True), torch.randn(11, 4)
    out = linear_logprob(h, w, torch.tensor([-100, 3]))
    (g,) = torch.autograd.grad(out.logp.sum(), h)
    assert out.logp[0] == 0 and (g[0] == 0).all() and out.logp[1] < 0 and g[1].abs().max() > 0
